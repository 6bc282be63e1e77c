"""`python -m drawn_by_megatron`: what ranks of Megatron-Core draw in a fake world, as JSON.

As tp 8 x pp 2 of a small shape whose vocabulary 8 does not divide: what differs from our model's
weights, the peak of each rank's memory while it draws, and what it draws. Then the line with which
each bad setting is refused.
"""

from __future__ import annotations

import json
import shlex

import torch

from aiscale import without_gpu
from aiscale.measure.distributed.fake import fake_world
from aiscale.measure.meter import allocated_bytes
from aiscale.train.model import build, draw
from aiscale.train.options import options
from aiscale.train.presets import presets

without_gpu.prepare_megatron()
from megatron.core import parallel_state, tensor_parallel  # noqa: E402

from aiscale.train.megatron_model import configure, grid, pieces  # noqa: E402

SHAPE = {"layers": 2, "heads": 16, "width": 512, "vocabulary": 5003, "context": 32}
#: Outside of a layer: Megatron-Core's names of ours.
OUTSIDE = {
    "embed.token.weight": "embedding.word_embeddings.weight",
    "embed.place.weight": "embedding.position_embeddings.weight",
    "head.0.weight": "decoder.final_norm.weight",
    "head.0.bias": "decoder.final_norm.bias",
    "head.1.weight": "output_layer.weight",
}
#: Tensors that ranks of tp cut, and along which dim.
CUT = {"word_embeddings": 0, "output_layer": 0, "linear_qkv": 0, "linear_fc1": 0}
CUT |= {"linear_proj.weight": 1, "linear_fc2.weight": 1}


def settings(words: str):
    return options("megatron").parse_args(shlex.split(words))


def renamed(ours: dict, block: int) -> dict:
    """Our block as Megatron-Core's layers `*` and `-` of a stage, 0 and 1 there; uncut."""
    prefix = f"blocks.{block}."
    mine = {
        name.removeprefix(prefix): tensor
        for name, tensor in ours.items()
        if name.startswith(prefix)
    }
    star, dash = "decoder.layers.0.", "decoder.layers.1."
    names = {"norm1": f"{star}input_layernorm", "out": f"{star}self_attention.linear_proj"}
    names |= {
        "norm2": f"{dash}pre_mlp_layernorm",
        "up": f"{dash}mlp.linear_fc1",
        "down": f"{dash}mlp.linear_fc2",
    }
    theirs = {}
    for kind in ("weight", "bias"):
        theirs |= {f"{name}.{kind}": mine[f"{part}.{kind}"] for part, name in names.items()}
        by_head = [
            mine[f"{part}.{kind}"].unflatten(0, (SHAPE["heads"], -1))
            for part in ("query", "key", "value")
        ]
        theirs[f"{star}self_attention.linear_qkv.{kind}"] = torch.cat(by_head, 1).flatten(0, 1)
    return theirs


def wanted(name: str, whole: torch.Tensor, tp_rank: int, tp: int) -> torch.Tensor:
    """A rank's part of the whole tensor, whose vocabulary is padded with zeros."""
    dims = [dim for part, dim in CUT.items() if part in name]
    if not dims:
        return whole
    if len(whole) == SHAPE["vocabulary"]:
        padding = -len(whole) % 128
        whole = torch.cat([whole, whole.new_zeros(padding, whole.shape[1])])
    return whole.chunk(tp, dims[0])[tp_rank]


def drawn(rank: int, args, ours: dict) -> dict:
    with fake_world(args.tp * args.pp, rank, memory=True):
        parallel_state.initialize_model_parallel(**grid(args), create_gloo_process_groups=False)
        tensor_parallel.model_parallel_cuda_manual_seed(0)
        config, found = configure(args), []
        _, held = allocated_bytes(lambda: found.extend(pieces(config, args)))
        stage, tp_rank = divmod(rank, args.tp)
        theirs = renamed(ours, stage)
        theirs |= {their_name: ours[name] for name, their_name in OUTSIDE.items()}
        weights = dict(found[0].named_parameters())
        differ = [
            name
            for name, weight in weights.items()
            if not weight.equal(wanted(name, theirs[name], tp_rank, args.tp))
        ]
        parallel_state.destroy_model_parallel()
    nbytes = sum(weight.nbytes for weight in weights.values())
    return {
        "names": sorted(weights),
        "differ": differ,
        "peak_bytes": max(held),
        "shard_bytes": nbytes,
    }


if __name__ == "__main__":
    presets()["measured"] = SHAPE
    args = settings("--model measured --tp 8 --pp 2")
    ours = draw(build(args), args, torch.device("cpu")).state_dict()
    ranks = [drawn(rank, args, ours) for rank in range(16)]
    print(json.dumps(ranks))
