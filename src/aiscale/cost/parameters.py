"""How many parameters a GPT has, part by part, exactly, for every switch of `ModelConfig`.

    parameters(model)                   # {"token_embedding": ..., "position_embedding": ..., "attention": ..., ...}
    parameter_count(model)              # their sum: what GPT(model).num_parameters() says
    approximate_parameter_count(model)  # 12 L D^2, the rule of thumb

A Hugging Face model of a family that is written down here (gpt2, gptj, gpt_neox, llama) is counted exactly too; of any
other, `models.count_parameters` builds the model on the meta device.

Letters: D width, L layers, H heads, G key/value heads, C width of a head (D = H C), F width of the MLP, V vocabulary.
"""

from __future__ import annotations

from aiscale.config import ConfigError, HFModelConfig, ModelConfig

_EXACT = ("gpt2", "gpt_neox", "llama", "mistral")  # of our own parts, as many and as large


def as_gpt(model: ModelConfig | HFModelConfig) -> ModelConfig:
    """Our GPT of the same matrices, for formulas in which only those count."""
    return model.shape if isinstance(model, HFModelConfig) else model


def layer_parameters(model: ModelConfig) -> dict[str, int]:
    """Parameters of one block by tensor group: qkv, attention_out, mlp, norms.

    For GPT-2's block (G = H, F = 4 D) the matrices are 3 D^2 + D^2 + 8 D^2 = 12 D^2. A slide of "AI for Science at
    Scale, part 2" (S. Dash, ORNL) says 11 D^2 for the layer and 12 L D^2 for L of them: its list of weights
    (W_K, W_Q, W_V, W_1, W_2) leaves out attention's output projection, one D^2. Twelve is right.
    """
    model = as_gpt(model)
    D, F, bias = model.d_model, model.ff_width, model.bias
    qkv_rows = (model.n_head + 2 * model.kv_heads) * model.d_head
    up_rows = F * (2 if model.activation == "swiglu" else 1)
    return {
        "qkv": qkv_rows * (D + bias),
        "attention_out": D * (D + bias),
        "mlp": max(1, model.n_expert) * (up_rows * (D + bias) + D * (F + bias)) + model.n_expert * D,
        "norms": 2 * norm_parameters(model),
    }


def check_dense(model: ModelConfig) -> None:
    """Raise ConfigError for a mixture of experts: what it keeps depends on where its router sends tokens."""
    if model.n_expert:
        raise ConfigError(
            f"model.n_expert {model.n_expert}: which expert keeps how much is known only when tokens are routed: "
            "measure it instead (parallel.step_memory)"
        )


def norm_parameters(model: ModelConfig) -> int:
    """A layer norm has a weight and, if the model has biases, a bias; an RMS norm only a weight."""
    return model.d_model * (2 if model.norm == "layernorm" and model.bias else 1)


def parameters(model: ModelConfig | HFModelConfig) -> dict[str, int]:
    """Parameters by part. `head` is 0 where it is tied to the token embedding; norms include the last one."""
    if isinstance(model, HFModelConfig):
        return _huggingface_parameters(model)
    layer = layer_parameters(model)
    L, D = model.n_layer, model.d_model
    return {
        "token_embedding": model.vocab_size * D,
        "position_embedding": model.max_seq_len * D if model.position == "learned" else 0,
        "attention": L * (layer["qkv"] + layer["attention_out"]),
        "mlp": L * layer["mlp"],
        "norms": L * layer["norms"] + norm_parameters(model),
        "head": 0 if model.tied else model.vocab_size * D,
    }


