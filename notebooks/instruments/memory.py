"""Memory over one optimizer step, by category, as torch's MemTracker sees it.

    engine.step(batch, lr)                      # twice: optimizer states are allocated, then DDP rebuilds its buckets
    trace = step_memory(engine, batch, lr)      # collective: takes one more step
    draw(plt.figure(), {"ddp": trace})

The workspace inside an operation is not seen. Works for serial, mpi, ddp and fsdp.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType
from torch.distributed.fsdp import FSDPModule

from aiscale.parallel.serial import Engine, MicroBatch
from aiscale.plots import style

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


#: Of parameters that belong to other ranks: paler than one's own.
_BORROWED = to_hex(style.tint(style.MEMORY_COLORS["parameters"], 0.3))
#: In stacking order: what persists between steps comes first.
_STEP_COLORS = {
    "parameters": style.MEMORY_COLORS["parameters"],
    "optimizer states": style.MEMORY_COLORS["optimizer states"],
    "gradients": style.MEMORY_COLORS["gradients"],
    "gathered parameters": _BORROWED,
    "buffers": style.MEMORY_COLORS["buffers"],
    "activations": style.MEMORY_COLORS["activations"],
}


def draw(figure: Figure, traces: Mapping[str, StepMemory]) -> np.ndarray:
    """Measured bytes over one step, stacked by category, one panel per trace, all on one memory scale."""
    columns = min(2, len(traces))
    axes = figure.subplots(ceil(len(traces) / columns), columns, sharey=True, squeeze=False)
    top = max(np.sum(list(trace.held_bytes.values()), axis=0).max() for trace in traces.values()) / 2**20
    for ax, (label, trace) in zip(axes.flat, traces.items(), strict=False):
        _panel(ax, label, trace, top)
    for ax in axes.flat[len(traces) :]:
        ax.set_visible(False)
    for ax in axes[:, 0]:
        ax.set_ylabel("memory (MiB)")
    categories = {category for trace in traces.values() for category, levels in trace.held_bytes.items() if any(levels)}
    colors = {category: color for category, color in _STEP_COLORS.items() if category in categories}
    handles = style.legend_handles(colors, bars=True)
    figure.legend(handles=handles, ncols=4, loc="outside upper left")
    return axes


def _panel(ax: Axes, label: str, trace: StepMemory, top: float) -> None:
    milliseconds = np.asarray(trace.seconds) * 1e3
    stack = [
        np.asarray(trace.held_bytes.get(category, 0)) / 2**20 * np.ones(len(milliseconds)) for category in _STEP_COLORS
    ]
    names = [f"_{category}" for category in _STEP_COLORS]
    ax.stackplot(milliseconds, stack, colors=list(_STEP_COLORS.values()), labels=names, linewidth=0, step="post")
    ax.set_xlim(milliseconds[0], milliseconds[-1])
    ax.set_ylim(0, 1.16 * top)
    ax.annotate(label, (0, 1), xycoords="axes fraction", textcoords="offset points", xytext=(6, -5), va="top")
    ax.set_xlabel("time (ms)")
