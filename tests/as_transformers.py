"""Write our GPT as a Hugging Face folder, in the format of GPT-2, GPT-NeoX or Llama.

A model with rotary positions is written as GPT-NeoX if it has LayerNorm and a plain MLP, as Llama
if it has RMSNorm and SwiGLU. Others' weights are read by transformers (model.folder).

Letters: H heads, G key/value heads, C width of a head, F width of the MLP.
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from aiscale.errors import ConfigError
from aiscale.plan.config import ModelConfig
from aiscale.plan.config.choices import ACTIVATIONS as CHOICES

GPT2_VOCAB_SIZE = 50257


def write(folder, config: ModelConfig, state: dict[str, Tensor]) -> None:
    """Write a GPT-2 folder or, with rotary positions, a GPT-NeoX or Llama folder.
    Raises ConfigError if none of them can hold the model."""
    state = {name: tensor.detach().cpu() for name, tensor in state.items()}
    dtype = str(state["token_embedding.weight"].dtype).removeprefix("torch.")
    if _is_gpt2(config):
        raw, tensors = _gpt2(config, state)
    elif _is_llama(config):
        raw, tensors = _llama(config, state)
    elif _is_neox(config):
        raw, tensors = _neox(config, state)
    else:
        raise ConfigError(
            f"no format of transformers holds model.position {config.position} with norm "
            f"{config.norm}, activation {config.activation}, {config.kv_heads} of {config.n_head} "
            f"key/value heads, bias {config.bias} and parallel_residual "
            f"{config.parallel_residual}: GPT-2's has learned positions, GPT-NeoX's rotary ones "
            "and LayerNorm, Llama's rotary ones, RMSNorm and a gate, each with its biases: keep "
            "the checkpoint"
        )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**raw, "dtype": dtype}, indent=2) + "\n")


def _gpt2(config: ModelConfig, state: dict[str, Tensor]) -> tuple[dict, dict[str, Tensor]]:
    # In GPT-2's vocabulary the last token ends a text; for another vocabulary we do not know.
    end = config.vocab_size - 1 if config.vocab_size == GPT2_VOCAB_SIZE else None
    raw = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_positions": config.max_seq_len,
        "n_embd": config.d_model,
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_inner": config.d_ff or None,
        "activation_function": "gelu_new"
        if config.activation == "gelu_tanh"
        else config.activation,
        "layer_norm_epsilon": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": end,
        "eos_token_id": end,
    }
    names = {"token_embedding": "transformer.wte", "position_embedding": "transformer.wpe"}
    names |= {"norm": "transformer.ln_f", "head": "lm_head"}
    inner = {"attn_norm": "ln_1", "attn.qkv": "attn.c_attn", "attn.out": "attn.c_proj"}
    inner |= {"mlp_norm": "ln_2", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
    for layer in range(config.n_layer):
        names |= {
            f"blocks.{layer}.{ours}": f"transformer.h.{layer}.{theirs}"
            for ours, theirs in inner.items()
        }
    tensors = {}
    for name, tensor in state.items():
        module, _, kind = name.rpartition(".")
        turned = kind == "weight" and names[module].endswith(("c_attn", "c_proj", "c_fc"))
        tensors[f"{names[module]}.{kind}"] = tensor.t() if turned else tensor
    return raw, tensors


def _is_gpt2(config: ModelConfig) -> bool:
    same = config.norm == "layernorm" and config.position == "learned" and config.bias
    return (
        same
        and not config.parallel_residual
        and not config.gated
        and config.kv_heads == config.n_head
    )


def _is_llama(config: ModelConfig) -> bool:
    return (
        config.norm == "rmsnorm"
        and config.position == "rotary"
        and config.gated
        and not config.parallel_residual
    )


def _is_neox(config: ModelConfig) -> bool:
    same = config.norm == "layernorm" and config.position == "rotary" and config.bias
    return same and not config.gated and config.kv_heads == config.n_head


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
        "hidden_act": "gelu_pytorch_tanh"
        if config.activation == "gelu_tanh"
        else config.activation,
        "layer_norm_eps": config.norm_eps,
        "use_parallel_residual": config.parallel_residual,
        "rotary_pct": 1.0,
        "rotary_emb_base": config.rope_theta,
        "attention_bias": config.bias,
    }
    names = {
        "token_embedding": "gpt_neox.embed_in",
        "norm": "gpt_neox.final_layer_norm",
        "head": "embed_out",
    }
    inner = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    inner |= {"attn.qkv": "attention.query_key_value", "attn.out": "attention.dense"}
    inner |= {"mlp.up": "mlp.dense_h_to_4h", "mlp.down": "mlp.dense_4h_to_h"}
    for layer in range(config.n_layer):
        names |= {
            f"blocks.{layer}.{ours}": f"gpt_neox.layers.{layer}.{theirs}"
            for ours, theirs in inner.items()
        }
    tensors = {}
    for name, tensor in state.items():
        module, _, kind = name.rpartition(".")
        if module.endswith("attn.qkv"):  # theirs is head by head: rows (H, 3, C) for our (3, H, C)
            tensor = (
                tensor.view(3, config.n_head, config.d_head, -1)
                .transpose(0, 1)
                .reshape(tensor.shape)
            )
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
    }
    H, G, C, F = config.n_head, config.kv_heads, config.d_head, config.ff_width
    names = {"token_embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    inner = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    inner |= {"attn.out": "self_attn.o_proj", "mlp.down": "mlp.down_proj"}
    pieces = {  # our tensors stack several of theirs
        "attn.qkv": (
            ("self_attn.q_proj", H * C),
            ("self_attn.k_proj", G * C),
            ("self_attn.v_proj", G * C),
        ),
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
        for (target, _), piece in zip(
            theirs, tensor.split([rows for _, rows in theirs]), strict=True
        ):
            # safetensors may not share memory
            tensors[f"model.layers.{layer}.{target}.{kind}"] = piece.clone()
    return raw, tensors
