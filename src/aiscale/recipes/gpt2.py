"""Recipes of GPT-2's shapes: its four sizes, and those of Turing Technical Report 3."""

from __future__ import annotations

from aiscale.config import LoopConfig, ModelConfig, OptimizerConfig, ParallelConfig, Run
from aiscale.recipes.registry import OPENWEBTEXT, SHAKESPEARE, register, sizes

GPT2_SHAPES = {  #: layers, heads, width: Radford et al. 2019, table 2; the heads as in the released models
    "gpt2": (12, 12, 768),
    "gpt2-medium": (24, 16, 1024),
    "gpt2-large": (36, 20, 1280),
    "gpt2-xl": (48, 25, 1600),
}


def _gpt2(size: str, lr: float) -> Run:
    return Run(
        model=ModelConfig(**sizes(*GPT2_SHAPES[size]), vocab_size=50257, max_seq_len=1024),
        data=OPENWEBTEXT,
        optimizer=OptimizerConfig(lr=lr, min_lr=lr / 10, warmup_steps=2000),
        parallel=ParallelConfig(strategy="ddp"),
        loop=LoopConfig(
            steps=600_000,
            seq_len=1024,
            global_batch=480,
            micro_batch=12,
            precision="bf16",
            eval_every=1000,
            checkpoint_every=1000,
        ),
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


# Turing Technical Report 3 --------------------------------------------------------------------------------------------


def _turing(size: str) -> Run:
    return Run(
        model=ModelConfig(**sizes(*GPT2_SHAPES[size]), vocab_size=67, max_seq_len=128, tied=False),
        data=SHAKESPEARE,
        optimizer=OptimizerConfig(lr=3e-4, schedule="constant"),
        parallel=ParallelConfig(strategy="ddp"),
        loop=LoopConfig(epochs=2, steps=0, seq_len=128, global_batch=64, precision="fp16", eval_every=0),
    )


@register("turing-gpt2")
def turing_gpt2() -> Run:
    """Turing Technical Report 3's gpt2: 85.21M parameters without the head.

    Lazauskas and Llewellyn-Jones 2024, doi:10.5281/zenodo.13349541, tables 4 and 5; shape, optimizer (AdamW 3e-4,
    betas 0.9 and 0.95, decay 0.1, clip 1) and default batch 64 from its code, llewelld/lit-GPT. A vocabulary of 67
    (the characters of shakespeare_input.txt) and blocks of 128 are inferred: they give the printed 85.21M and 302.51M
    exactly, as minGPT counts, without its untied head. Its dropout of 0.1 is left out.
    """
    return _turing("gpt2")


@register("turing-gpt2-medium")
def turing_gpt2_medium() -> Run:
    """Turing Technical Report 3's gpt2-medium: 302.51M parameters without the head; sources as for turing-gpt2."""
    return _turing("gpt2-medium")


@register("turing-gpt2-large")
def turing_gpt2_large() -> Run:
    """Turing Technical Report 3's gpt2-large: 708.6M without the head; sources as for turing-gpt2."""
    return _turing("gpt2-large")


@register("turing-gpt2-xl")
def turing_gpt2_xl() -> Run:
    """Turing Technical Report 3's gpt2-xl: 1.48B without the head; sources as for turing-gpt2."""
    return _turing("gpt2-xl")
