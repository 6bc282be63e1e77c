"""Which model for a budget of FLOPs? Runs of five widths for each of four budgets, for lesson 11.

    OMP_NUM_THREADS=1 python benchmarks/isoflop.py isoflop.json    # about half an hour, one thread

For each width and budget the learning rate goes by factors of 2, until the best rate has a worse
neighbour on either side. Seeds that count in no result decide which is better: one, and the mean of
three where runs are so short that they vary much. Then three other seeds run at the best rate. Each
run is written to the file as soon as it ends, so a stopped benchmark goes on where it was. A search
starts at the rate that the smaller budget or the narrower model found.
"""

import json
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean

import torch
from common import machine_facts

from aiscale.errors import write_whole

sys.path.append(str(Path(__file__).parents[1] / "notebooks"))
from instruments.isoflop import SEARCH_SEEDS, SEEDS, WIDTHS, train

FIRST_LOG2_RATE = -5


class Runs:
    """The runs of a file, each by (budget, width, log2 of the rate, seed)."""

    def __init__(self, file):
        self.file, self.runs = file, {}
        if file.exists():
            for run in json.loads(file.read_text())["runs"]:
                self.runs[key_of(run)] = run

    def loss(self, budget, width, log2_rate, seed):
        """The loss of this run, which is made if the file lacks it."""
        asked = {"budget": budget, "width": width, "log2_rate": log2_rate, "seed": seed}
        if key_of(asked) not in self.runs:
            began = time.perf_counter()
            result = train(width, budget, 2.0**log2_rate, seed)
            seconds = round(time.perf_counter() - began, 1)
            date = datetime.now(UTC).isoformat(timespec="seconds")
            self.runs[key_of(asked)] = asked | result | {"seconds": seconds, "date": date}
            self.store()
            print(self.runs[key_of(asked)], flush=True)
        return self.runs[key_of(asked)]["loss"]

    def store(self):
        lines = ",\n".join(json.dumps(self.runs[key]) for key in sorted(self.runs))
        machine = json.dumps(machine_facts())
        write_whole(self.file, f'{{\n"machine": {machine},\n"runs": [\n{lines}\n]\n}}\n')


def key_of(run):
    return run["budget"], run["width"], run["log2_rate"], run["seed"]


def best_rate(runs, budget, width, start):
    """The best log2 of the rate on the seeds of the search, both neighbours of which are worse."""

    def loss(log2_rate):
        return fmean(runs.loss(budget, width, log2_rate, seed) for seed in SEARCH_SEEDS[budget])

    best = start
    while True:
        better = min((best - 1, best, best + 1), key=loss)
        if better == best:
            return best
        best = better


def main():
    torch.set_num_threads(1)
    runs = Runs(Path(sys.argv[1]).absolute())
    found = {}  # of each width, the last rate that a search found
    for budget, widths in WIDTHS.items():
        for width in widths:
            narrower = [found[other] for other in widths if other < width and other in found]
            start = found.get(width, narrower[-1] if narrower else FIRST_LOG2_RATE)
            found[width] = best_rate(runs, budget, width, start)
        for seed in SEEDS:
            for width in widths:
                runs.loss(budget, width, found[width], seed)


if __name__ == "__main__":
    main()
