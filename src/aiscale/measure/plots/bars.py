"""Horizontal bars: bytes, published values beside measured ones."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from aiscale.measure.plots import style

Bytes = Mapping[str, Mapping[str, float]]  #: {configuration: {category or collective: bytes}}

#: Colour of a collective, from the palette of ranks, whose colours are distinguishable.
COLLECTIVE_COLORS = {
    "all_reduce": "#D96709",
    "all_gather": "#0068B8",
    "reduce_scatter": "#60B4A1",
    "send": "#572D88",
    "broadcast": "#FAC62D",
    "other": "#7C828A",
}
#: Colour of a part of the model; the names are those of `cost.parameters`.
PART_COLORS = {
    "token_embedding": "#7AB9EE",
    "position_embedding": "#D9DCE1",
    "attention": "#34548F",
    "mlp": "#F0AF00",
    "norms": "#24272D",
    "head": "#BC6EA3",
}


def memory_bars(
    predicted: Bytes,
    measured: Bytes | None = None,
    *,
    capacity_bytes: float | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Bytes by category, stacked; a bar for each configuration, and ticks for the prediction.

    Both: {configuration: {category: bytes}}. capacity_bytes draws the device's memory as a line.
    """
    groups = _groups(predicted, measured)
    totals = [sum(parts.values()) for group in groups.values() for parts in group.values()]
    unit_bytes, unit = style.memory_unit(max(totals))
    ax = _stacked(groups, style.MEMORY_COLORS, unit_bytes, ax)
    ax.set_xlim(0, 1.13 * max([*totals, capacity_bytes or 0]) / unit_bytes)
    if capacity_bytes is not None:
        ax.set_ylim(top=-0.95)  # room for a line of text over the bars
        x = capacity_bytes / unit_bytes
        ax.axvline(x, color=style.INK, linewidth=1.2, linestyle=":")
        place = {
            "xycoords": ("data", "axes fraction"),
            "textcoords": "offset points",
            "va": "top",
            "fontsize": 8,
        }
        ax.annotate(
            "memory of the device", (x, 1), xytext=(-4, 0), ha="right", color=style.MUTED, **place
        )
    ax.set_xlabel(f"memory ({unit})")
    return ax


def traffic_bars(
    predicted: Bytes, measured: Bytes | None = None, *, unit_bytes: float = 2**20, unit: str = "MiB"
) -> Axes:
    """Bytes by collective, stacked, and ticks for the prediction.

    Both: {configuration: {collective: bytes}}. The axis counts in `unit_bytes`, called `unit`.
    """
    ax = _stacked(_groups(predicted, measured), COLLECTIVE_COLORS, unit_bytes)
    ax.set_xlim(0, 1.13 * ax.dataLim.x1)
    ax.set_xlabel(f"sent by a rank in one step ({unit})")
    return ax


def _groups(predicted: Bytes, measured: Bytes | None) -> dict[str, Bytes]:
    return {"predicted": predicted, "measured": measured} if measured else {"predicted": predicted}


def _rows(groups: Mapping[str, Mapping[str, object]]) -> tuple[list[str], list[tuple[str, str]]]:
    """(the labels, a row (label, kind) for each bar)."""
    labels = list(dict.fromkeys(label for group in groups.values() for label in group))
    return labels, [(label, kind) for label in labels for kind in groups if label in groups[kind]]


