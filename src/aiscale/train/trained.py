"""What a trainer has trained, as a model of transformers.

    model, tokenizer = open_folder("run")

Our GPT has GPT-2's architecture: its weights need other names only. With rotary positions, which
Megatron-Core trains here, it has GPT-NeoX'.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from aiscale.train.megatron_names import as_neox, as_ours
from aiscale.train.options import options
from aiscale.train.presets import is_ours, shape_of
from aiscale.train.record import read_note
from aiscale.train.refusal import refuse
from aiscale.train.sharded_checkpoint import NOTE, digest_of, folders

#: Parts of a block of ours, and of GPT-2's.
PARTS = {
    "norm1": "ln_1",
    "norm2": "ln_2",
    "out": "attn.c_proj",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}


def open_folder(path):
    """(model of transformers, text of its tokenizer.json or None for bytes) of a --save folder."""
    try:
        note = read_note(path)
    except ValueError:
        note = None
    if note is None or "options" not in note:
        refuse(f"{path} is no folder of a trainer (--save): it has no readable run.json of one")
    if note["options"].get("experts"):
        why = "is a mixture of experts, for which no model of transformers is the same"
        refuse(f"{path} {why}: read its checkpoint by `aiscale train megatron`")
    found = folders(path)
    if not found:
        refuse(f"{path} holds no checkpoint: let the run reach one (--save-every)")
    check_whole(found[0])
    args = options().parse_args(["--model", note["options"]["model"]])
    if is_ours(args.model):
        model = of_our_shape(weights_of(found[0], note), note, shape_of(args.model))
    else:
        from aiscale.train.hugging_face import Transformer

        model = Transformer(args.model).inner
        weights = weights_of(found[0], note)
        theirs = {name.removeprefix("inner."): tensor for name, tensor in weights.items()}
        model.load_state_dict(theirs, strict=False, assign=True)  # a tied head is there once
        model.tie_weights()
    tokenizer = Path(path) / "tokenizer.json"
    # As many tokens as it was made for, whatever the architecture calls that.
    model.config.max_seq_len = shape_of(args.model).context
    return model.eval(), tokenizer.read_text() if tokenizer.exists() else None


def check_whole(folder):
    """Ends with a line if a file of a checkpoint is not what was written."""
    for name, digest in json.loads((folder / NOTE).read_text())["files"].items():
        if not (folder / name).is_file() or digest_of(folder / name) != digest:
            say = f"{folder} is damaged ({name} is not what was written)"
            refuse(f"{say}: delete it to use the one before")


def weights_of(folder, note):
    """{name: whole tensor} of a checkpoint, read by this process alone."""
    if note["trainer"] == "zero":
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        return get_fp32_state_dict_from_zero_checkpoint(str(folder), tag="deepspeed")
    stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    prefix = "" if note["trainer"] == "megatron" else "model."
    weights = {}
    for name, about in stored.items():
        tensor = isinstance(about, TensorStorageMetadata) and not name.startswith("optimizer.")
        if tensor and name.startswith(prefix):
            weights[name] = torch.empty(about.size, dtype=about.properties.dtype)
    dcp.load(weights, checkpoint_id=folder, no_dist=True)
    return {name.removeprefix(prefix): tensor.float() for name, tensor in weights.items()}


def of_our_shape(weights, note, shape):
    """A model of transformers with the weights of our GPT, or of Megatron-Core's."""
    if shape.rotary:
        model = neox_of(shape)
        model.load_state_dict(as_neox(weights, shape))
        return model
    if note["trainer"] == "megatron":
        weights = as_ours(weights, shape)
    model = gpt2_of(shape)
    model.load_state_dict(as_gpt2(weights, shape))
    return model


def gpt2_of(shape):
    """transformers' GPT-2 of our shape, without weights of its own."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=shape.vocabulary,
        n_positions=shape.context,
        n_embd=shape.width,
        n_layer=shape.layers,
        n_head=shape.heads,
        activation_function="gelu",
        tie_word_embeddings=shape.tied,
        bos_token_id=None,
        eos_token_id=None,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config)


def neox_of(shape):
    """transformers' GPT-NeoX of our shape, without weights of its own."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        vocab_size=shape.vocabulary,
        max_position_embeddings=shape.context,
        hidden_size=shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=4 * shape.width,
        hidden_act="gelu",
        rotary_pct=1.0,
        use_parallel_residual=False,
        tie_word_embeddings=shape.tied,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPTNeoXForCausalLM(config)


def as_gpt2(ours, shape):
    """Our weights under GPT-2's names. It stores matrices transposed, and q, k and v as one."""
    theirs = {
        "transformer.wte.weight": ours["embed.token.weight"],
        "transformer.wpe.weight": ours["embed.place.weight"],
        "transformer.ln_f.weight": ours["head.0.weight"],
        "transformer.ln_f.bias": ours["head.0.bias"],
        "lm_head.weight": ours["embed.token.weight" if shape.tied else "head.1.weight"],
    }
    for layer in range(shape.layers):
        block, name = f"blocks.{layer}.", f"transformer.h.{layer}."
        for kind in ("weight", "bias"):
            three = [ours[f"{block}{part}.{kind}"] for part in ("query", "key", "value")]
            theirs[f"{name}attn.c_attn.{kind}"] = transposed(torch.cat(three))
            for part, its in PARTS.items():
                theirs[f"{name}{its}.{kind}"] = transposed(ours[f"{block}{part}.{kind}"])
    return theirs


def transposed(tensor):
    return tensor.t().contiguous() if tensor.dim() > 1 else tensor
