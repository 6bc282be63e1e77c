"""What this rank does when, in a step of DDP or of a pipeline.

    trace = StepTrace(ddp)          # ddp: a DistributedDataParallel module without another communication hook
    trace.start(); ddp(x, y).backward(); events = trace.stop()
    plots.timeline(events)          # of all ranks, gathered

    trace = PipelineTrace(engine)   # engine: a PipelineEngine
    world.barrier(); trace.start(); engine.step(micro_batches, lr); events = trace.stop()
    plots.pipeline(events)          # of all ranks, gathered

StepTrace's hook does what DDP does without one, an all-reduce of the mean, and looks at the clock before and after.
PipelineTrace looks at the clock before and after each piece of work that a schedule gives to a stage.
"""

# No `from __future__ import annotations` here: DDP reads the annotations of its hook and wants the types themselves.
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from aiscale.cost import Event, Work, event_name

if TYPE_CHECKING:
    from aiscale.parallel.pipeline import PipelineEngine


class _Trace:
    """Events of this rank, in seconds from start()."""

    def __init__(self) -> None:
        self.rank, self._events, self._lock, self._zero = dist.get_rank(), [], threading.Lock(), 0.0

    def start(self) -> None:
        """Set the clock to 0: call it at the same moment on all ranks, after a barrier, before the forward pass."""
        self._events = []
        self._zero = time.perf_counter()

    def mark(self, name: str, began_s: float, kind: str, until_s: float | None = None) -> float:
        """Note that `name` lasted from `began_s` until `until_s`, by default now; returns that moment."""
        end = self.now() if until_s is None else until_s
        with self._lock:
            self._events.append(Event(self.rank, name, began_s, end, kind))
        return end

    def now(self) -> float:
        """Seconds since start()."""
        return time.perf_counter() - self._zero

    def stop(self) -> list[Event]:
        """What happened, in order of its beginning."""
        with self._lock:
            return sorted(self._events, key=lambda event: event.start_s)


class StepTrace(_Trace):
    """The events of one backward pass: `cost.Event`s with kinds backward and communication, seconds from start()."""

    def __init__(self, module: DistributedDataParallel) -> None:
        super().__init__()
        self.group = module.process_group
        self.gradients_ready_s = 0.0  #: when the last bucket was full; backward() itself returns once all have arrived
        module.register_comm_hook(self, _send_and_note)


class PipelineTrace(_Trace):
    """The events of one pipeline step: kinds forward, backward and weights, named as in cost.pipeline_timeline.

    forward_s, backward_s: let a micro-batch's work in all the pieces of a rank last at least so long, by sleeping for
    the rest. Where ranks share cores they would otherwise slow each other down, and a schedule could not be seen. To
    the other ranks a rank that sleeps is one whose accelerator computes: its own processor is free.
    """

    def __init__(self, engine: "PipelineEngine", *, forward_s: float = 0.0, backward_s: float = 0.0) -> None:
        super().__init__()
        layout, self._device = engine.run.parallel, engine.world.device
        self._pp, self._pieces = layout.pp, layout.virtual_stages
        half = backward_s / 2 if layout.schedule == "zero-bubble" else backward_s
        self._least_s = {"forward": forward_s, "backward": half, "weights": half}
        engine.watch = self.watch

    def now(self) -> float:
        """Seconds since start(), with what a GPU still has to do done."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return super().now()

    @contextmanager
    def watch(self, kind: str, piece: int, micro_batch: int) -> Iterator[None]:
        """The context of one piece of work; micro_batch -1: more of the work before, the loss after a forward pass."""
        if micro_batch < 0:
            yield
            with self._lock:
                self._events[-1] = self._events[-1]._replace(end_s=self.now())
            return
        began = self.now()
        yield
        time.sleep(max(0.0, began + self._least_s[kind] / self._pieces - self.now()))
        self.mark(event_name(Work(kind, piece, micro_batch), self._pp, self._pieces), began, kind)


def _send_and_note(trace: StepTrace, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    buffer = bucket.buffer().div_(trace.group.size())
    began, name = trace.now(), f"all-reduce {bucket.index()}"
    trace.gradients_ready_s = began
    sent = dist.all_reduce(buffer, group=trace.group, async_op=True).get_future()

    def note(done: torch.futures.Future) -> Tensor:
        trace.mark(name, began, "communication")
        return done.value()[0]

    return sent.then(note)
