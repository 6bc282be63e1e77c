"""Runs of equal FLOPs: small GPTs on the source of Python's standard library, for lesson 11.

run = train(16, budget=4e10, rate=2**-5, seed=0)    # {"parameters": 11712, "bytes": ..., "loss": ...}

`benchmarks/isoflop.py` stores its runs with the same `train`. All models have two layers; their width decides the
number of parameters. FLOPs are those of `Shape.flops_per_token`: matrix products, forward and backward.
"""

import math
from functools import cache
from types import SimpleNamespace

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
