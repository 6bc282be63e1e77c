"""What sharding does to tensors and to memory.

plots.shards(cost.parameter_shapes(model), 4)             # which rows of which tensor lie on which rank
plots.step_memory({"ddp": trace, "fsdp": trace})          # memory over one step, a panel for each strategy
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import ceil
from typing import Protocol

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from aiscale.config import ConfigError
from aiscale.cost import Event
from aiscale.plots import style

#: In the order in which they are stacked: what is there between steps comes first.
_COLORS = {
    "parameters": style.MEMORY_COLORS["parameters"],
    "optimizer states": style.MEMORY_COLORS["optimizer states"],
    "gradients": style.MEMORY_COLORS["gradients"],
    "gathered parameters": style.MEMORY_COLORS["weight casts"],
    "buffers": style.MEMORY_COLORS["buffers"],
    "activations": style.MEMORY_COLORS["activations"],
}
#: Of the strip: greys, because the light blue of a forward pass is that of gathered parameters here.
_PASSES = {"forward": style.tint(style.INK, 0.3), "backward": style.tint(style.INK, 0.7)}


class Trace(Protocol):
    """A `parallel.memory.StepMemory`."""

    seconds: list[float]
    held_bytes: dict[str, list[int]]
    events: list[Event]


def shards(shapes: Mapping[str, tuple[int, ...]], ranks: int, *, ax: Axes | None = None) -> Axes:
    """One bar for each tensor, as wide as it has rows, cut where FSDP cuts it: ceil(rows / ranks) rows for a rank.

    What is missing to a multiple of it is padding, drawn hollow. Bars are drawn to the longest one's scale.
    """
    if not shapes:
        raise ConfigError("no tensors: give shards {name: shape}, for example cost.parameter_shapes(model)")
    ax = style.new_axes(ax, 7.5, 0.9 + 0.27 * len(shapes))
    longest = max(ranks * ceil(shape[0] / ranks) for shape in shapes.values())
    for y, shape in enumerate(shapes.values()):
        each = ceil(shape[0] / ranks)
        for rank in range(ranks):
            begin, end = min(rank * each, shape[0]), min((rank + 1) * each, shape[0])
            color = style.RANK_COLORS[rank % len(style.RANK_COLORS)]
            ax.barh(y, end - begin, left=begin, height=0.74, color=color, linewidth=0, label=f"_rank {rank}")
            if end - begin > 0.045 * longest:
                number = {"ha": "center", "va": "center", "fontsize": 8, "color": style.text_color(color)}
                ax.text((begin + end) / 2, y, str(end - begin), **number)
        padding = ranks * each - shape[0]
        hollow = {"facecolor": style.PAPER, "edgecolor": style.MUTED, "linestyle": (0, (2, 1.5)), "linewidth": 0.8}
        if padding:
            ax.add_patch(Rectangle((shape[0], y - 0.37), padding, 0.74, label="_padding", **hollow))
    names = [f"{name}  ({' × '.join(map(str, shape))})" for name, shape in shapes.items()]
    ax.set_yticks(range(len(shapes)), names, fontsize=8.5)
    ax.set_ylim(len(shapes) - 0.5, -0.5)
    ax.set_xlim(0, longest * 1.01)
    ax.grid(visible=False)
    ax.set_xlabel("rows of the tensor")
    colors = {f"rank {rank}": style.RANK_COLORS[rank % len(style.RANK_COLORS)] for rank in range(ranks)}
    padded = any(shape[0] % ranks for shape in shapes.values())
    more = [Rectangle((0, 0), 1, 1, label="padding", **hollow)] if padded else []
    style.legend_above(ax, style.legend_handles(colors, more, bars=True))
    return ax


def step_memory(traces: Mapping[str, Trace], *, unit_bytes: float = 2**20, unit: str = "MiB") -> np.ndarray:
    """Measured bytes over one step, stacked by category, a panel for each of `traces`, all with one scale of memory.

    The strip under a panel shows which block is at work: forward, then backward.
    """
    if not traces:
        raise ConfigError("nothing to draw: give step_memory {label: trace of parallel.memory.step_memory}")
    columns = min(2, len(traces))
    rows = ceil(len(traces) / columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(7.5, 0.7 + 2.15 * rows), sharey=True, layout="constrained", squeeze=False
    )
    top = max(np.sum(list(trace.held_bytes.values()), axis=0).max() for trace in traces.values()) / unit_bytes
    for ax, (label, trace) in zip(axes.flat, traces.items(), strict=False):
        _panel(ax, label, trace, unit_bytes, top)
    for ax in axes.flat[len(traces) :]:
        ax.set_visible(False)
    for ax in axes[:, 0]:
        ax.set_ylabel(f"memory ({unit})")
    found = {category for trace in traces.values() for category, levels in trace.held_bytes.items() if any(levels)}
    colors = {category: color for category, color in _COLORS.items() if category in found}
    handles = style.legend_handles(colors | _PASSES, bars=True)
    figure.legend(handles=handles, ncols=4, loc="outside upper left")
    return axes


def _panel(ax: Axes, label: str, trace: Trace, unit_bytes: float, top: float) -> None:
    milliseconds = np.asarray(trace.seconds) * 1e3
    stack = [
        np.asarray(trace.held_bytes.get(category, 0)) / unit_bytes * np.ones(len(milliseconds)) for category in _COLORS
    ]
    names = [f"_{category}" for category in _COLORS]
    ax.stackplot(milliseconds, stack, colors=list(_COLORS.values()), labels=names, linewidth=0)
    strip = 0.055 * top
    _strip(ax, trace.events, -1.35 * strip, strip)
    ax.set_xlim(0, milliseconds[-1])
    ax.set_ylim(-1.6 * strip, 1.16 * top)
    ax.annotate(label, (0, 1), xycoords="axes fraction", textcoords="offset points", xytext=(6, -5), va="top")
    ax.set_xlabel("time (ms)")


def _strip(ax: Axes, events: Iterable[Event], y: float, height: float) -> None:
    for event in events:
        start, width = event.start_s * 1e3, (event.end_s - event.start_s) * 1e3
        color = _PASSES[event.kind]
        ax.add_patch(Rectangle((start, y), width, height, facecolor=color, edgecolor=style.PAPER, linewidth=0.6))
