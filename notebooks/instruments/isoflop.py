"""Runs of equal FLOPs: small GPTs on the source of Python's standard library, for lesson 11.

run = train(16, budget=4e10, rate=2**-5, seed=0)        # {"parameters": 11712, "bytes": ..., "loss": ...}
parameters, read, losses = curve(published.measured("isoflop")["runs"], 4e10)
best, loss, rise = lowest(parameters, losses.mean(1))   # of the parabola through the means

`benchmarks/isoflop.py` stores its runs with the same `train`. All models have two layers; their width decides the
number of parameters. FLOPs are those of `Shape.flops_per_token`: matrix products, forward and backward.
"""

import math
from collections import defaultdict
from functools import cache
from types import SimpleNamespace

import numpy as np
import torch
from torch.nn.utils import clip_grad_norm_

from aiscale.train.model import GPT, draw, loss_of
from aiscale.train.prepare.corpus import find_text
from aiscale.train.presets import Shape

LAYERS, BATCH, LENGTH = 2, 8, 64
#: of each budget in FLOPs: five widths around the best one
WIDTHS = {
    1e10: (4, 6, 8, 12, 16),
    4e10: (6, 8, 12, 16, 24),
    1.6e11: (12, 16, 24, 32, 48),
    6.4e11: (16, 24, 32, 48, 64),
}
SEEDS = (0, 1, 2)
#: of each budget: learning rates are searched on them, and they count in no result; the shortest runs vary most
SEARCH_SEEDS = {1e10: (3, 4, 5), 4e10: (3, 4, 5), 1.6e11: (3,), 6.4e11: (3,)}
HELD_OUT_BYTES = 2**17


