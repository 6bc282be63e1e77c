"""Bytes that training holds, by category: model states, weight casts, activations.

    training_bytes(model, batch=8, seq_len=1024, precision="bf16")    # at the forward pass's end
    model_state_bytes(model, "adamw", "fp32")                         # or: a number of parameters
    activation_bytes(model, batch=8, seq_len=1024, precision="fp32")  # for the backward pass
    zero_state_bytes(7.5e9, stage=2, dp=64)                           # the ZeRO paper's figure 1

torch holds weights, gradients and AdamW's two moments in fp32 for every precision; autocast adds
16-bit copies of the weights during a step. `strategies` has the bytes of one rank of each strategy.

Letters: B batch, T tokens, D width, H heads, G key/value heads, C width of a head, F width of the
MLP, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Literal

from aiscale.errors import ConfigError
from aiscale.plan.config import HFModelConfig, ModelConfig, Precision
from aiscale.plan.config.choices import ACTIVATIONS, OPTIMIZERS, is_orthogonalized
from aiscale.plan.cost.parameters import (
    Shape,
    check_countable,
    matmul_parameters,
    parameter_count,
    parameter_shapes,
    parameter_tensors,
)

#: Categories in the order in which plots stack them; `parallel` and `meter` use the same names.
CATEGORIES = ("parameters", "gradients", "optimizer states", "weight casts", "activations")

#: Bytes of a weight, gradient, moment, residual stream.
WIDE = {"fp32": 4, "tf32": 4, "bf16": 4, "fp16": 4, "fp64": 8}
#: Bytes of what matrix products read and write.
NARROW = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
#: In units of the weights' width.
MOMENTS = {name: choice.moments for name, choice in OPTIMIZERS.items()}


def counter_bytes(optimizer: str, tensors: int) -> int:
    """Bytes of the step counters, 4 for each tensor."""
    return 4 * tensors if OPTIMIZERS[optimizer].has_counter else 0


def optimizer_bytes(optimizer: str, shapes: Mapping[str, Shape], wide: int) -> int:
    """Bytes of an optimizer's states for these tensors, by name.

    Adafactor keeps of a matrix's second moment one number a row and one a column; Muon one moment
    of what it orthogonalizes, and AdamW's states of the rest.
    """
    numbers, counters = 0.0, 0
    for name, shape in shapes.items():
        orthogonalized = optimizer == "muon" and is_orthogonalized(name, len(shape))
        if optimizer == "adafactor" and len(shape) > 1:
            numbers += prod(shape[:-1]) + prod(shape) // shape[-2]
        else:
            numbers += (1 if orthogonalized else MOMENTS[optimizer]) * prod(shape)
        counters += not orthogonalized
    return int(wide * numbers) + counter_bytes(optimizer, counters)


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def model_state_bytes(
    model: ModelConfig | HFModelConfig | float,
    optimizer: str = "adamw",
    precision: Precision = "fp32",
) -> dict[str, int]:
    """Bytes of parameters, gradients, optimizer states and weight casts, as held by this package.

    model: a configuration (exact to the byte) or a number of parameters. optimizer: adamw (two
    moments), sgd (one, momentum), adamw8bit (two of one byte), sgd_plain (none), and
    `optimizer_bytes`, which need the tensors' shapes. A configuration's AdamW has 4-byte step
    counters too.
    """
    exact = isinstance(model, ModelConfig | HFModelConfig)
    n = parameter_count(model) if exact else model
    wide, narrow = WIDE[precision], NARROW[precision]
    if optimizer in ("adafactor", "muon") and not isinstance(model, ModelConfig):
        raise ConfigError(
            f"the states of {optimizer} depend on the shapes of a GPT's tensors: give its "
            "ModelConfig"
        )
    states = int(wide * MOMENTS[optimizer] * n)
    if exact:
        states += counter_bytes(optimizer, parameter_tensors(model))
    if isinstance(model, ModelConfig):
        states = optimizer_bytes(optimizer, parameter_shapes(model), wide)
    # 16-bit copies of the matrices live until the backward pass.
    cast = sum(matmul_parameters(model).values()) if exact else n
    return {
        "parameters": int(wide * n),
        "gradients": int(wide * n),
        "optimizer states": states,
        "weight casts": int(narrow * cast) if narrow < wide else 0,
    }


def activation_bytes_by_part(
    model: ModelConfig, batch: int, seq_len: int, precision: Precision = "fp32"
) -> dict[str, int]:
    """Bytes that `GPT`'s forward pass keeps for the backward pass, by part, operation by operation.

    The T x T scores are never kept. The loss keeps its log-softmax of the logits, in fp32 at
    least, and a number by which it divides. With activation_checkpointing: the blocks' inputs, and
    one whole block while the backward pass recomputes it.
    """
    check_countable(model)
    D, tokens, L = model.d_model, batch * seq_len, model.n_layer
    wide, narrow = WIDE[precision], NARROW[precision]
    bias = model.n_head * seq_len**2 if model.position == "alibi" else 0
    cast = narrow * bias if narrow < wide else 0  # by autocast, in each block
    where = wide * (2 * seq_len * model.d_head if model.position == "rotary" else 0)
    where += 0 if cast and not model.activation_checkpointing else wide * bias
    norm, stream = _norm_bytes(model, tokens, wide), tokens * D * wide
    last_norm = norm + stream if model.norm != "deepnorm" else 0
    inputs_of_norms = stream if model.parallel_residual else 2 * stream
    block = {
        "norms": 2 * norm + inputs_of_norms,
        "attention": tokens * _attention_bytes_per_token(model, narrow, wide) + cast,
        "mlp": tokens * narrow * (D + ACTIVATIONS[model.activation].kept * model.ff_width),
    }
    blocks = 1 if model.activation_checkpointing else L
    inputs = (L - 1) * stream if model.activation_checkpointing else 0
    return {
        "embeddings": 8 * tokens + (8 * seq_len if model.position == "learned" else 0) + where,
        "attention": blocks * block["attention"],
        "mlp": blocks * block["mlp"],
        "norms": blocks * block["norms"] + last_norm,
        "block_inputs": inputs,
        "head": tokens * D * narrow,
        "logits": (tokens * model.vocab_size + 1) * wide,
    }


def _norm_bytes(model: ModelConfig, tokens: int, wide: int) -> int:
    """Bytes a norm keeps beside its input.

    Mean and 1/deviation of each token, or (RMS) 1/root and the normed input.
    """
    return tokens * wide * (1 + model.d_model if model.norm == "rmsnorm" else 2)


def _attention_bytes_per_token(model: ModelConfig, narrow: int, wide: int) -> int:
    """What attention keeps for the backward pass.

    Input of qkv (D), its output ((H + 2G) C), attention's output (D), and the fused kernel's
    log-sum-exp for each head; rotated q and k are kept in addition, since v is a view of the
    unrotated qkv.
    """
    D, C, H, G = model.d_model, model.d_head, model.n_head, model.kv_heads
    rotated = (H + G) * C if model.position == "rotary" else 0
    return narrow * (2 * D + (H + 2 * G) * C + rotated) + wide * H


def activation_bytes(
    model: ModelConfig, batch: int, seq_len: int, precision: Precision = "fp32"
) -> int:
    """Bytes that a forward pass of `batch` sequences keeps: the sum of activation_bytes_by_part."""
    return sum(activation_bytes_by_part(model, batch, seq_len, precision).values())


def training_bytes(
    model: ModelConfig,
    batch: int,
    seq_len: int,
    precision: Precision = "fp32",
    optimizer: str = "adamw",
) -> dict[str, int]:
    """Bytes of one rank by CATEGORIES when all exist: after the second step's forward pass."""
    states = model_state_bytes(model, optimizer, precision)
    return {**states, "activations": activation_bytes(model, batch, seq_len, precision)}


