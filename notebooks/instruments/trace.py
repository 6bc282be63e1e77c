"""Timelines of one rank: a step of a pipeline, or a forward pass of FSDP. (`torch.profiler` traces DDP: lesson 03.)

    events = traced(lambda: schedule.step(inputs), forward_s=0.02, backward_s=0.04)  # the fastest of some steps
    trace = GatherTrace(engine, gather_s=0.02, block_s=0.03)   # an FSDPEngine
    world.barrier(); trace.start(); engine.evaluate(micro_batches); events = trace.stop()
    plots.pipeline(events)          # events gathered from all ranks; plots.timeline(events) for FSDP

Ranks that share cores slow each other down, which would hide the schedule. So each piece of work gets a minimum time,
and the rank sleeps for the rest, which no profiler does: a sleeping rank stands for a computing accelerator, a delayed
message for a slow network.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from contextlib import ExitStack
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from aiscale.cost import Event
from aiscale.parallel.serial import Engine

#: torch 2.13 gave all_gather_into_tensor this name
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class Trace:
    """Events of this rank, in seconds from start()."""

    def __init__(self) -> None:
        self.rank, self._events, self._zero = dist.get_rank(), [], 0.0

    def start(self) -> None:
        """Set the clock to 0: call it on all ranks right after a barrier, before the forward pass."""
        self._events = []
        self._zero = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._zero

    def sleep_until(self, moment_s: float) -> None:
        time.sleep(max(0.0, moment_s - self.now()))

    def mark(self, name: str, began_s: float, kind: str, until_s: float | None = None) -> None:
        """Record `name` from `began_s` to `until_s` (default: now)."""
        self._events.append(Event(self.rank, name, began_s, self.now() if until_s is None else until_s, kind))

    def stop(self) -> list[Event]:
        return sorted(self._events, key=lambda event: event.start_s)


def traced(step: Callable[[], object], forward_s: float = 0.0, backward_s: float = 0.0, steps: int = 4) -> list[Event]:
    """This rank's events in the fastest of some calls of `step` after a first one that warms up: kinds forward and
    backward, named by the micro-batch. All ranks agree which call was the fastest.

    step: a step of a schedule of torch.distributed.pipelining, with one stage a rank.
    forward_s, backward_s: minimum time of a micro-batch's pass.
    """
    trace, taken = Trace(), []
    with ExitStack() as stack:
        for kind, least_s in (("forward", forward_s), ("backward", backward_s)):
            name = f"{kind}_one_chunk"
            slowed = _slowed(trace, kind, least_s, getattr(PipelineStage, name))
            stack.enter_context(patch.object(PipelineStage, name, slowed))
        for _ in range(steps):
            dist.barrier()
            trace.start()
            step()
            taken.append(trace.stop())
    took_s = torch.tensor([events[-1].end_s for events in taken[1:]])
    dist.all_reduce(took_s, dist.ReduceOp.MAX)
    return taken[1 + int(took_s.argmin())]


def _slowed(trace: Trace, kind: str, least_s: float, run_pass: Callable) -> Callable:
    @functools.wraps(run_pass)
    def wrapper(stage: PipelineStage, micro_batch: int, *args, **kwargs):
        began = trace.now()
        result = run_pass(stage, micro_batch, *args, **kwargs)
        trace.sleep_until(began + least_s)
        trace.mark(str(micro_batch), began, kind)
        return result

    return wrapper


class GatherTrace(Trace):
    """The events of one forward pass of FSDP: kinds communication and forward.

    gather_s, block_s: minimum time of every all-gather and of every block. Gathers run one at a time.
    """

    def __init__(self, engine: Engine, *, gather_s: float = 0.0, block_s: float = 0.0) -> None:
        super().__init__()
        self.gather_s, self.block_s, self.wire_free_s = gather_s, block_s, 0.0
        engine.model.set_custom_all_gather(_Gather(self, "root"))
        for i, block in enumerate(engine.model.blocks):
            block.set_custom_all_gather(_Gather(self, f"gather {i}"))
            began: list[float] = []
            # After FSDP's own hook, which waits for the block's parameters, and before the one that frees them.
            block.register_forward_pre_hook(lambda *_, began=began: began.append(self.now()))
            block.register_forward_hook(lambda *_, i=i, began=began: self._computed(i, began.pop()), prepend=True)

    def start(self) -> None:
        super().start()
        self.wire_free_s = 0.0

    def _computed(self, i: int, began_s: float) -> None:
        self.sleep_until(began_s + self.block_s)
        self.mark(str(i), began_s, "forward")


class _Gather:
    """FSDP's AllGather interface for one unit."""

    def __init__(self, trace: GatherTrace, name: str) -> None:
        self.trace, self.name = trace, name

    def allocate(self, size, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group, async_op: bool = False) -> dist.Work:
        trace = self.trace
        began = max(trace.now(), trace.wire_free_s)
        trace.wire_free_s = began + trace.gather_s
        work = _all_gather(output_tensor, input_tensor, group=group, async_op=True)
        return _TracedGather(work, trace, self.name, began)


class _TracedGather(dist.Work):
    """A message in flight; it completes when the data are here and its minimum time is over."""

    def __init__(self, work: dist.Work, trace: GatherTrace, name: str, began_s: float) -> None:
        super().__init__()
        self.work, self.trace, self.name, self.began_s, self.arrived_s = work, trace, name, began_s, 0.0
        work.get_future().then(self._note)

    def _note(self, done: torch.futures.Future) -> None:
        self.arrived_s = self.trace.now()

    def wait(self, timeout=None) -> bool:
        self.work.wait()
        arrived = max(self.arrived_s or self.trace.now(), self.began_s + self.trace.gather_s)
        self.trace.sleep_until(arrived)
        self.trace.mark(self.name, self.began_s, "communication", until_s=arrived)
        return True
