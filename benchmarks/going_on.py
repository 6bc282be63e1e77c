"""Five kills, twice: three replicas that go on without the dead one, and three ranks that restart.

    python benchmarks/going_on.py OUT.json     # about five minutes

Both train the lesson's GPT, on the same batches; each sequence takes 20 ms more, as if each rank
had a device of its own. One rank is killed with SIGKILL after each of KILLED_AFTER. `going on` is
train_elastic.py under keep_going.py; `restarting` is train_ddp.py under torchrun, which saves after
every 10 steps. Both also run undisturbed. The seconds of a step are those at which it was printed.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
from common import machine_facts

from aiscale.lesson.replicas import Replicas

OWN = Path(__file__).parents[1] / "workshop" / "your_own"
RANKS, STEPS, BATCH, SAVE_EVERY, SEQUENCE_S = 3, 260, 12, 10, 0.02
KILLED_AFTER = {33: 2, 77: 1, 125: 0, 171: 2, 219: 1}  #: step: rank; the checkpoint is 4 steps old


def going_on(folder, kills):
    """{"steps": [[seconds, step, loss]], "kills": [...], ...} of a job of replicas."""
    options = [f"--steps={STEPS}", f"--batch={BATCH}", f"--sequence-s={SEQUENCE_S}"]
    killed = []
    with Replicas(folder, *options, replicas=RANKS) as job:
        for step, rank in kills.items():
            job.until(rf"step {step} loss", limit_s=600)
            killed.append(job.said[-1][0])
            job.kill(f"r{rank}")
            if step != list(kills)[-1]:
                job.until(rf"members {RANKS} ", limit_s=600)
        job.wait(limit_s=600)
        told = [(s, text.split()) for s, _, text in job.said]
        rounds = {words[1]: (s, words) for s, words in told if words[0] == "round"}
        return {
            "steps": [[s, int(w[1]), float(w[3])] for s, w in told if w[::2] == ["step", "loss"]],
            "rounds": [[s, int(w[3]), int(w[5])] for s, w in rounds.values()],
            "kills": killed,
            "states": sorted(set(job.states().values())),
        }


def restarting(folder, kills):
    """The same of a job that torchrun starts again, all ranks of it."""
    script = folder / "train_ddp.py"
    step = "        optimizer.step()\n"
    slow = f"        __import__('time').sleep({SEQUENCE_S} * len(batch))\n{step}"
    script.write_text((OWN / script.name).read_text().replace(step, slow))
    (folder / "checkpoint").unlink(missing_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={RANKS}", "--max-restarts=20", "--monitor-interval=0.1"]
    command += [script.name, f"--steps={STEPS}", f"--batch={BATCH}", f"--save-every={SAVE_EVERY}"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    kills, killed, steps, began = dict(kills), [], [], time.monotonic()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, cwd=folder, env=env, **pipes) as job:
        for line in job.stdout:
            if not (found := re.match(r"step (\d+) loss (\S+)", line)):
                continue
            now, step = time.monotonic() - began, int(found[1])
            steps.append([round(now, 3), step, float(found[2])])
            if step in kills:
                children = psutil.Process(job.pid).children()
                ranks = [child for child in children if script.name in child.cmdline()]
                ranks[kills.pop(step)].kill()
                killed.append(round(now, 3))
    if job.returncode:
        raise SystemExit(f"torchrun ended with status {job.returncode}")
    return {"steps": steps, "kills": killed}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT.json")
    args = parser.parse_args()
    found = {
        "ranks": RANKS,
        "steps": STEPS,
        "batch": BATCH,
        "save_every": SAVE_EVERY,
        "sequence_s": SEQUENCE_S,
        "killed_after": list(KILLED_AFTER),
    }
    with TemporaryDirectory() as folder:
        folder = Path(folder, "scripts")
        shutil.copytree(OWN, folder)
        for way in (going_on, restarting):
            for name, kills in (("undisturbed", {}), ("killed", KILLED_AFTER)):
                run = way(folder, kills)
                found.setdefault(way.__name__, {})[name] = run
                last = run["steps"][-1]
                print(f"{way.__name__}, {name}: {last[0]:.1f} s to step {last[1]}, loss {last[2]}")
    args.out.write_text(json.dumps({"machine": machine_facts(), **found}) + "\n")