@cache
def corpus():
    """(training text, held-out text): nine tenths and a tenth of the files, one number a byte."""
    text = torch.frombuffer(bytearray("".join(find_text("stdlib")).encode()), dtype=torch.uint8)
    return text.split(len(text) * 9 // 10 + 1)


def windows(text, starts):
    """Inputs and targets (B, T) of the windows that begin at `starts`."""
    rows = text[starts[:, None] + torch.arange(LENGTH + 1)].long()
    return rows[:, :-1], rows[:, 1:]


def shape_of_width(width):
    """Heads of 16 numbers, fewer where the width is less; the head has the embedding's weights."""
    heads = max(1, width // 16)
    return Shape(layers=LAYERS, heads=heads, width=width, vocabulary=256, context=LENGTH, tied=True)


def embeddings_of(width):
    """Parameters of the rows of bytes, which the head shares, and of places."""
    return (256 + LENGTH) * width


def steps_of(width, budget):
    """How many steps spend the budget."""
    return round(budget / shape_of_width(width).flops_per_token(LENGTH) / (BATCH * LENGTH))


def train(width, budget, rate, seed):
    """One run: AdamW, warm-up over a tenth of its steps, then a cosine to zero."""
    model = draw(GPT(shape_of_width(width)), SimpleNamespace(model=f"{LAYERS}x32", seed=seed), "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    text, order = corpus()[0], torch.Generator().manual_seed(seed)
    steps = steps_of(width, budget)
    for step in range(1, steps + 1):
        done = step / steps
        optimizer.param_groups[0]["lr"] = rate * min(done / 0.1, (1 + math.cos(math.pi * done)) / 2)
        inputs, targets = windows(text, torch.randint(len(text) - LENGTH, (BATCH,), generator=order))
        loss = loss_of(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return {
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "steps": steps,
        "bytes": steps * BATCH * LENGTH,
        "loss": held_out_loss(model),
    }


@torch.no_grad()
def held_out_loss(model):
    """Nats a byte of text that no run trained on."""
    batches = torch.arange(0, HELD_OUT_BYTES, LENGTH).split(256)
    pairs = [windows(corpus()[1], starts) for starts in batches]
    return sum(loss_of(model(inputs), targets).item() for inputs, targets in pairs) / len(pairs)


# Stored runs ----------------------------------------------------------------------------------------------------------


def best_rates(runs):
    """{(budget, width): the rate with the lowest loss on the seeds of the search}."""
    searched = defaultdict(lambda: defaultdict(list))
    for run in runs:
        if run["seed"] in SEARCH_SEEDS[run["budget"]]:
            searched[run["budget"], run["width"]][run["log2_rate"]].append(run["loss"])
    found = {}
    for case, losses in searched.items():
        most = max(map(len, losses.values()))
        means = {rate: np.mean(values) for rate, values in losses.items() if len(values) == most}
        found[case] = 2.0 ** min(means, key=means.get)
    return found


def chosen(runs, budget, width):
    """The runs of the seeds that count, at the rate of the search."""
    rate = best_rates(runs).get((budget, width))
    mine = [run for run in runs if (run["budget"], run["width"]) == (budget, width) and run["seed"] in SEEDS]
    return sorted((run for run in mine if 2.0 ** run["log2_rate"] == rate), key=lambda run: run["seed"])


def budgets_of(runs):
    """The budgets of which every width has all its seeds."""
    return [b for b, widths in WIDTHS.items() if all(len(chosen(runs, b, w)) == len(SEEDS) for w in widths)]


def curve(runs, budget):
    """(parameters, bytes, losses of the seeds) of a budget, a row for each width."""
    rows = [chosen(runs, budget, width) for width in WIDTHS[budget]]
    parameters = np.array([row[0]["parameters"] for row in rows])
    read = np.array([row[0]["bytes"] for row in rows])
    return parameters, read, np.array([[run["loss"] for run in row] for row in rows])


def lowest(parameters, losses):
    """Where the parabola in log2(parameters) through these points is lowest: (parameters, loss, rise at half or twice
    as many)."""
    rise, slope, height = np.polyfit(np.log2(parameters), losses, 2)
    at = -slope / (2 * rise)
    return 2.0**at, height + slope * at / 2, rise


def parabola(parameters, best, loss, rise):
    return loss + rise * np.log2(parameters / best) ** 2


def draw_curves(axes, runs, live, by_hand=None):
    """A panel of `axes` for each budget: the mean of the seeds and their range, what ran here (`live`), and parabolas
    {budget: (best parameters, loss there, rise)}; says how far these miss the means."""
    for ax, budget in zip(axes, budgets_of(runs), strict=True):
        parameters, _, losses = curve(runs, budget)
        ax.vlines(parameters, losses.min(1), losses.max(1), color="#0068B8", alpha=0.5)
        ax.plot(parameters, losses.mean(1), "o", color="#0068B8", label="three seeds (stored)")
        if budget in live:
            here = [(run["parameters"], run["loss"]) for run in live[budget]]
            ax.plot(*zip(*here, strict=True), "x", color="black", label="seed 0 (measured here)")
        mine = (by_hand or {}).get(budget, (None,))
        if None not in mine:
            fine = np.geomspace(parameters[0] / 1.3, parameters[-1] * 1.3, 60)
            ax.plot(fine, parabola(fine, *mine), color="#D96709", label="yours")
            miss = np.abs(parabola(parameters, *mine) - losses.mean(1)).mean()
            least = np.abs(parabola(parameters, *lowest(parameters, losses.mean(1))) - losses.mean(1)).mean()
            print(f"{budget:.1e} FLOPs: yours misses the points by {miss:.3f} nats, the best one by {least:.3f}")
        ax.set(xscale="log", title=f"{budget:.1e} FLOPs", ylim=(1.6, 3), xlabel="parameters")
        ax.set_xticks(parameters, [f"{size / 1000:.3g}k" for size in parameters])
        ax.minorticks_off()
    axes[0].set_ylabel("held-out loss (nats a byte)")
    axes[0].legend(fontsize=8, loc="upper left")
