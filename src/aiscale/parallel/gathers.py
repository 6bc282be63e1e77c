"""When the forward pass of an FSDP engine gathers and when it computes, on this rank.

    trace = GatherTrace(engine, gather_s=0.02, block_s=0.02)
    world.barrier(); trace.start(); engine.evaluate([batch]); events = trace.stop()
    plots.timeline(events, cost.prefetch_timeline(n_layer, 0.02, 0.02, ahead=1))

torch lets the all-gather of a unit be replaced (`set_custom_all_gather`); ours does the same and looks at the clock.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor

from aiscale.parallel.fsdp import FSDPEngine
from aiscale.parallel.trace import _Trace

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name up to torch 2.12


class GatherTrace(_Trace):
    """The events of one forward pass: kinds communication and forward, seconds from start().

    gather_s, block_s: let every gather and every block last at least so long, by sleeping for the rest. Where ranks
    share cores and memory, messages take no time and blocks take turns; a rank that sleeps is one whose accelerator
    computes, and a message that is waited for is one on a slow wire, which carries one at a time.
    """

    def __init__(self, engine: FSDPEngine, *, gather_s: float = 0.0, block_s: float = 0.0) -> None:
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

    def sleep_until(self, moment_s: float) -> None:
        """Return at `moment_s`, or at once if it is past."""
        time.sleep(max(0.0, moment_s - self.now()))

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
        return _Noted(work, trace, self.name, began)


class _Noted(dist._Work):
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