# Other ways of counting: papers, slides, libraries -----------------------------------------------


def korthikanti_activation_bytes(
    model: ModelConfig,
    batch: int,
    seq_len: int,
    *,
    tp: int = 1,
    sequence_parallel: bool = False,
    recompute: Literal["none", "selective", "full"] = "none",
) -> float:
    """Bytes of all blocks' activations in 16 bits by Korthikanti et al. 2022, table 2.

    arXiv:2205.05198: s b h (34 + 5 a s / h) a layer, with the scores (5 a s / h) and dropout's
    masks (2 of the 34).
    """
    sbh = seq_len * batch * model.d_model
    scores = 5 * model.n_head * seq_len / model.d_model if recompute == "none" else 0.0
    if recompute == "full":
        factor = 2 / (tp if sequence_parallel else 1)
    elif sequence_parallel:
        factor = (34 + scores) / tp
    else:
        factor = 10 + (24 + scores) / tp
    return model.n_layer * sbh * factor


def zero_state_bytes(parameters: float, stage: int, dp: int) -> dict[str, float]:
    """Bytes of one of `dp` ranks under ZeRO stage 0 to 3, mixed precision.

    Rajbhandari et al. 2020, figure 1: 2 + 2 + 12 bytes a parameter with Adam; stage 1 shards the 12
    over dp, stage 2 the gradients too, stage 3 all.
    """
    return {
        "parameters": 2 * parameters / (dp if stage >= 3 else 1),
        "gradients": 2 * parameters / (dp if stage >= 2 else 1),
        "optimizer states": 12 * parameters / (dp if stage >= 1 else 1),
    }
