"""Records workshop/incidents: what three runs of 64 ranks leave, each with one planted fault.

    python tools/record_incidents.py

The ranks are processes of this machine that train a tiny model by hand, with gloo. A run leaves
each rank's last collectives (torch's flight recorder), its log, and the milliseconds of its steps.
"""

from __future__ import annotations

import gzip
import json
import os
import pickle
import random
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

RANKS, NODES = 64, 8
STEPS = 12
WIDTH = 12
OUT = Path(__file__).parents[1] / "workshop" / "incidents"
INCIDENTS = (
    ("1_it_stands_still", {"kind": "skip", "rank": 41, "from_step": 7}),
    ("2_it_got_slower", {"kind": "slow", "rank": 26, "from_step": 4}),
    ("3_the_loss_exploded", {"kind": "data", "rank": 53, "from_step": 6}),
)


class Rank:
    """One rank of a run: what it does, and what it writes down."""

    def __init__(self, rank: int, fault: dict):
        self.rank, self.fault = rank, fault
        self.log: list[str] = []
        self.steps: list[dict] = []
        self.random = random.Random(rank)
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 1)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)

    def say(self, words: str) -> None:
        self.log.append(f"node{self.rank // NODES} rank{self.rank:02} {words}")

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = torch.Generator().manual_seed(1000 * step + self.rank)
        x = torch.randn(8, WIDTH, generator=numbers)
        y = x.sum(1, keepdim=True).tanh()
        if self.is_sick("data", step):
            x *= 80  # a shard that was written in other units
        return x, y

    def is_sick(self, kind: str, step: int) -> bool:
        fault = self.fault
        return fault["kind"] == kind and fault["rank"] == self.rank and step >= fault["from_step"]

    def train(self) -> None:
        for step in range(STEPS):
            began = time.monotonic()
            x, y = self.batch(step)
            time.sleep(0.03 + 0.004 * self.random.random())
            if self.is_sick("slow", step):
                time.sleep(0.09)  # a clock that is throttled
            loss = (self.model(x) - y).square().mean()
            loss.backward()
            computed = time.monotonic()
            self._tell_decoys(step)
            norm = sum(p.grad.square().sum() for p in self.model.parameters()).sqrt().item()
            if self.is_sick("skip", step):
                self.say(f"step {step} WARNING batch dropped: KeyError('text')")
                self.optimizer.zero_grad()
                continue
            self._reduce()
            reduced = time.monotonic()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.say(f"step {step} loss {loss.item():.4f} own gradient {norm:.3f}")
            spent = {"compute_ms": computed - began, "all_reduce_ms": reduced - computed}
            self.steps.append({"step": step} | {k: round(1e3 * s, 1) for k, s in spent.items()})

    def _reduce(self) -> None:
        # As buckets: the last layer first.
        for layer in (self.model[2], self.model[0]):
            flat = torch.cat([layer.weight.grad.flatten(), layer.bias.grad])
            dist.all_reduce(flat)
            flat /= RANKS
            layer.weight.grad.copy_(flat[: layer.weight.numel()].view_as(layer.weight))
            layer.bias.grad.copy_(flat[layer.weight.numel() :])

    def _tell_decoys(self, step: int) -> None:
        """What healthy ranks say, too."""
        if self.random.random() < 0.02:
            self.say(
                f"step {step} WARNING loader: worker 1 was late by {self.random.randint(3, 40)} ms"
            )
        if self.random.random() < 0.01:
            self.say(f"step {step} NCCL WARN retrying on hsn{self.random.randint(0, 3)}")

    def left(self) -> dict:
        entries = pickle.loads(c10d._dump_fr_trace(True, False, False))["entries"]
        dump = [_collective(entry) for entry in entries if "all_reduce" in entry["profiling_name"]]
        return {"rank": self.rank, "log": self.log, "steps": self.steps, "collectives": dump}


def _collective(entry: dict) -> list:
    """(number, operation, numbers sent), as in the lesson's exercise."""
    sent = torch.Size(entry["input_sizes"][0]).numel()
    return [entry["collective_seq_id"], "all_reduce", sent]


def run_rank(rank: int, fault: dict, folder: Path) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=60),
    )
    here = Rank(rank, fault)
    try:
        here.train()
        dist.barrier()
        here.say("done")
    except RuntimeError as error:
        here.say(f"ERROR {str(error).splitlines()[0][:120]}")
    Path(folder, f"{rank}.json").write_text(json.dumps(here.left()))


def forked(rank: int, fault: dict, folder: Path) -> int:
    """The number of a new process that runs one rank."""
    child = os.fork()
    if child:
        return child
    try:
        run_rank(rank, fault, folder)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def record(name: str, fault: dict) -> None:
    with tempfile.TemporaryDirectory() as folder:
        children = [forked(rank, fault, Path(folder)) for rank in range(RANKS)]
        status = [os.waitpid(child, 0)[1] for child in children]
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(RANKS)]
    assert not any(status), status
    lines = "".join(f"{json.dumps(each)}\n" for each in found)
    with gzip.GzipFile(OUT / f"{name}.jsonl.gz", "wb", mtime=0) as file:
        file.write(lines.encode())
    print(name, (OUT / f"{name}.jsonl.gz").stat().st_size, "bytes", file=sys.stderr)


if __name__ == "__main__":
    os.environ["TORCH_FR_BUFFER_SIZE"] = "24"  # the newest entries of each rank
    torch.set_num_threads(1)
    OUT.mkdir(exist_ok=True)
    for name, fault in INCIDENTS:
        record(name, fault)
