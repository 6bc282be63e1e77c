"""The one place where every byte passes: a process group that wraps gloo and counts.

DDP sends from C++ threads, FSDP from autograd hooks, DeepSpeed from its own engine. All of them end in the methods of
a `torch.distributed.ProcessGroup`, so that is where we stand: `Wire` hands each call on to gloo and notes its payload.

    payload   what was asked for: the bytes of the whole buffer (the gathered result of an all-gather, the input of a
              reduce-scatter), whatever the algorithm
    wire      what one rank sends for it, by the backend's algorithm (`cost.wire_bytes`)

`World.traffic` is what a training loop reads.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo

BACKEND = "metered_gloo"

#: method of ProcessGroup -> (collective, which argument holds the payload). Both the names that torch used up to
#: 2.12 and the `*_single` ones of 2.13 are here: a caller may use either.
_METHODS = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "allgather": ("all_gather", 0),
    "_allgather_base": ("all_gather", 0),
    "all_gather_single": ("all_gather", 0),
    "allgather_into_tensor_coalesced": ("all_gather", 0),
    "allgather_coalesced": ("all_gather", 0),
    "reduce_scatter": ("reduce_scatter", 1),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "gather": ("gather", 1),
    "scatter": ("scatter", 0),
    "alltoall": ("all_to_all", 1),
    "alltoall_base": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 1),
    "send": ("send", 0),
    "recv": ("recv", 0),
}
#: gloo has these only under the older name.
_INNER_NAME = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}


@dataclass
class Count:
    """How often one collective was called over groups of one size, and with how many bytes."""

    calls: int = 0
    payload_bytes: int = 0

    def __sub__(self, earlier: Count) -> Count:
        return Count(self.calls - earlier.calls, self.payload_bytes - earlier.payload_bytes)


@dataclass
class Traffic:
    """What this rank has communicated, by (collective, group size). Calls made for bookkeeping count apart."""

    counts: dict[tuple[str, int], Count] = field(default_factory=lambda: defaultdict(Count))
    control_counts: dict[tuple[str, int], Count] = field(default_factory=lambda: defaultdict(Count))
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _in_control: int = 0

    def add(self, op: str, group_size: int, payload_bytes: int) -> None:
        with self._lock:
            counts = self.control_counts if self._in_control else self.counts
            count = counts[op, group_size]
            count.calls += 1
            count.payload_bytes += payload_bytes

    @contextmanager
    def control(self) -> Iterator[None]:
        """Count what is sent inside as bookkeeping (loss averages, stop flags, saving), not as training traffic."""
        self._in_control += 1
        try:
            yield
        finally:
            self._in_control -= 1

    def snapshot(self) -> dict[tuple[str, int], Count]:
        """A copy of the training traffic so far."""
        with self._lock:
            return {key: Count(c.calls, c.payload_bytes) for key, c in self.counts.items()}

    def since(self, earlier: dict[tuple[str, int], Count]) -> dict[tuple[str, int], Count]:
        """The training traffic that came after `earlier`, a snapshot."""
        later = self.snapshot()
        diff = {key: count - earlier.get(key, Count()) for key, count in later.items()}
        return {key: count for key, count in diff.items() if count.calls}


def _nbytes(value: object) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(_nbytes(item) for item in value)


class Wire(dist.ProcessGroup):
    """A process group that counts, then lets gloo do the work."""

    def __init__(self, inner: dist.ProcessGroup, traffic: Traffic) -> None:
        super().__init__(inner.rank(), inner.size())
        self.inner, self.traffic = inner, traffic

    def getBackendName(self) -> str:
        return BACKEND

    def barrier(self, *args, **kwargs):
        return self.inner.barrier(*args, **kwargs)


def _counting(method: str, op: str, which: int):
    def call(self: Wire, *args, **kwargs):
        # Scatter and gather name one rank's share; the whole buffer is that of the root.
        shares = self.size() if op in ("scatter", "gather") else 1
        self.traffic.add(op, self.size(), _nbytes(args[which]) * shares)
        return getattr(self.inner, _INNER_NAME.get(method, method))(*args, **kwargs)

    call.__name__ = method
    return call


for _method, (_op, _which) in _METHODS.items():
    setattr(Wire, _method, _counting(_method, _op, _which))


def register(traffic: Traffic) -> str:
    """Make `metered_gloo` a backend whose groups count into `traffic`; returns the backend's name."""

    def make(store, rank, size, timeout):
        inner = ProcessGroupGloo(store, rank, size, timeout)
        group = Wire(inner, traffic)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, inner)
        return group

    if BACKEND.upper() in dist.Backend._plugins:
        # Joining again in one process (a notebook's cell run twice): the new groups count into the new traffic.
        dist.Backend._plugins[BACKEND.upper()] = dist.Backend._BackendPlugin(make, False)
    else:
        dist.Backend.register_backend(BACKEND, make, devices=["cpu"])
    return BACKEND
