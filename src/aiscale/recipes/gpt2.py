"""Recipes of GPT-2's four sizes, and two larger ones of a report."""

from __future__ import annotations

from aiscale.config import LoopConfig, ModelConfig, OptimizerConfig, ParallelConfig, Run
from aiscale.recipes.registry import OPENWEBTEXT, register, sizes

GPT2_SHAPES = {  #: layers, heads, width: Radford et al. 2019, table 2; the heads as in the released models
    "gpt2": (12, 12, 768),
    "gpt2-medium": (24, 16, 1024),
    "gpt2-large": (36, 20, 1280),
    "gpt2-xl": (48, 25, 1600),
    "gpt2-xxl": (60, 30, 1920),  # these two assumed: published/papers/turing_table5_peak_memory.csv
    "gpt2-xxxl": (96, 30, 2400),
}


def _gpt2(size: str, lr: float) -> Run:
    budget = {"steps": 600_000, "seq_len": 1024, "global_batch": 480, "micro_batch": 12}
    return Run(
        model=ModelConfig(**sizes(*GPT2_SHAPES[size]), vocab_size=50257, max_seq_len=1024),
        data=OPENWEBTEXT,
        optimizer=OptimizerConfig(lr=lr, min_lr=lr / 10, warmup_steps=2000),
        parallel=ParallelConfig(strategy="ddp"),
        loop=LoopConfig(**budget, precision="bf16", eval_every=1000, checkpoint_every=1000),
    )


@register("gpt2")
def gpt2() -> Run:
    """GPT-2 with 124M parameters.

    Shape: Radford et al. 2019. How OpenAI trained it is not published; the budget of 600,000 steps of 480 x 1024
    tokens, the warm-up and the decay follow Karpathy's nanoGPT (config/train_gpt2.py), the learning rate GPT-3's model
    of this size (Brown et al. 2020, table 2.1).
    """
    return _gpt2("gpt2", 6e-4)


@register("gpt2-medium")
def gpt2_medium() -> Run:
    """GPT-2 with 355M parameters; sources as for gpt2."""
    return _gpt2("gpt2-medium", 3e-4)


@register("gpt2-large")
def gpt2_large() -> Run:
    """GPT-2 with 774M parameters; sources as for gpt2."""
    return _gpt2("gpt2-large", 2.5e-4)


@register("gpt2-xl")
def gpt2_xl() -> Run:
    """GPT-2 with 1.6B parameters; sources as for gpt2. OLCF's DDP example is this size."""
    return _gpt2("gpt2-xl", 2e-4)


@register("gpt2-xxl")
def gpt2_xxl() -> Run:
    """GPT-2 with 2.8B parameters, 2.7B without embeddings as in Turing Technical Report 3; the shape is assumed."""
    return _gpt2("gpt2-xxl", 2e-4)


@register("gpt2-xxxl")
def gpt2_xxxl() -> Run:
    """GPT-2 with 6.8B parameters, 6.6B without embeddings as in Turing Technical Report 3; the shape is assumed."""
    return _gpt2("gpt2-xxxl", 2e-4)
