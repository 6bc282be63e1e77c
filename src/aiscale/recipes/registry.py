"""Recipes: complete runs with a name. Each is a function that returns a `Run`; its docstring says where it comes from.

    run = recipe("laptop").override("loop.steps=100")
    aiscale train --recipe gpt2 --set parallel.strategy=ddp --nproc 4

What a publication does not say is left at our default, or marked below as ours. What a `Run` cannot hold (dropout, the
LAMB optimizer, a layout of tensor and pipeline ranks for a data-parallel strategy) is named in the docstring.
Counts of parameters are those of `cost.parameter_count`, a tied head counted once.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable

from aiscale.config import ConfigError, DataConfig, Run

RECIPES: dict[str, Callable[[], Run]] = {}

# Corpora that `aiscale data prepare` makes; --set data.corpus=embedded takes their place where there is no network.
SHAKESPEARE = DataConfig(corpus="corpora/shakespeare", tokenizer="char")
OPENWEBTEXT = DataConfig(corpus="corpora/openwebtext", tokenizer="bpe", bpe_vocab_size=50257, val_fraction=0.05)
OSCAR = DataConfig(corpus="corpora/oscar", tokenizer="bpe", bpe_vocab_size=50257, val_fraction=0.02)


def recipe(name: str) -> Run:
    """The run of that name; raises ConfigError, naming the nearest, if there is none."""
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}?" if near else f"it may be one of {', '.join(RECIPES)}"
        raise ConfigError(f"unknown recipe {name!r}: {hint}")
    return RECIPES[name]()


def register(name: str):
    """Enter the function below into RECIPES as `name`, which is also the name of its run."""

    def enter(make: Callable[[], Run]) -> Callable[[], Run]:
        RECIPES[name] = make
        return make

    return enter
