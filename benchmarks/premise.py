"""Do large gradients keep their places? Radius builds on it: measured along a training.

    python benchmarks/premise.py OUT.json [--quick]      # ten minutes on one quiet core

Marks the largest entries of each matrix twice, and counts which are marked both times: of the
gradient, and of Adam's update (by which Radius chooses). The second marking is of other sequences
at the same weights (how much is noise, by the size of the batch), or some steps later (how much
drifts). By chance a share as large as the density is marked again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
from common import machine_facts, text_of
from torch import Tensor, nn

from aiscale.errors import write_whole
from aiscale.train.data import read_windows
from aiscale.train.model import build, draw, loss_of
from aiscale.train.optimizer import make_optimizer
from aiscale.train.options import options

DENSITY = 0.4  #: of Radius' main row
STEPS = (100, 500, 1500)  #: at which places are compared
LAGS = (1, 10, 50, 200)  #: steps to the second marking
BATCHES = (16, 64, 256, 1024)  #: sequences of a gradient whose places are compared
LATER_BATCH = 256  #: sequences of the gradients that are compared over steps
PIECE = 64  #: sequences that are computed at once
#: The group of a tensor, by a part of its name.
GROUPS = {
    "embed": "embeddings",
    "query": "attention",
    "key": "attention",
    "value": "attention",
    "out": "attention",
    "up": "feed-forward",
    "down": "feed-forward",
    "head": "head",
}


class Training:
    """A model that trains in this process, and gradients of it that do not train it."""

    def __init__(self, words: list[str]) -> None:
        self.args = options().parse_args(words)
        self.windows = read_windows(self.args)[0]
        self.model = draw(build(self.args), self.args, torch.device("cpu"))
        self.optimizer = make_optimizer(self.model, self.args)
        self.matrices = {n: p for n, p in self.model.named_parameters() if p.dim() > 1}
        self.steps = 0
        draws = torch.Generator().manual_seed(0)
        self.order = torch.randperm(len(self.windows), generator=draws)
        self.seen = 0

    def sequences(self, number: int) -> Tensor:
        """The next ones, (number, T + 1); each comes once before one comes again."""
        places = torch.arange(self.seen, self.seen + number) % len(self.order)
        self.seen += number
        return self.windows[self.order[places]]

    def backward(self, number: int) -> None:
        """The mean gradient of the next sequences, into .grad."""
        self.optimizer.zero_grad()
        for piece in self.sequences(number).split(PIECE):
            loss = loss_of(self.model(piece[:, :-1]), piece[:, 1:])
            (loss * len(piece) / number).backward()

    def train(self, until: int) -> None:
        while self.steps < until:
            self.backward(self.args.batch)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)
            self.optimizer.step()
            self.steps += 1

    def gradient_places(self, number: int) -> dict[str, Tensor]:
        """{matrix: mask of its largest entries}, of a gradient of `number` sequences."""
        self.backward(number)
        return {name: marked(weight.grad) for name, weight in self.matrices.items()}

    def update_places(self) -> dict[str, Tensor]:
        """The same of Adam's update, as Radius' trainer chooses."""
        places = {}
        for name, weight in self.matrices.items():
            state = self.optimizer.state[weight]
            places[name] = marked(state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-8))
        return places


def marked(values: Tensor) -> Tensor:
    size = values.abs().flatten()
    mask = torch.zeros(len(size), dtype=torch.bool)
    mask[size.topk(int(DENSITY * len(size))).indices] = True
    return mask


def kept(first: dict[str, Tensor], second: dict[str, Tensor]) -> dict[str, float]:
    """{group of tensors, or all: share of the first marks that the second one has}."""
    both, of_first = defaultdict(int), defaultdict(int)
    for name, mask in first.items():
        for group in ("all", group_of(name)):
            both[group] += int((mask & second[name]).sum())
            of_first[group] += int(mask.sum())
    return {group: both[group] / of_first[group] for group in of_first}


def group_of(name: str) -> str:
    return next(group for part, group in GROUPS.items() if part in name)


def measured(training: Training, at: int, quick: bool) -> Iterator[dict]:
    """Rows of one point of the training; it has gone on by the longest lag afterwards."""
    batches, lags = (BATCHES[:1], LAGS[:2]) if quick else (BATCHES, LAGS)
    later_batch = batches[0] if quick else LATER_BATCH
    training.train(at)
    for number in batches:
        first, second = (training.gradient_places(number) for _ in range(2))
        yield {"step": at, "of": "gradient", "batch": number, "lag": 0, "kept": kept(first, second)}
    gradient, update = training.gradient_places(later_batch), training.update_places()
    for lag in lags:
        training.train(at + lag)
        now = training.gradient_places(later_batch)
        row = {"step": at, "batch": later_batch, "lag": lag}
        yield {**row, "of": "gradient", "kept": kept(gradient, now)}
        yield {**row, "of": "update", "kept": kept(update, training.update_places())}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = "1x32" if args.quick else "laptop"
        words = [f"--model={model}", f"--text={text_of(Path(folder))}", "--length=128"]
        words += ["--held-out=0.1", "--lr=2e-3", "--beta2=0.99", "--weight-decay=0.1"]
        training = Training(words)
        rows = []
        for at in STEPS[:1] if args.quick else STEPS:
            for row in measured(training, at, args.quick):
                rows.append(row)
                print(row, flush=True)
    result = {
        "machine": machine_facts(),
        "settings": [word for word in words if "text" not in word],
    }
    result |= {"density": DENSITY, "train_batch": training.args.batch, "rows": rows}
    write_whole(args.out, json.dumps(result, indent=1) + "\n")
    far = [row["kept"]["all"] for row in rows if row["of"] == "update"]
    print(f"of an update's places {statistics.fmean(far):.0%} are kept, {DENSITY:.0%} by chance")


if __name__ == "__main__":
    main()
