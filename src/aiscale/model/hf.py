"""Hugging Face folders (config.json, model.safetensors): read and write GPT-2, write GPT-NeoX and Llama.

    model = GPT.from_pretrained("gpt2/")     # also a folder of sharded weights with an index
    model.save_pretrained("mine/")           # transformers.AutoModelForCausalLM.from_pretrained("mine/") opens it

GPT-2 stores a linear layer's weight transposed, (in, out), and calls it Conv1D. Half-precision weights are read as
fp32. Dropout is not read: this model has none.

A model with rotary positions is written as GPT-NeoX if it has LayerNorm and a plain MLP, as Llama if it has RMSNorm and
SwiGLU. Both rotate channel pairs (c, c + C/2), as we do.

Letters: D width, H heads, G key/value heads, C width of a head, F width of the MLP, V vocabulary, T tokens.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from aiscale.config import ConfigError, ModelConfig
from aiscale.config.choices import ACTIVATIONS as CHOICES

ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
}
GPT2_VOCAB_SIZE = 50257

# Our module, its name in GPT-2's folder, whether its weight is stored transposed.
OUTER = [("token_embedding", "wte", False), ("position_embedding", "wpe", False), ("norm", "ln_f", False)]
INNER = [
    ("attn_norm", "ln_1", False),
    ("attn.qkv", "attn.c_attn", True),
    ("attn.out", "attn.c_proj", True),
    ("mlp_norm", "ln_2", False),
    ("mlp.up", "mlp.c_fc", True),
    ("mlp.down", "mlp.c_proj", True),
]


def names(config: ModelConfig) -> list[tuple[str, str, bool]]:
    """(our parameter, GPT-2's tensor, stored transposed) for every parameter of the model."""
    modules = list(OUTER)
    for layer in range(config.n_layer):
        modules += [(f"blocks.{layer}.{ours}", f"h.{layer}.{theirs}", turned) for ours, theirs, turned in INNER]
    table = [(f"{ours}.weight", f"transformer.{theirs}.weight", turned) for ours, theirs, turned in modules]
    biased = [module for module in modules if module[0] not in ("token_embedding", "position_embedding")]
    table += [(f"{ours}.bias", f"transformer.{theirs}.bias", False) for ours, theirs, _ in biased]
    return table if config.tied else [*table, ("head.weight", "lm_head.weight", False)]


def read(folder) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The configuration and our state dict of a GPT-2 folder; raises ConfigError if it is not one."""
    folder = Path(folder)
    config = _read_config(folder)
    tensors = _read_tensors(folder)
    state = {}
    for ours, theirs, turned in names(config):
        # Early GPT-2 folders lack the prefix.
        tensor = tensors.get(theirs, tensors.get(theirs.removeprefix("transformer.")))
        if tensor is None:
            raise ConfigError(f"{folder} has no tensor {theirs}, which its config.json promises: copy the folder again")
        tensor = tensor.t().contiguous() if turned else tensor
        state[ours] = tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
    _check_shapes(folder, config, state)
    return config, state


def write(folder, config: ModelConfig, state: dict[str, Tensor]) -> None:
    """Write a GPT-2 folder or, with rotary positions, a GPT-NeoX or Llama folder; raises ConfigError if none of them
    can hold the model."""
    state = {name: tensor.detach().cpu() for name, tensor in state.items()}
    dtype = str(state["token_embedding.weight"].dtype).removeprefix("torch.")
    if _is_gpt2(config):
        raw = _to_gpt2(config)
        tensors = {theirs: state[ours].t() if turned else state[ours] for ours, theirs, turned in names(config)}
    else:
        raw, tensors = _convert(config, state)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**raw, "dtype": dtype}, indent=2) + "\n")


def _to_gpt2(config: ModelConfig) -> dict:
    activation = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}[config.activation]
    # In GPT-2's vocabulary the last token ends a text; for another vocabulary we do not know.
    end = config.vocab_size - 1 if config.vocab_size == GPT2_VOCAB_SIZE else None
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_positions": config.max_seq_len,
        "n_embd": config.d_model,
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_inner": config.d_ff or None,
        "activation_function": activation,
        "layer_norm_epsilon": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": end,
        "eos_token_id": end,
    }


def _is_gpt2(config: ModelConfig) -> bool:
    wanted = {"norm": "layernorm", "position": "learned", "parallel_residual": False, "bias": True}
    same = all(getattr(config, key) == value for key, value in wanted.items())
    return same and not config.gated and config.kv_heads == config.n_head


def _read_config(folder: Path) -> ModelConfig:
    path = folder / "config.json"
    if not path.is_file():
        problem = "has no config.json" if folder.is_dir() else "is not a folder"
        raise ConfigError(f"{folder} {problem}: give a Hugging Face GPT-2 folder (config.json, model.safetensors)")
    try:
        raw = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON ({error}): copy the folder again") from None
    if raw.get("model_type") != "gpt2":
        raise ConfigError(f"{folder} holds a model of type {raw.get('model_type')}: only gpt2 can be read")
    _refuse_variants(folder, raw)
    return ModelConfig(
        n_layer=raw.get("n_layer", 12),
        n_head=raw.get("n_head", 12),
        d_model=raw.get("n_embd", 768),
        d_ff=raw.get("n_inner") or 0,
        vocab_size=raw.get("vocab_size", GPT2_VOCAB_SIZE),
        max_seq_len=raw.get("n_positions", 1024),
        activation=ACTIVATIONS[raw.get("activation_function", "gelu_new")],
        norm_eps=raw.get("layer_norm_epsilon", 1e-5),
        tied=raw.get("tie_word_embeddings", True),
    )


def _refuse_variants(folder: Path, raw: dict) -> None:
    """Raise ConfigError for options of GPT2Config that change what the weights mean."""
    usual = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
    for key, value in usual.items():
        if raw.get(key, value) != value:
            raise ConfigError(f"{folder} has {key} {raw[key]}: only models with {value} can be read")
    activation = raw.get("activation_function", "gelu_new")
    if activation not in ACTIVATIONS:
        raise ConfigError(f"{folder} has activation_function {activation}: it must be one of {', '.join(ACTIVATIONS)}")


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    index = folder / "model.safetensors.index.json"
    files = ["model.safetensors"]
    if not (folder / files[0]).is_file() and index.is_file():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    tensors = {}
    for name in files:
        if not (folder / name).is_file():
            raise ConfigError(f"{folder} has no {name}: copy it there (weights are read from safetensors files only)")
        try:
            tensors.update(load_file(folder / name))
        except SafetensorError as error:
            raise ConfigError(f"{folder / name} cannot be read ({error}): copy it again") from None
    return tensors


def _check_shapes(folder: Path, config: ModelConfig, state: dict[str, Tensor]) -> None:
    D, F, V, T = config.d_model, config.ff_width, config.vocab_size, config.max_seq_len
    wanted = {"token_embedding.weight": (V, D), "position_embedding.weight": (T, D), "head.weight": (V, D)}
    for layer in range(config.n_layer):
        wanted[f"blocks.{layer}.attn.qkv.weight"] = (3 * D, D)
        wanted[f"blocks.{layer}.mlp.up.weight"] = (F, D)
    for name, shape in wanted.items():
        if name in state and tuple(state[name].shape) != shape:
            raise ConfigError(
                f"{folder}: {name} has shape {tuple(state[name].shape)}, but its config.json says {shape}: "
                "copy the folder again"
            )


# Models with rotary positions -----------------------------------------------------------------------------------------

_NEOX_ACTIVATIONS = {"gelu_tanh": "gelu_pytorch_tanh", "gelu": "gelu", "relu": "relu", "silu": "silu"}
_NEOX = [
    ("attn_norm", "input_layernorm"),
    ("mlp_norm", "post_attention_layernorm"),
    ("attn.qkv", "attention.query_key_value"),
    ("attn.out", "attention.dense"),
    ("mlp.up", "mlp.dense_h_to_4h"),
    ("mlp.down", "mlp.dense_4h_to_h"),
]


def _convert(config: ModelConfig, state: dict[str, Tensor]) -> tuple[dict, dict[str, Tensor]]:
    """(config.json, tensors) as GPT-NeoX or Llama; raises ConfigError if neither can hold the model."""
    wrong = _problems(config)
    if wrong:
        raise ConfigError(
            f"no format of transformers holds {' with '.join(wrong)}: GPT-2's has learned positions, GPT-NeoX's rotary "
            "ones and LayerNorm, Llama's rotary ones, RMSNorm and a gate, each with its biases: keep the checkpoint"
        )
    return _llama(config, state) if config.norm == "rmsnorm" else _neox(config, state)


def _problems(config: ModelConfig) -> list[str]:
    """The options of ModelConfig that neither GPT-NeoX nor Llama has."""
    rotary, llama = config.position == "rotary", config.norm == "rmsnorm"
    norm = f"model.norm {config.norm}"
    found = [] if rotary else [f"model.position {config.position}"]
    found += [f"model.n_expert {config.n_expert}"] if config.n_expert else []
    if llama != config.gated:
        found += [norm, f"model.activation {config.activation}"]
    found += [norm] if config.norm == "deepnorm" else []
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
        if module.endswith("attn.qkv"):  # theirs is head by head: rows (H, 3, C) for our (3, H, C)
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
        "hidden_act": CHOICES[config.activation].function,
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
    pieces = {  # our tensors stack several of theirs
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
            tensors[f"model.layers.{layer}.{target}.{kind}"] = piece.clone()  # safetensors may not share memory
    return raw, tensors
