"""How a training run went: loss, learning rate, batch size, and how far two strategies are apart.

plots.loss_curves({"serial": losses, "ddp x2": losses}, validation={"serial": [(step, loss), ...]})
plots.learning_rates({"linear scaling, warm-up": lrs})
plots.loss_vs_batch({"lr 3e-4": [(batch, loss), ...]})
plots.loss_difference({"ddp x2": differences}, tolerance=1e-10)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from aiscale.config import ConfigError
from aiscale.plots import style

Series = Sequence[float] | Sequence[tuple[float, float]]


def _points(series: Series) -> tuple[np.ndarray, np.ndarray]:
    """(x, y) of a list of (x, y), or of values at steps 1, 2, 3."""
    values = np.asarray(series, dtype=float)
    if values.ndim == 2 and values.shape[1] == 2:
        return values[:, 0], values[:, 1]
    if values.ndim != 1 or not len(values):
        raise ConfigError("a curve is a list of values, or of (step, value) pairs, and not empty")
    return np.arange(1, len(values) + 1), values


def loss_curves(
    runs: Mapping[str, Series],
    validation: Mapping[str, Series] | None = None,
    *,
    references: Mapping[str, float] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Training loss in nats a token over optimizer steps; circles: validation; dotted levels: references.

    runs, validation: {label: losses or [(step, loss)]}; references: {label: loss}, the entropy of bigrams, say.
    Curves that lie on one another all stay visible: each is drawn narrower than the one below it.
    """
    ax = style.new_axes(ax)
    validation = validation or {}
    labels = list(dict.fromkeys([*runs, *validation]))
    colors = style.series_colors(labels)
    many = max(1, len(runs) - 1)
    for i, (label, losses) in enumerate(runs.items()):
        steps, values = _points(losses)
        width = 1.4 + (4.2 * (len(runs) - 1 - i) / many if len(runs) > 1 else 0)
        ax.plot(steps, values, color=colors[label], linewidth=width, zorder=2 + i / 10)
    for label, losses in validation.items():
        steps, values = _points(losses)
        style.draw(ax, "measured", steps, values, colors[label], linestyle="", markersize=6, zorder=4)
    for name, level in (references or {}).items():
        ax.axhline(level, color=style.MUTED, linewidth=1, linestyle=":")
        place = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "color": style.MUTED}
        ax.annotate(name, (1, level), xytext=(0, 3), ha="right", va="bottom", fontsize=8.5, **place)
    style.steps_axis(ax.xaxis)
    ax.set(xlabel="optimizer step", ylabel="loss (nats per token)")
    handles = style.legend_handles({label: colors[label] for label in labels})
    if validation:
        handles += [_mark("training", linewidth=1.6), _mark("validation", marker="o", linestyle="")]
    if len(handles) > 1:
        style.legend_above(ax, handles)
    return ax


def _mark(label: str, **options):
    return Line2D([], [], color=style.MUTED, label=label, **options)


def learning_rates(schedules: Mapping[str, Series], *, ax: Axes | None = None) -> Axes:
    """The learning rate over optimizer steps. schedules: {label: rates or [(step, rate)]}."""
    ax = style.new_axes(ax, height=3.0)
    colors = style.series_colors(schedules)
    for label, rates in schedules.items():
        ax.plot(*_points(rates), color=colors[label])
    style.steps_axis(ax.xaxis)
    ax.set(xlabel="optimizer step", ylabel="learning rate (per step)")
    ax.set_ylim(bottom=0)
    ax.yaxis.set_major_formatter(lambda rate, _: _tiny(rate))
    style.legend_above(ax, style.legend_handles(colors))
    return ax


def _tiny(rate: float) -> str:
    """0.0003 -> '3e-4', which is how such rates are written in configurations."""
    return f"{rate:.1e}".replace("e-0", "e-").replace(".0e", "e") if rate > 0 else "0"


def loss_vs_batch(
    runs: Mapping[str, Sequence[tuple[float, float]]],
    *,
    xlabel: str = "global batch (sequences)",
    ylabel: str = "validation loss (nats per token)",
    ax: Axes | None = None,
) -> Axes:
    """Loss reached over the global batch. runs: {label: [(sequences, loss)]}, all measured."""
    ax = style.new_axes(ax)
    colors = style.series_colors(runs)
    for label, series in runs.items():
        style.draw(ax, "measured", *_points(series), colors[label])
    ax.set_xscale("log", base=2)
    style.ranks_axis(ax.xaxis, [batch for series in runs.values() for batch, _ in series])
    ax.set(xlabel=xlabel, ylabel=ylabel)
    style.legend_above(ax, style.legend_handles(colors))
    return ax


def loss_difference(
    differences: Mapping[str, Series], tolerance: float | None = None, *, ax: Axes | None = None
) -> Axes:
    """How far losses are from the serial run's, step by step, on a logarithmic axis.

    differences: {label: |loss - serial loss|}; tolerance: what still counts as equal. A difference of exactly 0 has
    no place on the axis: it is drawn at the lower edge, and a run without any other is labelled "equal bit for bit".
    """
    ax = style.new_axes(ax)
    curves = {label: _points(np.abs(np.asarray(values, dtype=float))) for label, values in differences.items()}
    positive = [v for _, values in curves.values() for v in values if v > 0] + ([tolerance] if tolerance else [])
    floor = 10.0 ** (np.floor(np.log10(min(positive, default=1e-16))) - 1)
    colors = style.series_colors(curves)
    names = {}
    for label, (steps, values) in curves.items():
        ax.plot(steps, np.maximum(values, floor), color=colors[label], marker="o", markersize=3, linewidth=1.2)
        names[label if values.any() else f"{label} (equal bit for bit)"] = colors[label]
    if tolerance is not None:
        ax.axhline(tolerance, color=style.INK, linewidth=1, linestyle=":")
        place = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "color": style.MUTED}
        ax.annotate(f"tolerance {tolerance:g}", (1, tolerance), xytext=(0, -4), ha="right", va="top", **place)
    ax.set_yscale("log")
    ax.set_ylim(floor * 0.7, max([*positive, floor * 10]) * 5)
    style.steps_axis(ax.xaxis)
    ax.set(xlabel="optimizer step", ylabel="difference from serial (nats)")
    style.legend_above(ax, style.legend_handles(names))
    return ax
