"""What a trainer has trained, as a model of transformers.

    model, tokenizer = open_folder("run")

Our GPT has GPT-2's architecture: its weights need other names only.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

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
    found = folders(path)
    if not found:
        refuse(f"{path} holds no checkpoint: let the run reach one (--save-every)")
    check_whole(found[0])
    if note["trainer"] == "megatron":
        refuse(f"{path} is of Megatron-Core: its own tools/checkpoint/convert.py exports it")
    args = options().parse_args(["--model", note["options"]["model"]])
    if is_ours(args.model):
        model = gpt2_of(shape_of(args.model))
        model.load_state_dict(as_gpt2(weights_of(found[0], note), shape_of(args.model)))
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
    weights = {}
    for name, about in stored.items():
        if name.startswith("model."):
            weights[name.removeprefix("model.")] = torch.empty(about.size)
    dcp.load({"model": weights}, checkpoint_id=folder, no_dist=True)
    return weights


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
