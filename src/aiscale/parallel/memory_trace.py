"""Memory over one optimizer step: when each tensor on a rank is allocated and freed, and which block was running.

    engine.step(batch, lr)                      # the first step allocates optimizer states and buffers
    trace = step_memory(engine, batch, lr)      # collective: takes one more step
    plots.memory_over_time(trace.seconds, trace.held_bytes)

A torch dispatch mode records each storage that an operation returns, and a finalizer records when it is freed. The
workspace inside an operation is not seen. Works for engines that run all blocks on each rank: serial, mpi, ddp, fsdp.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from aiscale.cost import Event
from aiscale.parallel.serial import Engine, MicroBatch

CATEGORIES = ("parameters", "optimizer states", "gathered parameters", "gradients", "buffers", "activations")
#: Arguments of FSDP's own operations -> category. Any other tensor is an activation, unless engine.held() has it.
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
    events: list[Event]  #: forward and backward pass of each block (the latter with recomputation)

    @property
    def peak_bytes(self) -> int:
        return max(map(sum, zip(*self.held_bytes.values(), strict=True)))


def step_memory(engine: Engine, micro_batches: list[MicroBatch], lr: float) -> StepMemory:
    """Take one optimizer step (not the engine's first) and record memory."""
    watch = _Watch()
    for category, tensors in engine.held().items():
        for tensor in tensors:
            watch.see(tensor, category)
    del tensors, tensor  # else they would outlive the step's zero_grad
    with watch.resizing(), watch, watch.marking(engine.model.blocks):
        watch.mark("step")
        engine.step(micro_batches, lr)
        watch.mark("end")
    for tensor in engine.held()["gradients"]:
        watch.see(tensor, "gradients")
    return watch.result(engine.world.rank)


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
        self.marks: list[tuple[float, str]] = []
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

    @contextmanager
    def resizing(self) -> Iterator[None]:
        """Record storage resizes: FSDP frees gathered parameters by resizing to 0, which no dispatch mode sees."""
        resize = UntypedStorage.resize_

        def noted(storage: UntypedStorage, size: int):
            result = resize(storage, size)
            self._begin(storage)
            return result

        UntypedStorage.resize_ = noted
        try:
            yield
        finally:
            UntypedStorage.resize_ = resize

    # Which block is at work ------------------------------------------------------------------------------------------

    def mark(self, name: str) -> None:
        self.marks.append((time.perf_counter(), name))

    @contextmanager
    def marking(self, blocks: nn.ModuleList) -> Iterator[None]:
        with ExitStack() as hooks:
            for i, block in enumerate(blocks):
                before, after = self._hooks(i)
                # Run first before a block and last after it, so that FSDP's gathering and freeing hooks are inside.
                hooks.callback(block.register_forward_pre_hook(before, prepend=True).remove)
                hooks.callback(block.register_forward_hook(after).remove)
            yield

    def _hooks(self, i: int) -> tuple[Callable, Callable]:
        def before(block: nn.Module, arguments: tuple) -> None:
            if not _in_backward():  # else this is recomputation
                self.mark(f"forward {i}")
                if i == 0:  # the gradient of its input is the last that the blocks compute
                    arguments[0].register_hook(lambda gradient: self.mark("between"))

        def after(block: nn.Module, arguments: tuple, output) -> None:
            if not _in_backward():
                self.mark("between")
                y = output[0] if isinstance(output, tuple) else output
                y.register_hook(lambda gradient: self.mark(f"backward {i}"))

        return before, after

    def result(self, rank: int) -> StepMemory:
        """The lifetimes as bytes held over time."""
        zero, end = self.marks[0][0], self.marks[-1][0]
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
        return StepMemory(seconds, held, list(_events(rank, [(at - zero, name) for at, name in self.marks])))


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _events(rank: int, marks: list[tuple[float, str]]) -> Iterator[Event]:
    """An event from each named mark to the next mark."""
    for (start_s, name), (end_s, _) in itertools.pairwise(marks):
        kind = name.split()[0]
        if kind in ("forward", "backward"):
            yield Event(rank, name, start_s, end_s, kind)
