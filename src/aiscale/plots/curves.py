"""Curves: loss over steps, and scaling with the number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from aiscale.plots import style

Series = Sequence[float] | Sequence[tuple[float, float]]


def xy(series: Series) -> tuple[np.ndarray, np.ndarray]:
    """(x, y) of a list of (x, y), or of values at steps 1, 2, 3."""
    values = np.asarray(series, dtype=float)
    if values.ndim == 2 and values.shape[1] == 2:
        return values[:, 0], values[:, 1]
    return np.arange(1, len(values) + 1), values


def loss_curves(runs: Mapping[str, Series]) -> Axes:
    """Loss in nats a token over optimizer steps, {label: losses or [(step, loss)]}; each curve is drawn narrower than
    the one below it, so that those that coincide stay visible."""
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
    ranks: Sequence[int], measured: Mapping[str, Sequence[float]], predicted: Mapping[str, Sequence[float]]
) -> Axes:
    """Speed-up over one rank, {label: (len(ranks),)}. The grey line is ideal: n ranks, n times as fast."""
    groups = {"measured": measured, "predicted": predicted}
    ax = style.new_axes(None, 7.5, 3.8)
    colors = style.series_colors({**measured, **predicted})
    for kind, series in groups.items():
        for label, values in series.items():
            style.draw(ax, kind, ranks, values, colors[label])
    ax.plot(ranks, ranks, color=style.FAINT, linewidth=1.4, zorder=1)
    top = max(ranks)
    place = {"textcoords": "offset points", "xytext": (-12, 2), "ha": "right", "va": "bottom", "fontsize": 8.5}
    ax.annotate("ideal", (top, top), color=style.MUTED, **place)
    style.steps_axis(ax.yaxis)
    ax.set_ylim(0, top * 1.06)
    style.ranks_axis(ax.xaxis, ranks)
    ax.set(xlabel="number of ranks", ylabel="speed-up (times one rank)")
    style.legend_above(ax, style.legend_handles(colors, style.kind_handles(groups)))
    return ax
