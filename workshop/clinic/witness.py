"""One rank of a program, with a witness: what it read, how much it computed, and how it ended.

    python -m witness PROGRAM ARGUMENTS      # as jobs.py starts it: in a folder of the job's own, with RANK set

Writes rank0.out, rank0.err and rank0.json. Programs know nothing of it.
"""

import atexit
import faulthandler
import json
import os
import runpy
import signal
import sys

import model
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

seen = {"steps": [], "in_flight": 0, "draws": []}  # what jobs.py reads
now = {"windows": [], "work": 0}  # of the step that has begun


def watch():
    """Note windows, work and dropout's random numbers as they pass."""
    embed, rand, backward = model.LM.embed, torch.rand, torch.autograd.backward
    flying = [0]

    def noted_embed(self, windows):
        now["windows"] += [[byte for byte in row if byte != model.PAD] for row in windows.tolist()]
        now["work"] += windows[:, 1:].numel()  # padding is computed too
        flying[0] += torch.is_grad_enabled()
        seen["in_flight"] = max(seen["in_flight"], flying[0])
        return embed(self, windows)

    def noted_rand(*size, **how):
        drawn = rand(*size, **how)
        seen["draws"].append([list(drawn.shape), float(drawn.double().sum())])
        return drawn

    def noted_backward(*args, **how):
        flying[0] -= 1
        return backward(*args, **how)

    def noted_step(*_):
        seen["steps"].append(dict(now))
        now.update(windows=[], work=0)

    model.LM.embed, torch.rand, torch.autograd.backward = noted_embed, noted_rand, noted_backward
    register_optimizer_step_post_hook(noted_step)


def keep(rank):
    seen["begun"] = len(seen["steps"]) + bool(now["windows"])
    with open(f"rank{rank}.json", "w") as file:
        json.dump(seen, file)


def main():
    rank = os.environ["RANK"]
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"rank{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=False)
    watch()
    atexit.register(keep, rank)
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
