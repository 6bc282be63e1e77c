"""Models with rotary positions as Hugging Face folders: which architecture of transformers computes the same.

    config_json, tensors = hf_formats.convert(config, state)      # for `hf.write`, which keeps GPT-2's own shape itself

LayerNorm and an MLP with one nonlinearity make a GPT-NeoX; RMSNorm and SwiGLU a Llama. Both turn channel pairs
(c, c + C/2), as we do.

Letters: D width, H heads, G key/value heads, C width of a head, F width of the MLP.
"""

from __future__ import annotations

from torch import Tensor

from aiscale.config import ConfigError, ModelConfig

_NEOX_ACTIVATIONS = {"gelu_tanh": "gelu_pytorch_tanh", "gelu": "gelu", "relu": "relu"}
_NEOX = [
    ("attn_norm", "input_layernorm"),
    ("mlp_norm", "post_attention_layernorm"),
    ("attn.qkv", "attention.query_key_value"),
    ("attn.out", "attention.dense"),
    ("mlp.up", "mlp.dense_h_to_4h"),
    ("mlp.down", "mlp.dense_4h_to_h"),
]


def convert(config: ModelConfig, state: dict[str, Tensor]) -> tuple[dict, dict[str, Tensor]]:
    """(config.json, tensors) of a model that GPT-2's format cannot hold; raises ConfigError where no other can."""
    wrong = _problems(config)
    if wrong:
        raise ConfigError(
            f"no format of transformers holds {' with '.join(wrong)}: GPT-2's has learned positions, GPT-NeoX's rotary "
            "ones and LayerNorm, Llama's rotary ones, RMSNorm and SwiGLU, each with its biases: keep the checkpoint"
        )
    return _llama(config, state) if config.norm == "rmsnorm" else _neox(config, state)


def _problems(config: ModelConfig) -> list[str]:
    """What neither GPT-NeoX nor Llama has, in the words of ModelConfig."""
    rotary, llama = config.position == "rotary", config.norm == "rmsnorm"
    norm = f"model.norm {config.norm}"
    found = [] if rotary else [f"model.position {config.position}"]
    found += [f"model.n_expert {config.n_expert}"] if config.n_expert else []
    if llama != (config.activation == "swiglu"):
        found += [norm, f"model.activation {config.activation}"]
    if llama and config.parallel_residual:
        found += [norm, "model.parallel_residual true"]
    if not llama and config.kv_heads != config.n_head:
        found += [norm if rotary else "", f"model.n_kv_head {config.kv_heads}"]
    if not llama and not config.bias:
        found += [norm if rotary else "", "model.bias false"]
    return [*dict.fromkeys(filter(None, found))]


def _shared(config: ModelConfig) -> dict:
    return {
        "hidden_size": config.d_model,
        "intermediate_size": config.ff_width,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "max_position_embeddings": config.max_seq_len,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tied,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _neox(config: ModelConfig, state: dict[str, Tensor]) -> tuple[dict, dict[str, Tensor]]:
    raw = {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        **_shared(config),
        "hidden_act": _NEOX_ACTIVATIONS[config.activation],
        "layer_norm_eps": config.norm_eps,
        "use_parallel_residual": config.parallel_residual,
        "rotary_pct": 1.0,
        "rotary_emb_base": config.rope_theta,
        "attention_bias": config.bias,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    names = {"token_embedding": "gpt_neox.embed_in", "norm": "gpt_neox.final_layer_norm", "head": "embed_out"}
    for layer in range(config.n_layer):
        names |= {f"blocks.{layer}.{ours}": f"gpt_neox.layers.{layer}.{theirs}" for ours, theirs in _NEOX}
    tensors = {}
    for name, tensor in state.items():
        module, _, kind = name.rpartition(".")
        if module.endswith("attn.qkv"):  # theirs go head by head: rows (H, 3, C) for our (3, H, C)
            tensor = tensor.view(3, config.n_head, config.d_head, -1).transpose(0, 1).reshape(tensor.shape)
        tensors[f"{names[module]}.{kind}"] = tensor
    return raw, tensors


def _llama(config: ModelConfig, state: dict[str, Tensor]) -> tuple[dict, dict[str, Tensor]]:
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **_shared(config),
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.d_head,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "attention_bias": config.bias,
        "mlp_bias": config.bias,
        "attention_dropout": 0.0,
    }
    H, G, C, F = config.n_head, config.kv_heads, config.d_head, config.ff_width
    names = {"token_embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    inner = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    inner |= {"attn.out": "self_attn.o_proj", "mlp.down": "mlp.down_proj"}
    pieces = {  # ours hold several of theirs, one below the other
        "attn.qkv": (("self_attn.q_proj", H * C), ("self_attn.k_proj", G * C), ("self_attn.v_proj", G * C)),
        "mlp.up": (("mlp.gate_proj", F), ("mlp.up_proj", F)),
    }
    tensors = {}
    for name, tensor in state.items():
        module, _, kind = name.rpartition(".")
        if not module.startswith("blocks."):
            tensors[f"{names[module]}.{kind}"] = tensor
            continue
        _, layer, part = module.split(".", 2)
        theirs = pieces.get(part) or ((inner[part], len(tensor)),)
        for (target, _), piece in zip(theirs, tensor.split([rows for _, rows in theirs]), strict=True):
            tensors[f"model.layers.{layer}.{target}.{kind}"] = piece.clone()  # a folder's tensors may not share memory
    return raw, tensors
