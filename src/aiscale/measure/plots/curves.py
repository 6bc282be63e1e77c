"""Curves: loss over steps, scaling with the number of ranks, and the ratios of a study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from aiscale.measure.plots import style

Series = Sequence[float] | Sequence[tuple[float, float]]


def xy(series: Series) -> tuple[np.ndarray, np.ndarray]:
    """(x, y) of a list of (x, y), or of values at steps 1, 2, 3."""
    values = np.asarray(series, dtype=float)
    if values.ndim == 2 and values.shape[1] == 2:
        return values[:, 0], values[:, 1]
    return np.arange(1, len(values) + 1), values


def loss_curves(runs: Mapping[str, Series]) -> Axes:
    """Loss in nats a token over optimizer steps, {label: losses or [(step, loss)]}.

    Each curve is drawn narrower than the one below it, so that those that coincide stay visible.
    """
    ax = style.new_axes(None)
    colors = style.series_colors(runs)
    many = max(1, len(runs) - 1)
    for i, (label, losses) in enumerate(runs.items()):
        steps, values = xy(losses)
        width = 1.4 + 4.2 * (len(runs) - 1 - i) / many
        ax.plot(steps, values, color=colors[label], linewidth=width, zorder=2 + i / 10)
    style.steps_axis(ax.xaxis)
    ax.set(xlabel="optimizer step", ylabel="loss (nats per token)")
    if len(colors) > 1:
        style.legend_above(ax, style.legend_handles(colors))
    return ax


def speedup(
    ranks: Sequence[int],
    measured: Mapping[str, Sequence[float]],
    predicted: Mapping[str, Sequence[float]],
) -> Axes:
    """Speed-up over one rank, {label: (len(ranks),)}; grey: ideal, n ranks, n times as fast."""
    groups = {"measured": measured, "predicted": predicted}
    ax = style.new_axes(None, 7.5, 3.8)
    colors = style.series_colors({**measured, **predicted})
    for kind, series in groups.items():
        for label, values in series.items():
            style.draw(ax, kind, ranks, values, colors[label])
    ax.plot(ranks, ranks, color=style.FAINT, linewidth=1.4, zorder=1)
    top = max(ranks)
    place = {
        "textcoords": "offset points",
        "xytext": (-12, 2),
        "ha": "right",
        "va": "bottom",
        "fontsize": 8.5,
    }
    ax.annotate("ideal", (top, top), color=style.MUTED, **place)
    style.steps_axis(ax.yaxis)
    ax.set_ylim(0, top * 1.06)
    style.ranks_axis(ax.xaxis, ranks)
    ax.set(xlabel="number of ranks", ylabel="speed-up (times one rank)")
    style.legend_above(ax, style.legend_handles(colors, style.kind_handles(groups)))
    return ax


def study_ratios(
    cells: Mapping[str, Sequence[Mapping[str, float]]], names: Sequence[str] = ()
) -> Axes:
    """A mark at the median and a line over the interval, for each study.

    cells: {cell: [{"median", "low", "high"}, ...]}.
    """
    ax = style.new_axes(None, 7.5, 0.9 + 0.21 * len(cells))
    for y, studies in enumerate(cells.values()):
        for i, ratio in enumerate(studies):
            look = {
                "color": (style.INK, style.RANK_COLORS[6])[i],
                "marker": "os"[i],
                "markersize": 5,
            }
            at = y + 0.44 * (i - (len(studies) - 1) / 2)
            ax.plot([ratio["low"], ratio["high"]], [at, at], color=look["color"])
            label = "" if y or not names else names[i]
            ax.plot(ratio["median"], at, **look, linestyle="", label=label)
    ax.axvline(1, color=style.MUTED, linestyle=":", zorder=0)
    ax.set(
        xscale="log",
        xlabel="time of an epoch over that of the base beside it",
        ylim=(len(cells) - 0.4, -0.6),
    )
    ax.set_yticks(range(len(cells)), cells)
    ax.minorticks_off()
    low, high = ax.get_xlim()
    round_ones = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
    ticks = [tick for tick in round_ones if low <= tick <= high]
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    if names:
        style.legend_above(ax, ax.get_legend_handles_labels()[0])
    return ax
