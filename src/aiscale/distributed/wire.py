"""The one place where every byte passes: a process group that wraps gloo (or NCCL) and counts.

DDP sends from C++ threads, FSDP from autograd hooks, DeepSpeed from its own engine. All of them end in the methods of
a `torch.distributed.ProcessGroup`, so that is where we stand: `Wire` hands each call on, `Traffic` notes its payload.
Groups that anyone makes later (new_group, a device mesh, Megatron-Core's) are of the same backend, so they count too.

    payload   what was asked for: the bytes of the whole buffer (the gathered result of an all-gather, the input of a
              reduce-scatter), whatever the algorithm
    wire      what one rank sends for it, by the backend's algorithm (`cost.wire_bytes`)

    before = world.traffic.groups()
    engine.step(...)
    world.traffic.groups_since(before)     # {("all_reduce", Group("world", (0, 1))): Count(calls, payload_bytes)}

gloo reads host memory. Where its ranks hold tensors on a GPU (several ranks may share one: loop.backend=gloo),
`Staged` sends copies of them. A `link` slows gloo's collectives to the rate of a network card.

On CUDA, NCCL runs unwrapped and `flight` reads what it did from torch's flight recorder; AISCALE_NCCL_WIRE=1 puts NCCL
inside a Wire instead (see `register`).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo

from aiscale.distributed import flight
from aiscale.distributed.counter import Count, Group, Traffic, group_name
from aiscale.distributed.link import Link
from aiscale.distributed.progress import ANY_SOURCE, message
from aiscale.distributed.progress import label as group_label

__all__ = ["Count", "Group", "Traffic", "Wire", "backend_for", "register"]

BACKEND = "metered_gloo"
NCCL_BACKEND = "metered_nccl"

#: method of ProcessGroup -> (collective, which argument holds the payload). Both the names that torch used up to
#: 2.12 and the `*_single` ones of 2.13 are here: a caller may use either.
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
#: handed on without counting: they carry no payload
_UNCOUNTED = ("barrier", "monitored_barrier", "_start_coalescing", "_end_coalescing")


def _nbytes(value: object) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(_nbytes(item) for item in value)


class Wire(dist.ProcessGroup):
    """A process group that counts, then lets the group inside it do the work."""

    def __init__(
        self, inner: dist.ProcessGroup, traffic: Traffic, ranks: tuple[int, ...], link: Link | None = None
    ) -> None:
        super().__init__(inner.rank(), inner.size())
        self.inner, self.traffic, self.ranks, self.link = inner, traffic, ranks, link or Link()
        self.reads_gpus = False  #: whether the group inside takes tensors on a GPU as they are
        self._group: Group | None = None
        self._label = ""

    @property
    def group(self) -> Group:
        """Its label. The description that its maker gave it arrives after the group is made, so it is read late."""
        if self._group is None:
            world_size = dist.get_world_size() if dist.is_initialized() else self.size()
            self._group = Group(group_name(self.group_desc, self.ranks, world_size), self.ranks)
        return self._group

    def getBackendName(self) -> str:
        return self.inner.name()

    def count(self, op: str, args: tuple, which: int) -> int:
        """Note a call; returns its payload in bytes."""
        # Scatter and gather name one rank's share; the whole buffer is that of the root.
        shares = self.size() if op in ("scatter", "gather") else 1
        peer = self.ranks[args[1]] if op in ("send", "recv") and args[1:2] and 0 <= args[1] < self.size() else None
        payload_bytes = _nbytes(args[which]) * shares
        self.traffic.add(op, self.group, payload_bytes, peer)
        self.note_progress(op, payload_bytes, peer)
        return payload_bytes

    def note_progress(self, op: str, nbytes: int = 0, peer: int | None = None) -> None:
        """Let the watchdog know what is begun."""
        me = self.ranks[self.rank()]
        if op == "send":
            label = message(me, peer)
        elif op == "recv":
            label = message(ANY_SOURCE if peer is None else peer, me)
        else:
            label = self._label = self._label or group_label(self.group.name, self.ranks)
        self.traffic.progress.begin(op, label, nbytes)


def on_gpu(tensor: torch.Tensor) -> bool:
    """Whether gloo needs a copy of it."""
    return tensor.device.type != "cpu"


class Staged(dist._Work):
    """A collective of gloo over copies of GPU tensors in host memory: `wait` brings the results back to the GPU.

    torch's own gloo knows GPUs in some collectives only (not in send and receive). Every message passes through the
    host twice, so this is for seeing that a strategy works on a GPU, not for speed.
    """

    def __init__(self, collective: Callable[..., dist.Work], op: str, args: tuple, kwargs: dict) -> None:
        super().__init__()
        self.copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        host = [self._copied(argument) for argument in args]
        self.copies = {} if op == "send" else {key: self.copies[key] for key in map(id, _tensors(args[0]))}
        self.results = args[0]
        self.work = collective(*host, **kwargs)

    def _copied(self, value):
        if isinstance(value, (list, tuple)):
            return [self._copied(item) for item in value]
        if not isinstance(value, torch.Tensor):
            return value
        # A blocking copy: it waits for what the GPU has still to compute of this tensor.
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


def _staged(collective: Callable[..., dist.Work], op: str, *args, **kwargs) -> Staged:
    return Staged(collective, op, args, kwargs)


def _counting(method: str, op: str, which: int):
    def call(self: Wire, *args, **kwargs):
        payload_bytes = self.count(op, args, which)
        collective = getattr(self.inner, method)
        if not self.reads_gpus and any(map(on_gpu, _tensors(args))):
            collective = functools.partial(_staged, collective, op)
        if self.link.rate_mbit_s and not self.traffic.in_control:
            return self.link.carry(self, op, payload_bytes, args, lambda: collective(*args, **kwargs))
        return collective(*args, **kwargs)

    call.__name__ = method
    return call


def _handing_on(method: str):
    def call(self: Wire, *args, **kwargs):
        if "barrier" in method:
            self.note_progress(method)
        return getattr(self.inner, method)(*args, **kwargs)

    call.__name__ = method
    return call


for _method, (_op, _which) in _METHODS.items():
    # torch before 2.13 has no *_single methods; defining them there would make torch's C++ side call them.
    if hasattr(dist.ProcessGroup, _method):
        setattr(Wire, _method, _counting(_method, _op, _which))
for _method in _UNCOUNTED:
    setattr(Wire, _method, _handing_on(_method))


def backend_for(traffic: Traffic, device: torch.device, backend: str = "auto", link: Link | None = None) -> str:
    """The backend, for init_process_group, that counts into `traffic` what is sent from the CPU and from `device`;
    gloo: over gloo even from a GPU; `link` slows gloo's groups."""
    if device.type != "cuda" or backend == "gloo":
        return register(traffic, link)
    if os.environ.get("AISCALE_NCCL_WIRE") == "1":
        return register(traffic, nccl=True)
    flight.attach(traffic)
    return "cpu:gloo,cuda:nccl"


