"""When Megatron-Core's schedule does what, on this rank: every forward, backward and message of one step.

    trace = ScheduleTrace(engine)
    trace.start(); engine.step(micro_batches, lr); events = trace.stop()
    plots.timeline(events)          # of all ranks, gathered

Megatron-Core starts and stops a named timer round each of them; `ScheduleTrace` is put where its timers would be. A
forward or backward is named after its micro-batch, from 0 ("2"), with virtual stages after its chunk too ("2.1").
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from aiscale.cost import Event

if TYPE_CHECKING:
    from aiscale.parallel.megatron.engine import MegatronEngine

_KINDS = {"forward-compute": "forward", "backward-compute": "backward", "optimizer-inner-step": "optimizer"}
#: timers that enclose others
_OUTER = {"forward-backward", "optimizer-copy-to-main-grad", "optimizer-copy-main-to-model-params"}
_NAMES = {"optimizer-inner-step": "optimizer", "all-grads-sync": "gradients", "params-all-gather": "parameters"}


class ScheduleTrace:
    """The events of one optimizer step: `cost.Event`s, seconds from start()."""

    def __init__(self, engine: MegatronEngine) -> None:
        self.engine, self.rank = engine, engine.world.rank
        self._events: list[Event] = []
        self._zero, self._current = 0.0, ""

    def start(self) -> None:
        """Set the clock to 0 and listen: call it at the same moment on all ranks, after a barrier."""
        self._events = []
        self.engine.listen(self)
        self._zero = time.perf_counter()

    def stop(self) -> list[Event]:
        """Stop listening; what happened, in order of its beginning."""
        self.engine.listen(None)
        return sorted(self._events, key=lambda event: event.start_s)

    # What the engine tells ------------------------------------------------------------------------------------------

    def working_on(self, micro_batch: int, chunk: int) -> None:
        """The forward or backward pass that runs now belongs to this micro-batch."""
        many = self.engine.grid.virtual > 1
        self._current = f"{micro_batch}.{chunk}" if many else str(micro_batch)

    def follow(self, output: Tensor, micro_batch: int, chunk: int) -> None:
        """Let the backward pass that begins at `output` be named after its micro-batch."""
        if output.requires_grad:
            output.register_hook(lambda _: self.working_on(micro_batch, chunk))

    # What Megatron-Core calls ---------------------------------------------------------------------------------------

    def __call__(self, name: str, log_level: int | None = None) -> _Timer:
        return _Timer(self, name)

    def note(self, name: str, began_s: float) -> None:
        """A timer has stopped."""
        if name in _OUTER:
            return
        kind = _KINDS.get(name, "communication")
        label = self._current if kind in ("forward", "backward") else _NAMES.get(name, name)
        self._events.append(Event(self.rank, label, began_s, self.now(), kind))

    def now(self) -> float:
        """Seconds since start(), with what a GPU still has to do done."""
        if self.engine.world.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - self._zero


class _Timer:
    """Megatron-Core's interface of one timer. It asks for the same one twice, so the beginning is the trace's."""

    _began: dict[str, float] = {}

    def __init__(self, trace: ScheduleTrace, name: str) -> None:
        self.trace, self.name = trace, name

    def start(self, barrier: bool = False) -> None:
        self._began[self.name] = self.trace.now()

    def stop(self, barrier: bool = False) -> None:
        self.trace.note(self.name, self._began.pop(self.name))
