"""How many parameters a GPT has, part by part, exactly, for every switch of `ModelConfig`.

    parameters(model)                   # {"token_embedding": ..., "position_embedding": ..., "attention": ..., ...}
    parameter_count(model)              # their sum: what GPT(model).num_parameters() says
    approximate_parameter_count(model)  # 12 L D^2, the rule of thumb

Letters: D width, L layers, H heads, G key/value heads, C width of a head (D = H C), F width of the MLP, V vocabulary.
"""

from __future__ import annotations

from aiscale.config import ModelConfig


def layer_parameters(model: ModelConfig) -> dict[str, int]:
    """Parameters of one block by tensor group: qkv, attention_out, mlp, norms.

    For GPT-2's block (G = H, F = 4 D) the matrices are 3 D^2 + D^2 + 8 D^2 = 12 D^2. A slide of "AI for Science at
    Scale, part 2" (S. Dash, ORNL) says 11 D^2 for the layer and 12 L D^2 for L of them: its list of weights
    (W_K, W_Q, W_V, W_1, W_2) leaves out attention's output projection, one D^2. Twelve is right.
    """
    D, F, bias = model.d_model, model.ff_width, model.bias
    qkv_rows = (model.n_head + 2 * model.kv_heads) * model.d_head
    up_rows = F * (2 if model.activation == "swiglu" else 1)
    return {
        "qkv": qkv_rows * (D + bias),
        "attention_out": D * (D + bias),
        "mlp": up_rows * (D + bias) + D * (F + bias),
        "norms": 2 * norm_parameters(model),
    }


def norm_parameters(model: ModelConfig) -> int:
    """A layer norm has a weight and, if the model has biases, a bias; an RMS norm only a weight."""
    return model.d_model * (2 if model.norm == "layernorm" and model.bias else 1)


def parameters(model: ModelConfig) -> dict[str, int]:
    """Parameters by part. `head` is 0 where it is tied to the token embedding; norms include the last one."""
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


def parameter_count(model: ModelConfig) -> int:
    """All parameters; a tied head counts once."""
    return sum(parameters(model).values())


def parameter_tensors(model: ModelConfig) -> int:
    """The number of parameter tensors. AdamW keeps a 4-byte step counter for each."""
    norm = 2 if model.norm == "layernorm" and model.bias else 1
    linear = 2 if model.bias else 1
    block = 2 * norm + 4 * linear
    return 1 + (model.position == "learned") + model.n_layer * block + norm + (not model.tied)


def matmul_parameters(model: ModelConfig) -> dict[str, int]:
    """Weights that every token is multiplied with: qkv, attention_out, mlp, head. Not biases, norms and look-ups."""
    D, F, L = model.d_model, model.ff_width, model.n_layer
    return {
        "qkv": L * D * (model.n_head + 2 * model.kv_heads) * model.d_head,
        "attention_out": L * D * D,
        "mlp": L * D * F * (3 if model.activation == "swiglu" else 2),
        "head": D * model.vocab_size,
    }


def approximate_parameter_count(model: ModelConfig) -> int:
    """12 L D^2: the matrices of L blocks of GPT-2's shape, without embeddings, norms and biases.

    Narayanan et al. 2021 (Megatron-LM, equation 2) adds the rest: 12 L D^2 (1 + 13/(12 D) + (V + T)/(12 L D)).
    """
    return 12 * model.n_layer * model.d_model**2
