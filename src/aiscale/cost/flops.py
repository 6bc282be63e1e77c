"""How many floating-point operations a token costs. A multiply and an add are two.

    flops_per_token(model, seq_len=1024)                 # forward and backward: what MFU is measured against
    flops_by_part(model, 1024, backward=False)           # {"qkv": ..., "attention": ..., ...}
    six_n_flops_per_token(model)                         # 6 N, the rule of thumb

Only matrix products are counted: norms, softmax and GELU are below one per cent at any useful width. Recomputation
(activation checkpointing, the backward pass of flash attention) is not: these are the FLOPs the mathematics needs, as
in the PaLM report's model FLOPs utilization (Chowdhery et al. 2022, appendix B).

Letters: D width, L layers, T tokens in a sequence, V vocabulary, N parameters.
"""

from __future__ import annotations

from typing import Literal

from aiscale.config import ConfigError, ModelConfig
from aiscale.cost.parameters import matmul_parameters, parameter_count

#: The backward pass multiplies twice for every product of the forward pass: once for the input's gradient, once for
#: the weight's.
_BACKWARD = 2


def flops_by_part(
    model: ModelConfig, seq_len: int, backward: bool = True, causal: Literal["full", "half"] = "full"
) -> dict[str, float]:
    """FLOPs of one token by part: qkv, attention (scores and weighted values), attention_out, mlp, head.

    A weight costs a token 2 FLOPs forward. Attention has no weights: q k^T and the product with v cost 2 D each for
    every position looked at, 4 T D a layer. causal "full" counts all T positions, as MFU conventionally does (PaLM,
    Megatron-LM: 12 L T D with the backward pass); "half" counts the (T + 1) / 2 that a token sees on average, what a
    kernel that skips the masked half computes.
    """
    if seq_len < 1:
        raise ConfigError(f"seq_len is {seq_len}: it must be at least 1")
    if causal not in ("full", "half"):
        raise ConfigError(f"causal is {causal!r}: it must be full or half")
    positions = seq_len if causal == "full" else (seq_len + 1) / 2
    weights = matmul_parameters(model)
    forward = {
        "qkv": 2 * weights["qkv"],
        "attention": 4 * model.n_layer * model.d_model * positions,
        "attention_out": 2 * weights["attention_out"],
        "mlp": 2 * weights["mlp"],
        "head": 2 * weights["head"],
    }
    passes = 1 + _BACKWARD if backward else 1
    return {part: float(passes * flops) for part, flops in forward.items()}


def flops_per_token(
    model: ModelConfig, seq_len: int, backward: bool = True, causal: Literal["full", "half"] = "full"
) -> float:
    """FLOPs of one token in a sequence of `seq_len`, forward and (by default) backward; see flops_by_part."""
    return sum(flops_by_part(model, seq_len, backward, causal).values())


def six_n_flops_per_token(model: ModelConfig) -> float:
    """6 N (Kaplan et al. 2020, section 2.1): 2 N forward, 4 N backward. Leaves out attention and counts look-ups."""
    return 6.0 * parameter_count(model)
