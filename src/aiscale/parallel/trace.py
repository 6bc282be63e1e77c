"""What this rank does when, in a step of DDP, of a pipeline, of Megatron-Core, or in a forward pass of FSDP.

    trace = StepTrace(ddp)          # a DistributedDataParallel module without another communication hook
    trace = PipelineTrace(engine)   # a PipelineEngine
    trace = ScheduleTrace(engine)   # a MegatronEngine
    trace = GatherTrace(engine)     # an FSDPEngine
    world.barrier(); trace.start(); engine.step(micro_batches, lr); events = trace.stop()
    plots.timeline(events)          # of all ranks, gathered; plots.pipeline(events) for stages

Each stands where its library lets it look at the clock: DDP's communication hook, the stages of torch's pipeline,
Megatron-Core's timers, FSDP's custom all-gather. What the library does stays as it was.

Where ranks share cores they slow each other down, and a schedule could not be seen. So all but StepTrace can let a
piece of work last at least so long, by sleeping for the rest. To the other ranks a rank that sleeps is one whose
accelerator computes, and a message that is waited for is one on a slow wire: this rank's own processor is free.
"""

# No `from __future__ import annotations` here: DDP reads the annotations of its hook and wants the types themselves.
import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from aiscale.cost import Event, Work, event_name

if TYPE_CHECKING:
    from aiscale.parallel.fsdp import FSDPEngine
    from aiscale.parallel.megatron import MegatronEngine
    from aiscale.parallel.pipeline import PipelineEngine

#: torch 2.13 gave all_gather_into_tensor this name
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class Trace:
    """Events of this rank, in seconds from start()."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.rank, self._events, self._lock, self._zero = dist.get_rank(), [], threading.Lock(), 0.0
        self._waits_for_gpu = device is not None and device.type == "cuda"

    def start(self) -> None:
        """Set the clock to 0: call it at the same moment on all ranks, after a barrier, before the forward pass."""
        self._events = []
        self._zero = time.perf_counter()

    def now(self) -> float:
        """Seconds since start(); where work is watched piece by piece, with what a GPU still has to do done."""
        if self._waits_for_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - self._zero

    def sleep_until(self, moment_s: float) -> None:
        """Return at `moment_s`, or at once if it is past."""
        time.sleep(max(0.0, moment_s - self.now()))

    def mark(self, name: str, began_s: float, kind: str, until_s: float | None = None) -> float:
        """Note that `name` lasted from `began_s` until `until_s`, by default now; returns that moment."""
        end = self.now() if until_s is None else until_s
        with self._lock:
            self._events.append(Event(self.rank, name, began_s, end, kind))
        return end

    def stop(self) -> list[Event]:
        """What happened, in order of its beginning."""
        with self._lock:
            return sorted(self._events, key=lambda event: event.start_s)


class StepTrace(Trace):
    """The events of one backward pass under DDP: kinds backward and communication. Its hook does what DDP does without
    one, an all-reduce of the mean."""

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

    forward_s, backward_s: the least time for a micro-batch's work in all the pieces of a rank.
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
        """The context of one piece of work; micro_batch -1: more of the work before, the loss after a forward pass."""
        if micro_batch < 0:
            yield
            with self._lock:
                self._events[-1] = self._events[-1]._replace(end_s=self.now())
            return
        began = self.now()
        yield
        self.sleep_until(began + self._least_s[kind] / self._pieces)
        self.mark(event_name(Work(kind, piece, micro_batch), self._pp, self._pieces), began, kind)


class GatherTrace(Trace):
    """The events of one forward pass of FSDP: kinds communication and forward.

    gather_s, block_s: the least time for every gather and every block. A wire carries one message at a time.
    """

    def __init__(self, engine: "FSDPEngine", *, gather_s: float = 0.0, block_s: float = 0.0) -> None:
        super().__init__()
        self.gather_s, self.block_s, self.wire_free_s = gather_s, block_s, 0.0
        engine.model.set_custom_all_gather(_Gather(self, "root"))
        for i, block in enumerate(engine.model.blocks):
            block.set_custom_all_gather(_Gather(self, f"gather {i}"))
            began: list[float] = []
            # Behind FSDP's own hook, which waits for the block's parameters, and before the one that frees them.
            block.register_forward_pre_hook(lambda *_, began=began: began.append(self.now()))
            block.register_forward_hook(lambda *_, i=i, began=began: self._computed(i, began.pop()), prepend=True)

    def start(self) -> None:
        super().start()
        self.wire_free_s = 0.0

    def _computed(self, i: int, began_s: float) -> None:
        self.sleep_until(began_s + self.block_s)
        self.mark(str(i), began_s, "forward")


class _Gather:
    """torch's AllGather for one unit."""

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
    """A message under way; it arrives when it has arrived and its least time is over."""

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


class ScheduleTrace(Trace):
    """The events of one step of Megatron-Core: kinds forward, backward, communication and optimizer.

    forward_s, backward_s: the least time for a micro-batch's work in all the pieces of a rank.
    """

    def __init__(self, engine: "MegatronEngine", *, forward_s: float = 0.0, backward_s: float = 0.0) -> None:
        super().__init__(engine.world.device)
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

    def __call__(self, name: str, log_level: int | None = None) -> SimpleNamespace:
        """The timer of this name, with Megatron-Core's interface."""

        def start(barrier: bool = False) -> None:
            self._began[name] = self.now()

        def stop(barrier: bool = False) -> None:
            self._ended(name)

        return SimpleNamespace(start=start, stop=stop)

    def _ended(self, timer: str) -> None:
        began = self._began.pop(timer)
        message = ("communication", timer) if timer.endswith(("-send", "-recv")) else None
        kind, name = _TIMERS.get(timer, message or ("", ""))
        if kind:
            self.sleep_until(began + self._least_s.get(kind, 0.0))
            self.mark(name or self._current, began, kind)
