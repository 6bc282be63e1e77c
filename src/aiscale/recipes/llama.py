"""Recipes of Llama 3's shape: RMS norm, rotary positions, SwiGLU, and grouped-query attention, four queries a key."""

from __future__ import annotations

import dataclasses

from aiscale.config import LoopConfig, ModelConfig, OptimizerConfig, ParallelConfig, Run
from aiscale.recipes.registry import OPENWEBTEXT, laptop, register, sizes

_LLAMA3 = {"norm": "rmsnorm", "position": "rotary", "activation": "swiglu", "rope_theta": 500_000.0}
_LLAMA3 |= {"tied": False, "bias": False}


@register("llama3-8b")
def llama3_8b() -> Run:
    """Llama 3 8B: 8,030,261,248 parameters, 32 heads of queries on 8 of keys and values.

    Grattafiori et al. 2024 (arXiv:2407.21783), table 3: shape, vocabulary 128,000 (released: 128,256) and peak rate
    3e-4. Batch (4M tokens) and sequence (8192 here; 4096 at first) are those of its 405B's main phase and release;
    warm-up of 8000 steps and the fall to 1 % too. 15T tokens are 3.6 million such steps. The corpus is ours.
    """
    return Run(
        model=ModelConfig(
            **sizes(32, 32, 4096),
            n_kv_head=8,
            d_ff=14336,
            vocab_size=128_256,
            max_seq_len=8192,
            activation_checkpointing=True,
            **_LLAMA3,
        ),
        data=OPENWEBTEXT,
        optimizer=OptimizerConfig(lr=3e-4, min_lr=3e-6, warmup_steps=8000),
        parallel=ParallelConfig(strategy="fsdp"),
        loop=LoopConfig(
            steps=3_600_000, seq_len=8192, global_batch=512, micro_batch=1, precision="bf16", checkpoint_every=1000
        ),
    )


@register("llama3-tiny")
def llama3_tiny() -> Run:
    """Llama 3's architecture on a laptop: 2 layers of 128, 8 heads on 2, on the embedded corpus, in seconds. Ours."""
    model = ModelConfig(
        n_layer=2, n_head=8, n_kv_head=2, d_model=128, d_ff=448, vocab_size=256, max_seq_len=256, **_LLAMA3
    )
    return dataclasses.replace(laptop(), model=model)
