"""Copies a training state to host memory, from which a checkpoint is written while training goes on.

    staging = Staging()
    copy = staging.of(engine.state())     # tensors are copied, everything else is deep-copied
    copy = staging.of(engine.state())     # later: into the same memory, after the first copy has been written

Training waits for the copy only. The memory is reused: on a CPU the first use of memory costs more than the copy
itself, on a GPU only pinned memory is filled at the full rate of the link.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class StagingError(RuntimeError):
    """Not enough memory for the copy; the message is one line that says what to do."""


class Staging:
    """Host memory for one copy of a state; the next `of` overwrites it."""

    def __init__(self) -> None:
        self._buffers: dict[str, dict[tuple, Tensor]] = {}  #: part -> path in the state -> its memory

    @torch.no_grad()
    def of(self, state: Any, part: str = "") -> Any:
        """`state` with every tensor copied to host memory, in new containers. `part`: a name for each of several states
        that are kept at the same time."""
        used: dict[tuple, Tensor] = {}
        result = self._copied(state, (part,), used, {})
        self._buffers[part] = used
        if any(tensor.is_pinned() for tensor in used.values()):
            torch.cuda.synchronize()  # copies to pinned memory are asynchronous
        return result

    def _copied(self, value: Any, place: tuple, used: dict, seen: dict[int, Any]) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in seen:  # a tied weight appears twice
                seen[id(value)] = (self._tensor(value, place, used), value)
            return seen[id(value)][0]
        if type(value) in (dict, OrderedDict):
            return type(value)((key, self._copied(each, (*place, key), used, seen)) for key, each in value.items())
        if type(value) in (list, tuple):
            return type(value)(self._copied(each, (*place, i), used, seen) for i, each in enumerate(value))
        return copy.deepcopy(value)

    def _tensor(self, tensor: Tensor, place: tuple, used: dict) -> Tensor:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        local = local.detach()
        buffer = self._buffers.get(place[0], {}).get(place)
        if buffer is None or (buffer.shape, buffer.dtype) != (local.shape, local.dtype):
            buffer = _memory(local)
        used[place] = buffer.copy_(local, non_blocking=True)
        if not isinstance(tensor, DTensor):
            return buffer
        # A checkpoint needs the shards' placements but not the device: the mesh stays that of the GPUs.
        return DTensor(buffer, tensor._spec, requires_grad=False)


def _memory(like: Tensor) -> Tensor:
    try:
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda and like.numel() > 0)
    except RuntimeError as error:
        raise StagingError(
            f"no room in host memory for a copy of this rank's states (a tensor of {like.nbytes:,} bytes was refused): "
            "set loop.async_checkpoint=false, and training waits for the disk instead"
        ) from error
