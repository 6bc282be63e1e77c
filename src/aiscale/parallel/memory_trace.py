"""Memory over one optimizer step: every tensor that comes and goes on a rank, and which block was at work.

    engine.step(batch, lr)                      # a first step: optimizer states and buffers come into being
    trace = step_memory(engine, batch, lr)      # all ranks call it: it takes one more step
    plots.memory_over_time(trace.seconds, trace.held_bytes)

Between operations torch asks a "dispatch mode" what it wants; ours notes each storage that an operation returns, and
the moment when its last user lets it go, in whichever thread that is. What an operation needs for itself alone while it
runs stays unseen. Works for every engine that runs all blocks on each rank: serial, mpi, ddp, fsdp.
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
#: What FSDP's own operations take and give: argument -> its category. Everything else is an activation, unless the
#: engine calls it its own.
_FSDP_OPERATIONS = {
    "fsdp::all_gather_copy_in": {1: "buffers"},
    "fsdp::split_with_sizes_copy": {0: "buffers", "out": "gathered parameters"},
    "fsdp::chunk_cat": {0: "gradients", "out": "buffers"},
}


@dataclass(frozen=True)
class StepMemory:
    """What one rank held during one optimizer step."""

    seconds: list[float]  #: (n,) from the start of the step; each moment twice, before and after it
    held_bytes: dict[str, list[int]]  #: category of CATEGORIES -> (n,)
    events: list[Event]  #: forward and backward pass of each block (with what it computes again)

    @property
    def peak_bytes(self) -> int:
        """The most that was held at one time."""
        return max(map(sum, zip(*self.held_bytes.values(), strict=True)))


def step_memory(engine: Engine, micro_batches: list[MicroBatch], lr: float) -> StepMemory:
    """Take one optimizer step, not the engine's first, and watch memory."""
    watch = _Watch()
    for category, tensors in engine.held().items():
        for tensor in tensors:
            watch.see(tensor, category)
    del tensors, tensor  # or they would outlive the step's zero_grad
    with watch.resizing(), watch, watch.marking(engine.model.blocks):
        watch.mark("step")
        engine.step(micro_batches, lr)
        watch.mark("end")
    for tensor in engine.held()["gradients"]:
        watch.see(tensor, "gradients")
    return watch.result(engine.world.rank)


@dataclass
class _Life:
    """Of one storage, or of a storage between two changes of its size."""

    nbytes: int
    category: str
    begin_s: float
    end_s: float = float("inf")


class _Watch(TorchDispatchMode):
    """Notes when storages begin and end."""

    def __init__(self) -> None:
        super().__init__()
        self.lives: list[_Life] = []
        self.marks: list[tuple[float, str]] = []
        self._now: dict[int, _Life] = {}  #: of the storages that live, by id

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(t.__name__ == "DTensor" for t in types):
            return NotImplemented  # it will work on plain tensors, and those come by here
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
        """Note a tensor's storage, if it is new; with a category, that it has been of this one all along."""
        storage = tensor.untyped_storage()
        life = self._now.get(id(storage))  # torch keeps the object as long as there is the storage
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
        """FSDP frees what it gathered by shrinking its storage to nothing, which is no operation on a tensor."""
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
        """What begins now."""
        self.marks.append((time.perf_counter(), name))

    @contextmanager
    def marking(self, blocks: nn.ModuleList) -> Iterator[None]:
        """Mark where the passes of blocks begin and end."""
        with ExitStack() as hooks:
            for i, block in enumerate(blocks):
                before, after = self._hooks(i)
                # The first of all before a block and the last after it: FSDP gathers and frees in hooks, too.
                hooks.callback(block.register_forward_pre_hook(before, prepend=True).remove)
                hooks.callback(block.register_forward_hook(after).remove)
            yield

    def _hooks(self, i: int) -> tuple[Callable, Callable]:
        def before(block: nn.Module, arguments: tuple) -> None:
            if not _in_backward():  # where it is, the block is computed again
                self.mark(f"forward {i}")
                if i == 0:  # the gradient of its input is the last thing that the blocks compute
                    arguments[0].register_hook(lambda gradient: self.mark("between"))

        def after(block: nn.Module, arguments: tuple, output) -> None:
            if not _in_backward():
                self.mark("between")
                y = output[0] if isinstance(output, tuple) else output
                y.register_hook(lambda gradient: self.mark(f"backward {i}"))

        return before, after

    def result(self, rank: int) -> StepMemory:
        """The lives as levels over time."""
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
    """From each mark to the next one is an event, if it has the name of one."""
    for (start_s, name), (end_s, _) in itertools.pairwise(marks):
        kind = name.split()[0]
        if kind in ("forward", "backward"):
            yield Event(rank, name, start_s, end_s, kind)
