"""When Megatron-Core's schedule does what, on this rank: every forward, backward and message of one step.

    trace = ScheduleTrace(engine)
    world.barrier(); trace.start(); engine.step(micro_batches, lr); events = trace.stop()
    plots.timeline(events)          # of all ranks, gathered
    plots.pipeline(passes(events))  # without the messages

Megatron-Core starts and stops a named timer round each of them; `ScheduleTrace` stands where its timers would be. A
forward or backward pass is named as in cost.pipeline_timeline.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from aiscale.cost import Event, Work, event_name
from aiscale.parallel.trace import _Trace

if TYPE_CHECKING:
    from aiscale.parallel.megatron.engine import MegatronEngine

#: Megatron-Core's timer -> (kind, name); its other timers are messages, or enclose these
_TIMERS = {
    "forward-compute": ("forward", ""),
    "backward-compute": ("backward", ""),
    "optimizer-inner-step": ("optimizer", "optimizer"),
    "all-grads-sync": ("communication", "gradients"),
    "params-all-gather": ("communication", "parameters"),
    "embedding-grads-all-reduce": ("communication", "embedding"),
    "non-tensor-parallel-grads-all-reduce": ("communication", "norms"),
}


def passes(events: Iterable[Event]) -> list[Event]:
    """The forward and backward passes alone: what is not in them is the bubble."""
    return [event for event in events if event.kind in ("forward", "backward")]


class ScheduleTrace(_Trace):
    """The events of one step: kinds forward, backward, communication and optimizer, seconds from start().

    forward_s, backward_s: let a micro-batch's work in all the pieces of a rank last at least so long, by sleeping for
    the rest, as in trace.PipelineTrace.
    """

    def __init__(self, engine: MegatronEngine, *, forward_s: float = 0.0, backward_s: float = 0.0) -> None:
        super().__init__()
        self.engine, self._current = engine, ""
        self._began: dict[str, float] = {}
        self._least_s = {"forward": forward_s / engine.grid.virtual, "backward": backward_s / engine.grid.virtual}

    def start(self) -> None:
        self.engine.listen(self)
        gc.disable()  # with what Megatron-Core imports, a collection takes 0.2 s: it would look like a slow pass
        super().start()

    def stop(self) -> list[Event]:
        gc.enable()
        self.engine.listen(None)
        return super().stop()

    def now(self) -> float:
        """Seconds since start(), with what a GPU still has to do done."""
        if self.engine.world.device.type == "cuda":
            torch.cuda.synchronize()
        return super().now()

    # What the engine tells ------------------------------------------------------------------------------------------

    def working_on(self, micro_batch: int, chunk: int) -> None:
        """The pass that runs now belongs to this micro-batch, on this rank's chunk-th piece of the model."""
        grid = self.engine.grid
        work = Work("", grid.stage(self.engine.pp_rank, chunk), micro_batch)
        self._current = event_name(work, grid.pp, grid.virtual)

    def follow(self, output: Tensor, micro_batch: int, chunk: int) -> None:
        """Let the backward pass that begins at `output` be named after its micro-batch."""
        if output.requires_grad:
            output.register_hook(lambda _: self.working_on(micro_batch, chunk))

    # What Megatron-Core calls ---------------------------------------------------------------------------------------

    def __call__(self, name: str, log_level: int | None = None) -> _Timer:
        return _Timer(self, name)

    def began(self, timer: str) -> None:
        self._began[timer] = self.now()

    def ended(self, timer: str) -> None:
        began = self._began.pop(timer)
        message = ("communication", timer) if timer.endswith(("-send", "-recv")) else None
        kind, name = _TIMERS.get(timer, message or ("", ""))
        if not kind:
            return
        time.sleep(max(0.0, began + self._least_s.get(kind, 0.0) - self.now()))
        self.mark(name or self._current, began, kind)


class _Timer:
    """One timer with Megatron-Core's interface."""

    def __init__(self, trace: ScheduleTrace, name: str) -> None:
        self.trace, self.name = trace, name

    def start(self, barrier: bool = False) -> None:
        self.trace.began(self.name)

    def stop(self, barrier: bool = False) -> None:
        self.trace.ended(self.name)
