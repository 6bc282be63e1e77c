"""The timeline of one rank in a step of a pipeline. (`torch.profiler` traces DDP: lesson 03.)

    events = traced(lambda: schedule.step(inputs), forward_s=0.02, backward_s=0.04)  # the fastest of some steps
    schedule_plots.draw({"GPipe": events})                                           # gathered from all ranks

Ranks that share cores slow each other down, which would hide the schedule. So each piece of work gets a minimum time,
and the rank sleeps for the rest, which no profiler does: a sleeping rank stands for a computing accelerator.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from contextlib import ExitStack
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from aiscale.plan.cost import Event


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

    def mark(self, name: str, began_s: float, kind: str) -> None:
        """Record `name` from `began_s` to now."""
        self._events.append(Event(self.rank, name, began_s, self.now(), kind))

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
