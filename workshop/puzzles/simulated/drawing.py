"""A simulated run as a picture: ranks over time, their messages, and the memory of the fullest rank.

draw(world, {"time": 6, "memory": 5})        # -> the two Axes; targets are dashed lines
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch

from aiscale.measure import plots
from aiscale.measure.plots import style
from aiscale.plan.cost import Event
from simulated.world import World


def draw(world: World, targets: Mapping[str, float] | None = None, span_s: float = 0.0) -> np.ndarray:
    """span_s: the time axis reaches at least to here."""
    targets = targets or {}
    holds = world.memory_gb > 0 and (not targets or "memory" in targets)
    span_s = max(world.time_s, targets.get("time", 0.0), span_s, 1.0)
    pieces = max(1, world.layers // world.size) if world.labels == "micro" else 1
    tall = 0.62 if pieces > 1 else 0.5 if world.layers else 0.36
    rows = 0.9 + tall * world.size
    heights = [rows, 1.7] if holds else [rows]
    figure, axes = plt.subplots(
        len(heights), 1, figsize=(7.5, sum(heights)), height_ratios=heights, layout="constrained", squeeze=False
    )
    axes = axes[:, 0]
    _work(axes[0], world, span_s)
    if "time" in targets:
        _target(axes[0], targets["time"], f"target {targets['time']:g} s", vertical=True)
    if holds:
        axes[0].set_xlabel("")
        axes[0].tick_params(labelbottom=False)
        _memory(axes[1], world, targets, span_s)
    return axes


def _work(ax: Axes, world: World, span_s: float) -> None:
    chunks = [event for event in world.events if event.name.startswith("chunk")]
    if chunks:
        _chunks(ax, chunks)
    elif world.events:
        rows = {"pipeline": plots.pipeline, "timeline": plots.timeline}
        rows["pipeline" if world.labels == "micro" else "timeline"](world.events, ax=ax)
    for rank, (since_s, what) in world.stuck.items():
        look = {"facecolor": style.EVENT_COLORS["wait"], "edgecolor": style.MUTED, "hatch": "//", "alpha": 0.6}
        ax.barh(rank, max(0.3, span_s - since_s), left=since_s, height=0.3, linewidth=0, **look)
        said = f"  waits for {what.partition(' of ')[0]}"
        paper = {"boxstyle": "square,pad=0.15", "facecolor": style.PAPER, "edgecolor": "none"}
        ax.text(0.99 * span_s, rank, said, ha="right", va="center", fontsize=8, color=style.INK, bbox=paper)
    ax.set(xlim=(0, 1.015 * span_s), ylim=(world.size - 0.45, -0.55), xlabel="time (s)")
    style.steps_axis(ax.xaxis)
    ax.set_yticks(range(world.size), [f"rank {r}" for r in range(world.size)])
    edge = 0.26 if chunks else 0.42
    for m in world.messages:
        step = 1 if m.to > m.source else -1
        far = abs(m.to - m.source) > 1 and world.size > 2
        look = {"color": style.INK, "alpha": 0.35 if far else 0.75, "linewidth": 0.8, "zorder": 4}
        head = {"arrowstyle": "-|>,head_length=2.4,head_width=1.3"}
        from_s = (m.start_s + m.arrived_s) / 2 if chunks else m.start_s
        ends = (from_s, m.source + edge * step), (m.arrived_s, m.to - edge * step)
        ax.add_patch(FancyArrowPatch(*ends, shrinkA=0, shrinkB=0, **head, **look))


def _chunks(ax: Axes, events: Sequence[Event]) -> None:
    """Messages alone: a chunk has one colour wherever it goes."""
    for event in events:
        number = event.name.split()[-1]
        color = style.RANK_COLORS[int(number) % len(style.RANK_COLORS)]
        width = event.end_s - event.start_s
        ax.barh(event.rank, width, left=event.start_s, height=0.5, facecolor=color, edgecolor=style.PAPER)
        words = {"ha": "center", "va": "center", "fontsize": 8, "color": style.text_color(color)}
        ax.text(event.start_s + width / 2, event.rank, number, **words)
    style.for_bars(ax)


def _memory(ax: Axes, world: World, targets: Mapping[str, float], span_s: float) -> None:
    """The fullest rank by kinds of memory; others, where they differ, as lines."""
    fullest = max(range(world.size), key=world.peak_gb)
    levels = {rank: list(world.memory(rank)) for rank in range(world.size)}
    times = [0.0, *(at_s for at_s, _ in levels[fullest]), span_s]
    kinds = [kind for kind in style.MEMORY_COLORS if any(held.get(kind) for _, held in levels[fullest])]
    held = [levels[fullest][0][1], *(held for _, held in levels[fullest]), levels[fullest][-1][1]]
    colors = [style.MEMORY_COLORS[kind] for kind in kinds]
    stack = [[each.get(kind, 0.0) for each in held] for kind in kinds]
    ax.stackplot(times, stack, step="post", colors=colors, linewidth=0)
    names = {"weight casts": "gathered parameters", "other": "chunks"}
    handles = style.legend_handles(dict(zip([names.get(k, k) for k in kinds], colors, strict=True)), bars=True)
    others = [rank for rank in levels if levels[rank] != levels[fullest]]
    look = {"color": style.INK, "linewidth": 0.8, "alpha": 0.6}
    for rank in others:
        steps = [(at_s, sum(held.values())) for at_s, held in levels[rank]]
        ax.step(*zip((0, 0), *steps, (span_s, steps[-1][1]), strict=True), where="post", **look)
    handles += [Line2D([], [], label="other ranks", **look)] if others else []
    style.legend_above(ax, handles)
    top = max(world.memory_gb, targets.get("memory", 0.0))
    ax.set(xlim=(0, 1.015 * span_s), ylim=(0, 1.2 * top), xlabel="time (s)", ylabel=f"rank {fullest} (GB)")
    style.steps_axis(ax.xaxis)
    if "memory" in targets:
        _target(ax, targets["memory"], f"target {targets['memory']:g} GB", vertical=False)


def _target(ax: Axes, at: float, words: str, vertical: bool) -> None:
    (ax.axvline if vertical else ax.axhline)(at, color=style.INK, linewidth=1.3, linestyle="--", zorder=5)
    place = {"xytext": (-4, 4), "textcoords": "offset points", "fontsize": 8, "color": style.INK}
    if vertical:
        ax.annotate(words, (at, 1), xycoords=("data", "axes fraction"), ha="right", va="bottom", **place)
    else:
        ax.annotate(words, (1, at), xycoords=("axes fraction", "data"), ha="right", va="bottom", **place)
