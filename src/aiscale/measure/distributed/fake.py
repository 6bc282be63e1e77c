"""One rank of a large world, beside others that do not exist: a thousand ranks on a laptop.

torch's fake process group ends every collective at once with made-up data; `wire` counts it as
between real ranks. Tensors have shapes but no memory (torch's FakeTensorMode), and every number
read from one of them is 1. DDP and Megatron-Core look into their tensors: with memory=True they are
real ones, with values that mean nothing. Import a strategy's library before (`parallel.preload`):
it may make tensors of its own that must be real.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.futures import Future
from torch.testing._internal.distributed.fake_pg import FakeStore, _create_fake_pg
from torch.utils._python_dispatch import TorchDispatchMode

from aiscale.measure.distributed import wire
from aiscale.measure.distributed.connect import World
from aiscale.measure.distributed.counter import Traffic
from aiscale.measure.distributed.link import Link


class _ReadsOnes(TorchDispatchMode):
    """Lets a program read a number from a tensor without memory."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return 1.0 if args[0].is_floating_point() else 1
        return func(*args, **(kwargs or {}))


class _Done(dist._Work):
    """A collective that has ended; the fake group's has no result, for which DDP's hooks wait."""

    def __init__(self, result) -> None:
        super().__init__()
        self._result = result

    def wait(self, timeout=None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Future:
        future = Future()
        future.set_result(self._result)
        return future


class _NoLink(Link):
    def carry(self, seconds, start, *args, kind=None, **kwargs) -> dist.Work:
        start(*args, **kwargs)
        return _Done(args[0] if args else None)


class _FakeWorld(World):
    def mesh(self, **axes: int) -> DeviceMesh:
        with unset_fake_temporarily():  # a mesh looks for its rank in a tensor
            return super().mesh(**axes)

    def gather(self, value: Any) -> list[Any]:
        """As if every rank had the same: nothing arrives from ranks that do not exist."""
        return [value] * self.size


def _forgetting(mode: FakeTensorMode) -> Callable:
    """torch's swap_tensors, for `module.to`: it refuses a parameter that the mode's memo knows."""
    swap, memo = torch.utils.swap_tensors, mode.fake_tensor_converter.meta_converter.tensor_memo
    return lambda one, other: (memo.clear(), swap(one, other))


def _zeros(self: wire.Wire, tensors: list[torch.Tensor], *args) -> dist.Work:
    """Wire.recv: the fake group leaves memory as it was, which may be no number."""
    self.count("recv", (tensors, *args), 0)
    return _Done([tensor.detach().zero_() for tensor in tensors])


@contextmanager
def fake_world(size: int, rank: int = 0, *, memory: bool = False) -> Iterator[World]:
    """The world of `rank` among `size` ranks; like `connect`, it leaves the earlier world."""
    if dist.is_initialized():
        dist.destroy_process_group()
    cpu, traffic = torch.device("cpu"), Traffic()
    backend = wire.backend_for(traffic, _NoLink(), make=_create_fake_pg)
    dist.init_process_group(backend, store=FakeStore(), rank=rank, world_size=size)
    try:
        with ExitStack() as stack:
            stack.enter_context(patch.object(wire.Wire, "recv", _zeros))
            if not memory:
                mode = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
                stack.enter_context(_ReadsOnes())
                stack.enter_context(patch.object(torch.utils, "swap_tensors", _forgetting(mode)))
            yield _FakeWorld(rank, size, 0, cpu, launcher="none", backend="gloo", traffic=traffic)
    finally:
        dist.destroy_process_group()