def register(traffic: Traffic, link: Link | None = None, *, nccl: bool = False) -> str:
    """Make a backend whose groups count into `traffic`; returns its name, for init_process_group.

    nccl: CUDA tensors go to an NCCL inside (CPU tensors to gloo as ever). It is asked for by AISCALE_NCCL_WIRE=1 and
    not the default, because torch treats a group that is not its own class differently in one place:
    `batch_isend_irecv` would not fuse its messages, and NCCL can wait for ever where both directions meet. A
    replacement that fuses them is put in its place; whoever holds torch's own function from before is not protected.
    """
    name, devices = (NCCL_BACKEND, ["cpu", "cuda"]) if nccl else (BACKEND, ["cpu"])

    def make(options, pg_options) -> Wire:
        rank, size = options.group_rank, options.group_size
        ranks = tuple(options.global_ranks_in_group) or tuple(range(size))
        inner = dist.ProcessGroup(options.store, rank, size)
        wire = Wire(inner, traffic, ranks, link)
        wire.reads_gpus = nccl
        for device, kind, backend in _backends(options, pg_options, nccl):
            # Wire knows the backends too: torch asks it for them, and a call that Wire does not know still arrives.
            for group in (inner, wire):
                group._register_backend(torch.device(device), kind, backend)
        for group in (inner, wire):
            group._set_default_backend(kind)
        return wire

    if name.upper() in dist.Backend._plugins:
        # Joining again in one process (a notebook's cell run twice): the new groups count into the new traffic.
        dist.Backend._plugins[name.upper()] = dist.Backend._BackendPlugin(make, True)
    else:
        dist.Backend.register_backend(name, make, extended_api=True, devices=devices)
    if nccl:
        _fuse_messages_of_wires()
    return name


def _backends(options, pg_options, nccl: bool) -> Iterator[tuple]:
    """(device, kind, backend) of each device; the last one is the default."""
    types = dist.ProcessGroup.BackendType
    prefix, rank, size = dist.PrefixStore, options.group_rank, options.group_size
    gloo = ProcessGroupGloo(prefix("cpu/", options.store), rank, size, timeout=options.timeout)
    gloo._set_sequence_number_for_group()
    yield "cpu", types.GLOO, gloo
    if not nccl:
        if torch.cuda.is_available():  # gloo sends from GPUs as well: several ranks may share one
            yield "cuda", types.GLOO, gloo
        return
    from torch._C._distributed_c10d import ProcessGroupNCCL

    settings = pg_options or ProcessGroupNCCL.Options()
    settings._timeout = options.timeout
    settings.global_ranks_in_group, settings.group_name = options.global_ranks_in_group, options.group_id
    backend = ProcessGroupNCCL(prefix("cuda/", options.store), rank, size, settings)
    backend._set_sequence_number_for_group()
    yield "cuda", types.NCCL, backend


def _fuse_messages_of_wires() -> None:
    """Let `batch_isend_irecv` treat a Wire as it treats torch's own groups: a batch of messages is one NCCL call."""
    c10d = dist.distributed_c10d
    original: Callable = c10d.batch_isend_irecv
    if getattr(original, "fuses_wires", False):
        return

    def batch_isend_irecv(p2p_op_list):
        group = p2p_op_list[0].group or c10d._get_default_group()
        device = p2p_op_list[0].tensor.device
        if not isinstance(group, Wire) or not group._get_backend(device).supports_coalescing:
            return original(p2p_op_list)
        with c10d._coalescing_manager(group, device, async_ops=True) as batch:
            for p2p in p2p_op_list:
                to = "group_dst" if p2p.op is c10d.isend else "group_src"
                p2p.op(p2p.tensor, group=p2p.group, tag=p2p.tag, **{to: p2p.group_peer})
        return batch.works

    batch_isend_irecv.fuses_wires = True
    c10d.batch_isend_irecv = dist.batch_isend_irecv = batch_isend_irecv
