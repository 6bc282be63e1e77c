"""Counts every byte that ranks send over gloo: `Wire` is a process group that wraps gloo's.

DDP sends from C++ threads, FSDP from autograd hooks, DeepSpeed from its own engine: all of them
call the methods of a `torch.distributed.ProcessGroup`. Groups made later (new_group, a device mesh,
Megatron-Core's) use the same backend. A payload is the whole buffer (the output of an all-gather,
the input of a reduce-scatter), whatever the algorithm.

gloo reads host memory. If ranks hold their tensors on a GPU (connect(backend='gloo')), `Staged`
sends copies. A `link` slows gloo to the rate of a network card. NCCL is not wrapped; `counter`
reads torch's flight recorder.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo

from aiscale.measure.distributed.counter import (
    ANY_SOURCE,
    Group,
    Traffic,
    attach,
    group_name,
    message,
)
from aiscale.measure.distributed.link import Link

_BACKEND = "metered_gloo"
#: the worlds of this process, latest last, and what makes their groups' backends
_joined: list[tuple[Traffic, Link, Callable]] = []

#: method of ProcessGroup -> (collective, index of the argument that holds the payload). torch up to
#: 2.12 uses other names than the `*_single` ones of 2.13; a caller may use either.
_METHODS = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "allgather": ("all_gather", 0),
    "_allgather_base": ("all_gather", 0),
    "all_gather_single": ("all_gather", 0),
    "allgather_into_tensor_coalesced": ("all_gather", 0),
    "all_gather_single_coalesced": ("all_gather", 0),
    "allgather_coalesced": ("all_gather", 0),
    "reduce_scatter": ("reduce_scatter", 1),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 1),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "gather": ("gather", 1),
    "scatter": ("scatter", 0),
    "alltoall": ("all_to_all", 1),
    "alltoall_base": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 1),
    "send": ("send", 0),
    "recv": ("recv", 0),
    "recv_anysource": ("recv", 0),
}
#: passed on without counting: they carry no payload
_UNCOUNTED = ("barrier", "monitored_barrier", "_start_coalescing", "_end_coalescing")


class Wire(dist.ProcessGroup):
    """A process group that counts each call and passes it to the inner group."""

    def __init__(
        self, inner: dist.ProcessGroup, traffic: Traffic, ranks: tuple[int, ...], link: Link
    ) -> None:
        super().__init__(inner.rank(), inner.size())
        self.inner, self.traffic, self.ranks, self.link = inner, traffic, ranks, link
        self._label = ""

    @functools.cached_property
    def group(self) -> Group:
        world_size = dist.get_world_size() if dist.is_initialized() else self.size()
        return Group(group_name(self.group_desc, self.ranks, world_size), self.ranks)

    def getBackendName(self) -> str:
        return self.inner.name()

    def count(self, op: str, args: tuple, payload_index: int) -> int:
        # scatter and gather get one rank's share; the payload is the root's whole buffer.
        shares = self.size() if op in ("scatter", "gather") else 1
        peer = (
            self.ranks[args[1]]
            if op in ("send", "recv") and args[1:2] and 0 <= args[1] < self.size()
            else None
        )
        payload_bytes = shares * sum(
            tensor.numel() * tensor.element_size() for tensor in _tensors(args[payload_index])
        )
        self.traffic.add(op, self.group, payload_bytes)
        self.note_progress(op, payload_bytes, peer)
        return payload_bytes

    def note_progress(self, op: str, nbytes: int = 0, peer: int | None = None) -> None:
        me = self.ranks[self.rank()]
        if op == "send":
            label = message(me, peer)
        elif op == "recv":
            label = message(ANY_SOURCE if peer is None else peer, me)
        else:
            label = self._label = self._label or self.group.label
        self.traffic.progress.begin(op, label, nbytes)


def on_gpu(tensor: torch.Tensor) -> bool:
    """Whether gloo needs a copy of it."""
    return tensor.device.type != "cpu"


class Staged(dist._Work):
    """A gloo collective over host copies of GPU tensors: `wait` copies the results back to the GPU.

    torch's own gloo supports GPUs in some collectives only (not in send and receive). Every message
    passes through the host twice: use it to see that a strategy works on a GPU, not for speed.
    """

    def __init__(
        self, collective: Callable[..., dist.Work], op: str, args: tuple, kwargs: dict
    ) -> None:
        super().__init__()
        self.copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        host = [self._copied(argument) for argument in args]
        self.copies = (
            {} if op == "send" else {key: self.copies[key] for key in map(id, _tensors(args[0]))}
        )
        self.results = args[0]
        self.work = collective(*host, **kwargs)

    def _copied(self, value):
        if isinstance(value, (list, tuple)):
            return [self._copied(item) for item in value]
        if not isinstance(value, torch.Tensor):
            return value
        # A blocking copy: it waits for the GPU to finish computing this tensor.
        return self.copies.setdefault(id(value), (value, value.detach().to("cpu", copy=True)))[1]

    def wait(self, timeout=None) -> bool:
        self.work.wait()
        with torch.no_grad():
            for tensor, copy in self.copies.values():
                tensor.copy_(copy)
        self.copies = {}
        return True

    def is_completed(self) -> bool:
        return self.work.is_completed() and self.wait()

    def get_future(self) -> torch.futures.Future:
        self.wait()
        tensors = list(_tensors(self.results))
        devices = sorted({tensor.device for tensor in tensors if tensor.is_cuda}, key=str)
        future = torch.futures.Future(devices=devices)
        future.set_result(self.results)
        return future


def _tensors(value) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _counting(method: str, op: str, which: int):
    def call(self: Wire, *args, **kwargs):
        payload_bytes = self.count(op, args, which)
        collective = getattr(self.inner, method)
        if op != "recv":  # the sender was slowed already
            seconds = (
                0.0
                if self.traffic.in_control
                else self.link.seconds(op, payload_bytes, self.size())
            )
            kind = (op, payload_bytes, self.size())
            collective = functools.partial(self.link.carry, seconds, collective, kind=kind)
        if any(map(on_gpu, _tensors(args))):
            return Staged(collective, op, args, kwargs)
        return collective(*args, **kwargs)

    return call


def _handing_on(method: str):
    def call(self: Wire, *args, **kwargs):
        if "barrier" in method:
            self.note_progress(method)
        if method == "barrier":
            return self.link.carry(0.0, self.inner.barrier, *args, **kwargs)
        return getattr(self.inner, method)(*args, **kwargs)

    return call


for _method, (_op, _which) in _METHODS.items():
    # torch before 2.13 has no *_single methods; its C++ side would call them if they were there.
    if hasattr(dist.ProcessGroup, _method):
        setattr(Wire, _method, _counting(_method, _op, _which))
for _method in _UNCOUNTED:
    setattr(Wire, _method, _handing_on(_method))


def backend_for(
    traffic: Traffic, link: Link, *, nccl: bool = False, make: Callable | None = None
) -> str:
    """Name of a backend for init_process_group that counts into `traffic`.

    `link` slows gloo's groups, `make` makes another backend than gloo.
    """
    if nccl:
        attach(traffic)
        return "cpu:gloo,cuda:nccl"
    if not _joined:
        dist.Backend.register_backend(_BACKEND, _make, extended_api=True, devices=["cpu"])
    # A process may connect again (a cell run twice): new groups count into the new traffic.
    _joined.append((traffic, link, make or _gloo))
    return _BACKEND


def _make(options, pg_options) -> Wire:
    rank, size = options.group_rank, options.group_size
    ranks = tuple(options.global_ranks_in_group) or tuple(range(size))
    inner = dist.ProcessGroup(options.store, rank, size)
    traffic, link, make = _joined[-1]
    wire, backend = Wire(inner, traffic, ranks, link), make(options, pg_options)
    types = dist.ProcessGroup.BackendType
    kind = types.GLOO if isinstance(backend, ProcessGroupGloo) else types.CUSTOM
    for group in (inner, wire):
        # Register it on Wire too: torch asks Wire for the backend, and methods that Wire lacks
        # still work. For GPUs as well, since several ranks may share one.
        for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            group._register_backend(torch.device(device), kind, backend)
        group._set_default_backend(kind)
    return wire


def _gloo(options, _pg_options) -> ProcessGroupGloo:
    store = dist.PrefixStore("cpu/", options.store)
    gloo = ProcessGroupGloo(store, options.group_rank, options.group_size, timeout=options.timeout)
    gloo._set_sequence_number_for_group()
    return gloo
