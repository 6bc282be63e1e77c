"""Memory over one optimizer step: when each tensor on a rank is allocated and freed.

    engine.step(batch, lr)                      # the first step allocates optimizer states and buffers
    trace = step_memory(engine, batch, lr)      # collective: takes one more step
    plots.step_memory({"ddp": trace})

A torch dispatch mode records each storage that an operation returns, and a finalizer records when it is freed. The
workspace inside an operation is not seen. Works for serial, mpi, ddp and fsdp.
"""

from __future__ import annotations

import time
import weakref
from contextlib import AbstractContextManager
from dataclasses import dataclass
from unittest.mock import patch

from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from aiscale.parallel.serial import Engine, MicroBatch

CATEGORIES = ("parameters", "optimizer states", "gathered parameters", "gradients", "buffers", "activations")
#: Arguments of FSDP's own operations -> category. Any other tensor is an activation, unless engine.tensors() has it.
_FSDP_OPERATIONS = {
    "fsdp::all_gather_copy_in": {1: "buffers"},
    "fsdp::split_with_sizes_copy": {0: "buffers", "out": "gathered parameters"},
    "fsdp::chunk_cat": {0: "gradients", "out": "buffers"},
}


@dataclass(frozen=True)
class StepMemory:
    """Memory of one rank during one optimizer step."""

    seconds: list[float]  #: (n,) from the start of the step; each moment twice, before and after it
    held_bytes: dict[str, list[int]]  #: category of CATEGORIES -> (n,)

    @property
    def peak_bytes(self) -> int:
        return max(map(sum, zip(*self.held_bytes.values(), strict=True)))


def step_memory(engine: Engine, micro_batches: list[MicroBatch], lr: float) -> StepMemory:
    """Take one optimizer step (not the engine's first) and record memory."""
    watch = _Watch()
    for category, tensors in engine.tensors().items():
        for tensor in tensors:
            watch.see(tensor, category)
    del tensors, tensor  # else they would outlive the step's zero_grad
    began_s = time.perf_counter()
    with watch.resizing(), watch:
        engine.step(micro_batches, lr)
    ended_s = time.perf_counter()
    for tensor in engine.tensors()["gradients"]:
        watch.see(tensor, "gradients")
    return watch.result(began_s, ended_s)


@dataclass
class _Life:
    """The lifetime of one storage at one size."""

    nbytes: int
    category: str
    begin_s: float
    end_s: float = float("inf")


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.lives: list[_Life] = []
        self._now: dict[int, _Life] = {}  #: living storages, by id

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(t.__name__ == "DTensor" for t in types):
            return NotImplemented  # the subclass calls back here with plain tensors
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self.see(value)
        for place, category in _FSDP_OPERATIONS.get(func.name(), {}).items():
            value = kwargs.get(place) if isinstance(place, str) else args[place]
            for tensor in tree_leaves(value):
                self.see(tensor, category)
        return result

    def see(self, tensor: Tensor, category: str = "") -> None:
        """Record a tensor's storage if it is new; `category` sets its category from the start."""
        storage = tensor.untyped_storage()
        life = self._now.get(id(storage))  # torch keeps this object as long as the storage lives
        if life is None or life.nbytes != storage.nbytes():
            life = self._begin(storage)
        if category:
            life.category = category

    def _begin(self, storage: UntypedStorage) -> _Life:
        known = id(storage) in self._now
        self._end(id(storage))
        life = self._now[id(storage)] = _Life(storage.nbytes(), "activations", time.perf_counter())
        self.lives.append(life)
        if not known:
            weakref.finalize(storage, self._end, id(storage))
        return life

    def _end(self, storage_id: int) -> None:
        if (life := self._now.pop(storage_id, None)) is not None:
            life.end_s = time.perf_counter()

    def resizing(self) -> AbstractContextManager:
        """Record storage resizes: FSDP frees gathered parameters by resizing to 0, which no dispatch mode sees."""
        resize = UntypedStorage.resize_

        def noted(storage: UntypedStorage, size: int):
            result = resize(storage, size)
            self._begin(storage)
            return result

        return patch.object(UntypedStorage, "resize_", noted)

    def result(self, zero: float, end: float) -> StepMemory:
        """The lifetimes as bytes held over time, between two moments."""
        lives = [life for life in self.lives if life.end_s > zero]
        level = {
            c: sum(life.nbytes for life in lives if life.category == c and life.begin_s <= zero) for c in CATEGORIES
        }
        changes = [(life.begin_s, life.category, life.nbytes) for life in lives]
        changes += [(life.end_s, life.category, -life.nbytes) for life in lives]
        changes = sorted(change for change in changes if zero < change[0] < end)
        seconds, held = [0.0], {category: [nbytes] for category, nbytes in level.items()}
        for moment, category, nbytes in [*changes, (end, CATEGORIES[0], 0)]:
            for more in (0, nbytes):  # before and after
                level[category] += more
                seconds.append(moment - zero)
                for each, levels in held.items():
                    levels.append(level[each])
        return StepMemory(seconds, held)
