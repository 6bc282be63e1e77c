"""The trace of a rank: tensors with their places in the whole, in a file that holds no code.

    kept = piece(parameter)          # {"values", "shape", "at", "size", "partial"}
    save(path, trace); load(path)

Shards of a tensor are put together later, by `shards`; nothing is sent between ranks. Of a large
tensor the trace keeps a sketch: each entry is added, with a random sign, to one of a few thousand
sums. The sketch of a sum is the sum of the sketches, so sketches of shards add up, and it keeps
lengths and angles to some percent."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

WHOLE = 65_536  #: entries of a tensor that is kept as it is
SKETCH = 4_096  #: sums in the sketch of a larger one
WHOLE_ROW, ROW_SKETCH = 32_768, 1_024  #: the same for one sample's part of an activation
_BLOCK = 2**20  #: entries sketched at a time
#: Of a rank that left no trace.
EMPTY = {"ended": "lost", "steps": [], "modules": [], "tied": [], "losses": [], "digests": []}
EMPTY |= {"unseen": [], "notes": [], "libraries": [], "traffic": {}, "connected": False}
EMPTY |= {"orders": []}


def bytes_of(tensor: torch.Tensor) -> bytes:
    """What a tensor holds. Without numpy, which torch itself does not need."""
    whole = tensor.detach().cpu().contiguous()
    return ctypes.string_at(whole.data_ptr(), whole.nbytes)


def empty_step() -> dict:
    """Of a step in which a rank has done nothing yet."""
    step: dict = {}
    for kind in ("weights", "buffers", "local", "before_clip", "grad", "states", "generators"):
        step[kind] = {}
    for kind in ("calls", "losses", "tokens", "lr"):
        step[kind] = []
    return step | {"generator": None}


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU, in fp64 if it was fp64, else in fp32."""
    kind = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    return tensor.detach().to("cpu", kind, copy=True)


def piece(tensor: torch.Tensor, like: torch.Tensor | None = None) -> dict:
    """What this rank has of a tensor, and where in the whole it lies. `like`: the parameter whose
    gradient it is."""
    local, shape, at, partial = tensor, list(tensor.shape), [0] * tensor.dim(), False
    if isinstance(tensor, DTensor):
        _, at = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        partial = any(placement.is_partial() for placement in tensor.placements)
        local = tensor.to_local()
    elif getattr(tensor if like is None else like, "tensor_model_parallel", False):
        shape, at = _in_megatron(tensor, tensor if like is None else like)
    values = wide(local)
    kept = {"shape": tuple(shape), "at": tuple(at), "size": tuple(local.shape), "partial": partial}
    if torch.Size(shape).numel() > WHOLE:
        values = sketch(values, kept["shape"], kept["at"])
    return {**kept, "values": values}


def _in_megatron(tensor: torch.Tensor, like: torch.Tensor) -> tuple[list[int], list[int]]:
    """(shape, at) of a slice that Megatron-Core's tensor parallelism has marked."""
    from megatron.core import parallel_state

    shape, at = list(tensor.shape), [0] * tensor.dim()
    at[like.partition_dim] = (
        parallel_state.get_tensor_model_parallel_rank() * shape[like.partition_dim]
    )
    shape[like.partition_dim] *= parallel_state.get_tensor_model_parallel_world_size()
    return shape, at


def sketch(values: torch.Tensor, shape: tuple[int, ...], at: tuple[int, ...]) -> torch.Tensor:
    """The sums of a slice that begins at `at` in a tensor of this shape, in fp64."""
    sums = torch.zeros(SKETCH, dtype=torch.float64)
    rows = max(1, _BLOCK // max(1, values[:1].numel()))
    for first in range(0, len(values), rows):
        block = values[first : first + rows]
        index = _flat_index(block.shape, shape, (at[0] + first, *at[1:]))
        bucket, sign = _bucket_and_sign(index, SKETCH)
        sums.index_add_(0, bucket, block.flatten().double() * sign)
    return sums


def sketch_rows(rows: torch.Tensor) -> torch.Tensor:
    """(B, ...) -> (B, ROW_SKETCH): the sums of each row."""
    flat = rows.flatten(1).double()
    bucket, sign = _bucket_and_sign(torch.arange(flat.shape[1]), ROW_SKETCH)
    return torch.zeros(len(flat), ROW_SKETCH, dtype=torch.float64).index_add_(
        1, bucket, flat * sign
    )


def _flat_index(size, shape, at) -> torch.Tensor:
    """The places of a slice's entries in the flattened whole."""
    index = torch.zeros((), dtype=torch.int64)
    for length, whole, begin in zip(size, shape, at, strict=True):
        index = index.unsqueeze(-1) * whole + torch.arange(begin, begin + length)
    return index.flatten()


def _bucket_and_sign(index: torch.Tensor, buckets: int) -> tuple[torch.Tensor, torch.Tensor]:
    mixed = index * 0x1E3779B97F4A7C15  # wraps around: the multiplications of splitmix64
    mixed ^= mixed >> 29
    mixed *= 0x3F58476D1CE4E5B9
    return (mixed >> 33) & (buckets - 1), 1.0 - 2.0 * ((mixed >> 20) & 1)


def save(path: str | Path, trace: dict) -> None:
    """Written whole or not at all."""
    torch.save(trace, f"{path}.part")
    os.replace(f"{path}.part", path)


def load(path: str | Path) -> dict:
    return torch.load(path, weights_only=True)
