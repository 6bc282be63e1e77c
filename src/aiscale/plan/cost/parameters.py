"""Exact parameter counts of a GPT by part, and the FLOPs of a token.

    parameters(model)                      # {"token_embedding": ..., "attention": ..., ...}
    flops_per_token(model, seq_len=1024)   # forward and backward: what MFU is measured against

A multiply and an add are two FLOPs. Only matrix products count, and nothing that is computed twice
(Chowdhery et al. 2022, appendix B).

Letters: D width, L layers, H heads, G key/value heads, C width of a head (D = H C), F width of the
MLP, V vocabulary, T tokens in a sequence, N parameters.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from aiscale.errors import ConfigError
from aiscale.plan.config import HFModelConfig, ModelConfig
from aiscale.plan.config.choices import is_orthogonalized

Shape = tuple[int, ...]

_EXACT = ("gpt2", "gpt_neox", "llama", "mistral")  # each part as large as in our GPT


def as_gpt(model: ModelConfig | HFModelConfig) -> ModelConfig:
    """Our GPT with the same matrices, for formulas in which only those count."""
    return model.shape if isinstance(model, HFModelConfig) else model


def layer_parameters(model: ModelConfig) -> dict[str, int]:
    """Parameters of one block by tensor group: qkv, attention_out, mlp, norms.

    For GPT-2's block (G = H, F = 4 D) the matrices are 3 D^2 + D^2 + 8 D^2 = 12 D^2.
    """
    groups = {
        "qkv": ("attn.qkv.", "attn.query.", "attn.key.", "attn.value."),
        "attention_out": "attn.out.",
        "mlp": "mlp.",
        "norms": ("attn_norm.", "mlp_norm."),
    }
    shapes = block_shapes(as_gpt(model)).items()
    return {
        part: sum(prod(shape) for name, shape in shapes if name.startswith(names))
        for part, names in groups.items()
    }


def check_countable(model: ModelConfig) -> None:
    """Raise ConfigError for a mixture, and where positions are learned from attention's scores.

    torch's attention then keeps the scores by ways of its own.
    """
    check_dense(model)
    if model.position in ("t5", "shaw", "huang"):
        raise ConfigError(
            f"model.position {model.position}: torch's attention keeps the scores that "
            "something learns from, which no formula here counts: measure it instead "
            "(meter.held_bytes)"
        )


def parameters(model: ModelConfig | HFModelConfig) -> dict[str, int]:
    """Parameters by part; `head` is 0 if it is the token embedding, norms include the last one."""
    if isinstance(model, HFModelConfig):
        return _huggingface_parameters(model)
    if model.experts:
        return _mixture_parameters(model)
    layer = layer_parameters(model)
    L, D = model.n_layer, model.d_model
    shapes = parameter_shapes(model)
    positions = [name for name in shapes if "embedding" in name and not name.startswith("token")]
    last_norm = sum(prod(shape) for name, shape in shapes.items() if name.startswith("norm."))
    return {
        "token_embedding": model.vocab_size * D,
        "position_embedding": sum(prod(shapes[name]) for name in positions),
        "attention": L * (layer["qkv"] + layer["attention_out"]),
        "mlp": L * layer["mlp"],
        "norms": L * layer["norms"] + last_norm,
        "head": 0 if model.tied else model.vocab_size * D,
    }


def _mixture_parameters(model: ModelConfig) -> dict[str, int]:
    """Megatron-Core's: norms have biases, matrices have none; mlp includes the router."""
    dense = replace(model, experts=0)
    matrices, router = matmul_parameters(dense), model.d_model * model.experts
    return {
        **parameters(dense),
        "attention": matrices["qkv"] + matrices["attention_out"],
        "mlp": model.experts * matrices["mlp"] + model.n_layer * router,
    }


def check_dense(model: ModelConfig | HFModelConfig) -> None:
    """Raise ConfigError for a mixture: only its parameters and FLOPs have formulas here."""
    if as_gpt(model).experts:
        raise ConfigError(
            f"model.experts {as_gpt(model).experts}: the exact byte formulas know no experts: "
            "plan it (aiscale plan), or measure it"
        )


def _huggingface_parameters(model: HFModelConfig) -> dict[str, int]:
    parts, L, D = parameters(model.shape), model.n_layer, model.d_model
    if model.model_type in _EXACT:
        return parts
    if model.model_type != "gptj":
        raise ConfigError(
            f"there is no formula for the parameters of {model.model_type}: "
            "model.count_parameters counts them"
        )
    # GPT-J: one norm a layer, no biases in attention, one in the head.
    norms, head = (L + 1) * 2 * D, parts["head"] + model.vocab_size
    return {**parts, "attention": L * 4 * D**2, "norms": norms, "head": head}


def parameter_count(model: ModelConfig | HFModelConfig) -> int:
    """All parameters; a tied head counts once."""
    return sum(parameters(model).values())


def parameter_tensors(model: ModelConfig) -> int:
    """The number of parameter tensors. AdamW keeps a 4-byte step counter for each."""
    if isinstance(model, HFModelConfig):
        if model.model_type == "gptj":
            return 1 + 10 * model.n_layer + 2 + (1 if model.shape.tied else 2)
        model = model.shape
        # transformers has separate q, k, v, gate and value matrices; ours are fused
        apart = 3 if model.gated else 0
        return parameter_tensors(model) + model.n_layer * apart
    return len(parameter_shapes(model))


