"""Memory over one optimizer step, by category, as torch's MemTracker sees it.

    engine.step(batch, lr)                      # twice: optimizer states are allocated, then DDP rebuilds its buckets
    trace = step_memory(engine, batch, lr)      # collective: takes one more step
    plots.step_memory({"ddp": trace})

The workspace inside an operation is not seen. Works for serial, mpi, ddp and fsdp.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType
from torch.distributed.fsdp import FSDPModule

from aiscale.parallel.serial import Engine, MicroBatch

#: category -> the trackers' names for it
CATEGORIES = {
    "parameters": ("Parameter", "Sharded Param"),
    "optimizer states": ("Optstate", "OptState"),
    "gathered parameters": ("Unsharded Param",),
    "gradients": ("Gradient", "Sharded Grad", "Unsharded Grad"),
    "buffers": ("Buffer", "All Gather", "Reduce Scatter"),
    "activations": ("Activation", "Temp", "Inputs", "Other"),
}


@dataclass(frozen=True)
class StepMemory:
    """Memory of one rank during one optimizer step."""

    seconds: list[float]  #: (n,) from the start of the step, after each operation
    held_bytes: dict[str, list[int]]  #: category of CATEGORIES -> (n,)

    @property
    def peak_bytes(self) -> int:
        return max(map(sum, zip(*self.held_bytes.values(), strict=True)))


def step_memory(engine: Engine, micro_batches: list[MicroBatch], lr: float) -> StepMemory:
    """Take one optimizer step (the engine's third or a later one) and record memory."""
    seconds: list[float] = []
    levels: list[dict[str, int]] = []
    sharded = isinstance(engine.model, FSDPModule)

    class Recorder(FSDPMemTracker if sharded else MemTracker):
        def _update_peak_stats(self, peak_state) -> None:  # both trackers call it after every operation
            super()._update_peak_stats(peak_state)
            seconds.append(time.perf_counter() - began_s)
            now = self.get_tracker_snapshot("current").get(engine.world.device, {})
            levels.append({getattr(kind, "value", kind): nbytes for kind, nbytes in now.items()})

    tracker = Recorder(engine.model, engine.optimizer) if sharded else Recorder()
    tracker.track_external(*([] if sharded else [engine.model]), engine.optimizer)
    for parameter in [] if sharded else engine.model.parameters():  # its gradient may be a view of DDP's bucket
        tracker._update_and_maybe_create_winfos(parameter.grad, _MemRefType.GRAD)
    began_s = time.perf_counter()
    with tracker:
        engine.step(micro_batches, lr)
    held = {
        category: [sum(level.get(name, 0) for name in names) for level in levels]
        for category, names in CATEGORIES.items()
    }
    return StepMemory(seconds, held)