def _huggingface_parameters(model: HFModelConfig) -> dict[str, int]:
    parts, L, D = parameters(model.shape), model.n_layer, model.d_model
    if model.model_type in _EXACT:
        return parts
    if model.model_type != "gptj":
        raise ConfigError(
            f"there is no formula for the parameters of {model.model_type}: models.count_parameters counts them"
        )
    # One norm a layer, no biases in attention, one in the head.
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
        # transformers keeps q, k and v, and a gate and its value, apart where ours are one matrix
        apart = 3 if model.activation == "swiglu" else 0
        return parameter_tensors(model) + model.n_layer * apart
    norm = 2 if model.norm == "layernorm" and model.bias else 1
    linear = 2 if model.bias else 1
    mlp = 2 * model.n_expert + 1 if model.n_expert else 2 * linear  # a router beside the experts
    block = 2 * norm + 2 * linear + mlp
    return 1 + (model.position == "learned") + model.n_layer * block + norm + (not model.tied)


def matmul_parameters(model: ModelConfig) -> dict[str, int]:
    """Weights that every token is multiplied with: qkv, attention_out, mlp, head. Not biases, norms and look-ups.

    Of a mixture of experts, those that one token passes through, and the router.
    """
    model = as_gpt(model)
    D, F, L = model.d_model, model.ff_width, model.n_layer
    one = D * F * (3 if model.activation == "swiglu" else 2)
    return {
        "qkv": L * D * (model.n_head + 2 * model.kv_heads) * model.d_head,
        "attention_out": L * D * D,
        "mlp": L * (model.experts_per_token * one + D * model.n_expert if model.n_expert else one),
        "head": D * model.vocab_size,
    }


def approximate_parameter_count(model: ModelConfig) -> int:
    """12 L D^2: the matrices of L blocks of GPT-2's shape, without embeddings, norms and biases.

    Narayanan et al. 2021 (Megatron-LM, equation 2) adds the rest: 12 L D^2 (1 + 13/(12 D) + (V + T)/(12 L D)).
    """
    return 12 * model.n_layer * model.d_model**2


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter tensor, under GPT's own names and in GPT's own order."""
    D = model.d_model
    shapes: dict[str, tuple[int, ...]] = {"token_embedding.weight": (model.vocab_size, D)}
    if model.position == "learned":
        shapes["position_embedding.weight"] = (model.max_seq_len, D)
    for layer in range(model.n_layer):
        shapes |= {f"blocks.{layer}.{name}": shape for name, shape in block_shapes(model).items()}
    shapes |= _norm_shapes("norm", model)
    if not model.tied:
        shapes["head.weight"] = (model.vocab_size, D)
    return shapes


def block_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of one block's parameters, a linear layer's as (outputs, inputs)."""
    D, F = model.d_model, model.ff_width
    qkv_rows = (model.n_head + 2 * model.kv_heads) * model.d_head
    up_rows = F * (2 if model.activation == "swiglu" else 1)
    return {
        **_norm_shapes("attn_norm", model),
        **_linear_shapes("attn.qkv", qkv_rows, D, model.bias),
        **_linear_shapes("attn.out", D, D, model.bias),
        **_norm_shapes("mlp_norm", model),
        **_mlp_shapes(model, up_rows),
    }


def _mlp_shapes(model: ModelConfig, up_rows: int) -> dict[str, tuple[int, ...]]:
    D, F, bias = model.d_model, model.ff_width, model.bias
    if not model.n_expert:
        return {**_linear_shapes("mlp.up", up_rows, D, bias), **_linear_shapes("mlp.down", D, F, bias)}
    shapes = _linear_shapes("mlp.router", model.n_expert, D, False)
    for number in range(model.n_expert):
        shapes |= _linear_shapes(f"mlp.experts.{number}.up", up_rows, D, bias)
        shapes |= _linear_shapes(f"mlp.experts.{number}.down", D, F, bias)
    return shapes


def _linear_shapes(name: str, rows: int, columns: int, bias: bool) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, columns), **({f"{name}.bias": (rows,)} if bias else {})}


def _norm_shapes(name: str, model: ModelConfig) -> dict[str, tuple[int, ...]]:
    has_bias = model.norm == "layernorm" and model.bias
    return {f"{name}.weight": (model.d_model,), **({f"{name}.bias": (model.d_model,)} if has_bias else {})}
