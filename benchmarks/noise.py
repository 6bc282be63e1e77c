"""How much the same work varies on this machine: its seconds, over and over, one process.

    python benchmarks/noise.py OUT.json busy       # four minutes; the word says what else ran here
    python benchmarks/noise.py OUT.json --quick quiet

Adds a record to OUT.json, {word: seconds over their median}. Lesson 10 simulates machines with it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from common import machine_facts

from aiscale.errors import write_whole
from aiscale.train.model import build, draw, loss_of
from aiscale.train.options import options

BLOCKS = 400
BLOCK_S = 0.5  #: about, when nothing else runs


class Work:
    """Steps without an optimizer, always the same."""

    def __init__(self) -> None:
        args = options().parse_args([])
        self.model = draw(build(args), args, torch.device("cpu"))
        self.text = torch.randint(0, 256, (16, 65), generator=torch.Generator().manual_seed(0))
        self.steps = 1

    def seconds(self) -> float:
        start = time.perf_counter()
        for _ in range(self.steps):
            loss_of(self.model(self.text[:, :-1]), self.text[:, 1:]).backward()
            self.model.zero_grad()
        return time.perf_counter() - start

    def fit(self, block_s: float) -> None:
        """So many steps that a block takes about `block_s`."""
        self.seconds()
        step_s = min(self.seconds() for _ in range(10))
        self.steps = max(1, round(block_s / step_s))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("word", help="what else runs here: busy, quiet")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    work = Work()
    work.fit(0.01 if args.quick else BLOCK_S)
    load_before = machine_facts()
    seconds = [work.seconds() for _ in range(20 if args.quick else BLOCKS)]
    middle = statistics.median(seconds)
    records = json.loads(args.out.read_text()) if args.out.exists() else {}
    records[args.word] = {
        "machine": load_before,
        "load_average_after": machine_facts()["load_average"],
        "steps": work.steps,
        "median_s": middle,
        "over_median": [round(each / middle, 4) for each in seconds],
    }
    write_whole(args.out, json.dumps(records) + "\n")
    print(f"{args.word}: {middle:.2f} s, from {min(seconds):.2f} to {max(seconds):.2f} s")


if __name__ == "__main__":
    main()
