"""Timelines of one rank: a step of DDP or of a pipeline, or a forward pass of FSDP.

    trace = StepTrace(ddp)          # a DistributedDataParallel module without another communication hook
    trace = PipelineTrace(engine)   # a PipelineEngine
    trace = GatherTrace(engine)     # an FSDPEngine
    world.barrier(); trace.start(); engine.step(micro_batches, lr); events = trace.stop()
    events = pipeline_step(run, world, micro_batches, forward_s=0.02, backward_s=0.04)  # the fastest of some steps
    plots.timeline(events)          # events gathered from all ranks; plots.pipeline(events) for stages

Each trace uses a hook that its library offers: DDP's communication hook, torch's pipeline stages, FSDP's custom
all-gather. The library's work does not change.

Ranks that share cores slow each other down, which would hide the schedule. So all traces but StepTrace can set a
minimum time for each piece of work and sleep for the rest: a sleeping rank stands for a computing accelerator, a
delayed message for a slow network.
"""

# No `from __future__ import annotations` here: DDP checks its hook's annotations, which must be types, not strings.
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from aiscale.config import Run
from aiscale.cost import Event, Work, event_name
from aiscale.distributed import World
from aiscale.parallel.build import build

if TYPE_CHECKING:
    from aiscale.parallel.fsdp import FSDPEngine
    from aiscale.parallel.pipeline import PipelineEngine

#: torch 2.13 gave all_gather_into_tensor this name
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class Trace:
    """Events of this rank, in seconds from start()."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.rank, self._events, self._zero = dist.get_rank(), [], 0.0  # other threads append, too
        self._waits_for_gpu = device is not None and device.type == "cuda"

    def start(self) -> None:
        """Set the clock to 0: call it on all ranks right after a barrier, before the forward pass."""
        self._events = []
        self._zero = time.perf_counter()

    def now(self) -> float:
        """Seconds since start(); synchronizes the GPU first if this trace has a device."""
        if self._waits_for_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - self._zero

    def sleep_until(self, moment_s: float) -> None:
        time.sleep(max(0.0, moment_s - self.now()))

    def mark(self, name: str, began_s: float, kind: str, until_s: float | None = None) -> float:
        """Record `name` from `began_s` to `until_s` (default: now); returns the end."""
        end = self.now() if until_s is None else until_s
        self._events.append(Event(self.rank, name, began_s, end, kind))
        return end

    def stop(self) -> list[Event]:
        return sorted(self._events, key=lambda event: event.start_s)


class StepTrace(Trace):
    """The events of one backward pass under DDP: kinds backward and communication. Its hook averages with an
    all-reduce, as DDP does without a hook."""

    def __init__(self, module: DistributedDataParallel) -> None:
        super().__init__()
        self.group = module.process_group
        self.gradients_ready_s = 0.0  #: when the last bucket was full; backward() itself returns once all have arrived
        module.register_comm_hook(self, _send_and_note)


def _send_and_note(trace: StepTrace, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    buffer = bucket.buffer().div_(trace.group.size())
    began, name = trace.now(), f"all-reduce {bucket.index()}"
    trace.gradients_ready_s = began
    sent = dist.all_reduce(buffer, group=trace.group, async_op=True).get_future()

    def note(done: torch.futures.Future) -> Tensor:
        trace.mark(name, began, "communication")
        return done.value()[0]

    return sent.then(note)


class PipelineTrace(Trace):
    """The events of one pipeline step: kinds forward, backward and weights, named as in cost.pipeline_timeline.

    forward_s, backward_s: minimum time of one micro-batch's pass through all pieces of a rank.
    """

    def __init__(self, engine: "PipelineEngine", *, forward_s: float = 0.0, backward_s: float = 0.0) -> None:
        super().__init__(engine.world.device)
        layout = engine.run.parallel
        self._pp, self._pieces = layout.pp, layout.virtual_stages
        half = backward_s / 2 if layout.schedule == "zero-bubble" else backward_s
        self._least_s = {"forward": forward_s, "backward": half, "weights": half}
        engine.watch = self.watch

    @contextmanager
    def watch(self, kind: str, piece: int, micro_batch: int) -> Iterator[None]:
        """The context of one pass; micro_batch -1 continues the pass before it (the loss after a forward pass)."""
        if micro_batch < 0:
            yield
            self._events[-1] = self._events[-1]._replace(end_s=self.now())
            return
        began = self.now()
        yield
        self.sleep_until(began + self._least_s[kind] / self._pieces)
        self.mark(event_name(Work(kind, piece, micro_batch), self._pp, self._pieces), began, kind)


def pipeline_step(run: Run, world: World, micro_batches: list, *, steps: int = 4, **least_s: float) -> list[Event]:
    """This rank's events in the fastest step of strategy "pipeline", after a first one that warms up; `least_s` as for
    PipelineTrace. All ranks agree which step was the fastest."""
    engine = build(run, world)
    trace, found = PipelineTrace(engine, **least_s), []
    for _ in range(steps):
        world.barrier()
        trace.start()
        engine.step(micro_batches, lr=0.0)
        found.append(trace.stop())
    engine.close()
    ends_s = world.gather([events[-1].end_s for events in found[1:]])
    took_s = [max(step) for step in zip(*ends_s, strict=True)]
    return found[1 + took_s.index(min(took_s))]


class GatherTrace(Trace):
    """The events of one forward pass of FSDP: kinds communication and forward.

    gather_s, block_s: minimum time of every all-gather and of every block. Gathers run one at a time.
    """

    def __init__(self, engine: "FSDPEngine", *, gather_s: float = 0.0, block_s: float = 0.0) -> None:
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
        self.work, self.trace, self.name, self.began_s = work, trace, name, began_s
        self.arrived_s: float | None = None
        work.get_future().then(self._note)

    def _note(self, done: torch.futures.Future) -> None:
        self.arrived_s = self.trace.now()

    def wait(self, timeout=None) -> bool:
        self.work.wait()
        arrived = max(self.arrived_s or self.trace.now(), self.began_s + self.trace.gather_s)
        self.trace.sleep_until(arrived)
        self.trace.mark(self.name, self.began_s, "communication", until_s=arrived)
        return True