def _stacked(
    groups: Mapping[str, Bytes],
    palette: Mapping[str, str],
    unit_bytes: float,
    ax: Axes | None = None,
) -> Axes:
    """A bar for each configuration, its parts in the order of `palette`, its total at the end.

    Over a measured bar a tick where each part was predicted to end.
    """
    labels, rows = _rows(groups)
    ax = style.new_axes(ax, 7.5, 0.95 + 0.45 * len(labels))
    nonzero = dict.fromkeys(
        part for label, kind in rows for part, nbytes in groups[kind][label].items() if nbytes
    )
    parts = [part for part in palette if part in nonzero]
    parts += [part for part in nonzero if part not in palette]
    colors = {part: palette.get(part, palette["other"]) for part in parts}
    drawn, ticks = set(), False
    for y, label in enumerate(labels):
        kind = next(kind for kind in reversed(groups) if label in groups[kind])
        drawn.add(kind)
        left = 0.0
        for part in (part for part in parts if groups[kind][label].get(part)):
            width = groups[kind][label][part] / unit_bytes
            look = style.bar_style(kind, colors[part])
            ax.barh(y, width, left=left, height=0.7, label=f"_{kind}:{part}", **look)
            left += width
        if kind == "measured" and label in groups["predicted"]:
            predicted = groups["predicted"][label]
            ends = np.cumsum([predicted.get(part, 0) for part in parts]) / unit_bytes
            ax.vlines(
                ends, y - 0.48, y + 0.48, color=style.INK, linewidth=2, label=f"_predicted:{label}"
            )
            ticks = True
        place = {"textcoords": "offset points", "xytext": (5, 0), "va": "center", "fontsize": 8.5}
        ax.annotate(f"{left:.3g}", (left, y), color=style.INK, **place)
    ax.set_yticks(range(len(labels)), labels)
    ax.set_ylim(len(labels) - 0.4, -0.6)
    style.for_bars(ax)
    names = {part.replace("_", "-"): color for part, color in colors.items()}
    handles = style.kind_handles(drawn - {"measured"}, bars=True)
    look = {
        "color": style.INK,
        "marker": "|",
        "markersize": 11,
        "markeredgewidth": 2,
        "linestyle": "none",
    }
    handles += [Line2D([], [], label="formula", **look)] if ticks else []
    style.legend_above(ax, style.legend_handles(names, handles, bars=True))
    return ax


def published_vs_measured(
    published: Mapping[str, float],
    measured: Mapping[str, float],
    *,
    xlabel: str = "time (s)",
    source: str = "",
    log: bool | None = None,
) -> Axes:
    """Published values beside measured ones, {label: value}; a group of bars per label.

    Values are in the unit of xlabel. log: a logarithmic axis; the default if values span a factor
    of 30.
    """
    groups = {"published": published, "measured": measured}
    groups = {kind: group for kind, group in groups.items() if group}
    labels, rows = _rows(groups)
    values = [value for group in groups.values() for value in group.values()]
    ax = style.new_axes(None, 7.5, 0.9 + 0.3 * len(rows) + 0.18 * len(labels))
    colors = {label: style.STRATEGY_COLORS["ddp"] for label in labels}
    named = style.series_colors(labels).items()
    colors |= {label: color for label, color in named if style.named(label)}
    log = max(values) > 30 * min(values) if log is None else log
    # So that the shortest bar stays visible.
    left = 10 ** math.floor(math.log10(min(values) / 2)) if log else 0
    y, centers = 0.0, {label: [] for label in labels}
    for i, (label, kind) in enumerate(rows):
        y += 1.0 if i and rows[i - 1][0] == label else 1.6
        _value_bar(ax, y, left, groups[kind][label], kind, colors[label], label)
        centers[label].append(y)
    if log:
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    ax.set_xlim(left, max(values) * (2.2 if log else 1.12))
    ax.set_yticks([sum(at) / len(at) for at in centers.values()], labels)
    ax.set_ylim(y + 0.8, 0.8)
    style.for_bars(ax)
    ax.set_xlabel(xlabel)
    style.legend_above(ax, style.kind_handles(groups, source, bars=True))
    return ax


def _value_bar(
    ax: Axes, y: float, left: float, value: float, kind: str, color: str, label: str
) -> None:
    ax.barh(
        y,
        value - left,
        left=left,
        height=0.8,
        label=f"_{kind}:{label}",
        **style.bar_style(kind, color),
    )
    if kind == "published":
        style.draw(ax, "published", [value], [y], color, clip_on=False)
    place = {"textcoords": "offset points", "xytext": (7, 0), "va": "center", "fontsize": 8.5}
    text = f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}"
    ax.annotate(text, (value, y), color=style.INK, **place)
