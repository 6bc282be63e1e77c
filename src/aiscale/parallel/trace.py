"""When DDP sends: the moments at which gradients appear and buckets travel, on this rank.

    trace = StepTrace(ddp)          # ddp: a DistributedDataParallel module without another communication hook
    trace.start(); ddp(x, y).backward(); events = trace.stop()
    plots.timeline(events)          # of all ranks, gathered

The hook does what DDP does without one, an all-reduce of the mean, and looks at the clock before and after.
"""

import threading
import time

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from aiscale.cost import Event


class StepTrace:
    """The events of one backward pass: `cost.Event`s with kinds backward and communication, seconds from start()."""

    def __init__(self, module: DistributedDataParallel) -> None:
        self.rank, self._events, self._lock = dist.get_rank(), [], threading.Lock()
        self._zero, self.group = 0.0, module.process_group
        self.gradients_ready_s = 0.0  #: when the last bucket was full; backward() itself returns once all have arrived
        module.register_comm_hook(self, _send_and_note)

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


def _send_and_note(trace: StepTrace, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    buffer = bucket.buffer().div_(trace.group.size())
    began, name = trace.now(), f"all-reduce {bucket.index()}"
    trace.gradients_ready_s = began
    sent = dist.all_reduce(buffer, group=trace.group, async_op=True).get_future()

    def note(done: torch.futures.Future) -> Tensor:
        trace.mark(name, began, "communication")
        return done.value()[0]

    return sent.then(note)