def matmul_parameters(model: ModelConfig) -> dict[str, int]:
    """Weights that multiply every token; not biases, norms and embedding look-ups."""
    model = as_gpt(model)
    D, F, L = model.d_model, model.ff_width, model.n_layer
    mlp = D * F * (3 if model.gated else 2)
    if model.experts:  # those of a token, and the router
        mlp = model.top_k * mlp + D * model.experts
    return {
        "qkv": L * D * (model.n_head + 2 * model.kv_heads) * model.d_head,
        "attention_out": L * D * D,
        "mlp": L * mlp,
        "head": D * model.vocab_size,
    }


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter tensor, with GPT's names and order."""
    D = model.d_model
    shapes: dict[str, tuple[int, ...]] = {"token_embedding.weight": (model.vocab_size, D)}
    if model.position == "learned":
        shapes["position_embedding.weight"] = (model.max_seq_len, D)
    if model.position == "t5":
        shapes["relative_embedding.weight"] = (model.relative_buckets, model.n_head)
    for layer in range(model.n_layer):
        shapes |= {f"blocks.{layer}.{name}": shape for name, shape in block_shapes(model).items()}
    shapes |= {} if model.norm == "deepnorm" else norm_shapes("norm", model)
    if not model.tied:
        shapes["head.weight"] = (model.vocab_size, D)
    return shapes


def optimizer_groups(model: ModelConfig, optimizer: str = "adamw") -> list[dict[str, Shape]]:
    """The tensors of each optimizer group: matrices have weight decay, vectors do not (`optim`).
    Muon's matrices, which it orthogonalizes, come first."""
    groups: list[dict[str, Shape]] = [{}, {}, {}]
    for name, shape in parameter_shapes(model).items():
        first = optimizer == "muon" and is_orthogonalized(name, len(shape))
        groups[0 if first else 1 if len(shape) >= 2 else 2][name] = shape
    return [group for group in groups if group]


def block_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of one block's parameters, a linear layer's as (outputs, inputs)."""
    D, F = model.d_model, model.ff_width
    if not model.fused_qkv:  # the trainers' model, in its own order
        shapes = {**norm_shapes("attn_norm", model), **norm_shapes("mlp_norm", model)}
        for part in ("query", "key", "value", "out"):
            shapes |= _linear_shapes(f"attn.{part}", D, D, model.bias)
        shapes |= _linear_shapes("mlp.up", F, D, model.bias)
        return shapes | _linear_shapes("mlp.down", D, F, model.bias)
    qkv_rows = (model.n_head + 2 * model.kv_heads) * model.d_head
    up_rows = F * (2 if model.gated else 1)
    relative = model.position in ("shaw", "huang")
    return {
        **norm_shapes("attn_norm", model),
        **_linear_shapes("attn.qkv", qkv_rows, D, model.bias),
        **_linear_shapes("attn.out", D, D, model.bias),
        **(
            {"attn.distance_embedding.weight": (model.relative_distance + 1, model.d_head)}
            if relative
            else {}
        ),
        **norm_shapes("mlp_norm", model),
        **_linear_shapes("mlp.up", up_rows, D, model.bias),
        **_linear_shapes("mlp.down", D, F, model.bias),
    }


def _linear_shapes(name: str, rows: int, columns: int, bias: bool) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, columns), **({f"{name}.bias": (rows,)} if bias else {})}


def norm_shapes(name: str, model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Of one norm: its weight (D,) and, unless it is RMS or the model has none, its bias (D,)."""
    has_bias = model.norm != "rmsnorm" and model.bias
    return {
        f"{name}.weight": (model.d_model,),
        **({f"{name}.bias": (model.d_model,)} if has_bias else {}),
    }


# FLOPs -------------------------------------------------------------------------------------------


def flops_by_part(model: ModelConfig, seq_len: int) -> dict[str, float]:
    """FLOPs of one token, forward and backward, by part.

    qkv, attention (scores and weighted values), attention_out, mlp, head. Attention counts all T
    positions, 4 T D a layer and pass, as PaLM and Narayanan et al. 2021; Megatron-LM's present code
    counts half of them.
    """
    weights = matmul_parameters(model)
    forward = {
        "qkv": 2 * weights["qkv"],
        "attention": 4 * model.n_layer * model.d_model * seq_len,
        "attention_out": 2 * weights["attention_out"],
        "mlp": 2 * weights["mlp"],
        "head": 2 * weights["head"],
    }
    # Each product has two in the backward pass, for the gradients of the input and of the weight.
    return {part: float(3 * flops) for part, flops in forward.items()}


def flops_per_token(model: ModelConfig, seq_len: int) -> float:
    """FLOPs of one token in a sequence of `seq_len`, forward and backward; see flops_by_part."""
    return sum(flops_by_part(model, seq_len).values())


def six_n_flops_per_token(model: ModelConfig) -> float:
    """6 N: 2 N forward, 4 N backward (Kaplan et al. 2020, section 2.1).

    Omits attention and counts look-ups.
    """
    return 6.0 * parameter_count(model)
