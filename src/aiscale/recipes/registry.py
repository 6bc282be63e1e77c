"""Recipes: complete runs with a name. Each is a function that returns a `Run`; its docstring says where it comes from.

What a publication does not say is left at our default, or marked below as ours. What a `Run` cannot hold (dropout, a
layout of tensor and pipeline ranks for a data-parallel strategy) is named in the docstring.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from aiscale.config import ConfigError, DataConfig, LoopConfig, ModelConfig, OptimizerConfig, Run, hint

RECIPES: dict[str, Callable[[], Run]] = {}

# Corpora that `aiscale data prepare` makes; --set data.corpus=embedded takes their place where there is no network.
OPENWEBTEXT = DataConfig(corpus="corpora/openwebtext", tokenizer="bpe", bpe_vocab_size=50257, val_fraction=0.05)
OSCAR = DataConfig(corpus="corpora/oscar", tokenizer="bpe", bpe_vocab_size=50257, val_fraction=0.02)


def recipe(name: str) -> Run:
    """The run of that name; raises ConfigError, naming the nearest, if there is none."""
    if name not in RECIPES:
        raise ConfigError(f"unknown recipe {name!r}: {hint(name, RECIPES)}")
    return dataclasses.replace(RECIPES[name](), name=name)


def sizes(n_layer: int, n_head: int, d_model: int) -> dict[str, int]:
    """A shape as publications' tables give it, for ModelConfig."""
    return {"n_layer": n_layer, "n_head": n_head, "d_model": d_model}


def register(name: str):
    """Enter the function below into RECIPES as `name`; `recipe` gives its run that name."""

    def enter(make: Callable[[], Run]) -> Callable[[], Run]:
        RECIPES[name] = make
        return make

    return enter


# Small runs -----------------------------------------------------------------------------------------------------------


@register("laptop")
def laptop() -> Run:
    """A model that learns English spelling from the embedded corpus: under 20 s on two cores.

    Ours. Its validation loss falls below the entropy of the corpus' character bigrams: it has
    then learnt more than which letter follows which. Rotary positions, because with learned ones a model this small
    needs several times the steps to find out that neighbours matter.
    """
    return Run(
        model=ModelConfig(n_layer=2, n_head=4, d_model=128, vocab_size=256, max_seq_len=256, position="rotary"),
        data=DataConfig(corpus="embedded", tokenizer="byte"),
        optimizer=OptimizerConfig(lr=3e-3, warmup_steps=20, beta2=0.99),
        loop=LoopConfig(steps=200, seq_len=64, global_batch=16, eval_every=50, eval_batches=16),
    )


@register("gpt-c")
def gpt_c() -> Run:
    """The 10.8M model of the GPT-in-C project: 50 epochs at batch 16 and learning rate 3e-4.

    "Distributed GPT2 Model Project" (Sahdev, Mathews, Guerrero), slides "Hyperparameters" and "Toy dataset stats". Its
    code has an `adam.h` and names no schedule, decay or clipping: plain Adam at a constant rate. The head is tied (the
    count of its weights file). The text is ours, by characters, for theirs is not published, and so is the held-out
    tenth: the project trained on the whole text.
    """
    return Run(
        model=ModelConfig(n_layer=6, n_head=6, d_model=384, vocab_size=172, max_seq_len=256),
        data=DataConfig(corpus="embedded", tokenizer="char"),
        optimizer=_plain_adam(3e-4),
        loop=LoopConfig(epochs=50, steps=0, seq_len=256, global_batch=16, eval_every=0, eval_batches=1),
    )


def _plain_adam(lr: float) -> OptimizerConfig:
    return OptimizerConfig(lr=lr, schedule="constant", beta2=0.999, weight_decay=0.0, clip_norm=0.0)
