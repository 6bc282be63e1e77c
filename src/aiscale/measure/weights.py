"""The weights of a trainer's newest checkpoint, whole and under the names of our own model.

weights_of(Path("run"), model_of("tiny"))     # {"blocks.0.query.weight": tensor, ...}

ZeRO's checkpoint is DeepSpeed's; Megatron-Core's has its own names, and keeps a head's query, key
and value together.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from aiscale.plan.config import HFModelConfig, ModelConfig

#: Megatron-Core's names and ours, outside of the blocks ...
_ENDS = {
    "embedding.word_embeddings": "embed.token",
    "embedding.position_embeddings": "embed.place",
    "decoder.final_norm": "head.0",
    "output_layer": "head.1",
}
#: ... and in them. Two of its layers, attention and an MLP, are one of our blocks.
_PARTS = {
    "input_layernorm": "norm1",
    "self_attention.linear_proj": "out",
    "pre_mlp_layernorm": "norm2",
    "mlp.linear_fc1": "up",
    "mlp.linear_fc2": "down",
    "mlp.router": "router",
    # All experts of a layer are one tensor.
    "mlp.experts.experts.linear_fc1": "experts.up",
    "mlp.experts.experts.linear_fc2": "experts.down",
}
#: DeepSpeed's own reader, in a process of its own: it prints, and changes torch.
_READER = """
import sys, torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
weights = get_fp32_state_dict_from_zero_checkpoint(sys.argv[1], tag="deepspeed")
torch.save({name: weight.clone() for name, weight in weights.items()}, sys.argv[2])
"""
_reading = threading.Lock()  #: warnings are silenced for the whole process


def weights_of(path: Path, model: ModelConfig | HFModelConfig) -> dict[str, Tensor]:
    """Of the newest checkpoint in a --save folder. A tied head is there beside the embedding."""
    folder = max(path.glob("[0-9]" * 8))
    trainer = json.loads((path / "run.json").read_text())["trainer"]
    if trainer == "zero":
        weights = _of_deepspeed(folder)
    elif trainer == "megatron":
        theirs = _stored(folder, ("embedding.", "decoder.", "output_layer."))
        weights = _renamed(theirs, model.n_head, model.vocab_size)
    else:
        stored = _stored(folder, ("model.",))
        weights = {name.removeprefix("model."): weight for name, weight in stored.items()}
    if isinstance(model, ModelConfig) and model.tied:
        # Some libraries store it twice, and a fault may make the two differ.
        weights.setdefault("head.1.weight", weights["embed.token.weight"])
    return weights


def _stored(folder: Path, beginnings: tuple[str, ...]) -> dict[str, Tensor]:
    """The tensors of a checkpoint of torch whose names begin so."""
    entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {}
    for name, about in entries.items():
        if name.startswith(beginnings) and hasattr(about, "size"):
            # NaN: what is missing in the files must not be right by chance.
            tensors[name] = torch.full(about.size, torch.nan, dtype=about.properties.dtype)
    with _reading, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is a single process
        dcp.load(tensors, checkpoint_id=folder, no_dist=True)
    return tensors


def _of_deepspeed(folder: Path) -> dict[str, Tensor]:
    if not list(folder.rglob("*optim_states.pt")):  # stage 0
        whole = folder / "deepspeed" / "mp_rank_00_model_states.pt"
        return torch.load(whole, weights_only=False)["module"]
    file = folder.with_suffix(".pt")
    command = [sys.executable, "-c", _READER, str(folder), str(file)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return torch.load(file)


def _renamed(theirs: dict[str, Tensor], heads: int, vocabulary: int) -> dict[str, Tensor]:
    ours = {}
    for name, tensor in theirs.items():
        place, kind = name.rsplit(".", 1)
        if place in _ENDS:
            is_padded = place in ("embedding.word_embeddings", "output_layer")
            ours[f"{_ENDS[place]}.{kind}"] = tensor[:vocabulary] if is_padded else tensor
            continue
        _, _, layer, part = place.split(".", 3)
        block = f"blocks.{int(layer) // 2}"
        if part in _PARTS:
            ours[f"{block}.{_PARTS[part]}.{kind}"] = tensor
            continue
        by_head = tensor.unflatten(0, (heads, 3, -1))
        for number, which in enumerate(("query", "key", "value")):
            ours[f"{block}.{which}.{kind}"] = by_head[:, number].flatten(0, 1)
    return ours
