"""What Radius keeps, sends and costs.

plots.mask_overlap({0.4: [(1, 0.93), (10, 0.71)]})                       # how long a mask stays good
plots.radius_curves({"dense": losses, "radius d 0.4": losses}, perplexities)
plots.density_times(measured, predicted, published, source="...")        # break-even density
plots.link_speedups({"radius d 0.4": [(rate_mbit_s, times)]}, marks={"Perlmutter's ratio": 280})
plots.perplexity_trend({"radius d 0.4": [(steps, mean, low, high)]})     # cost over the length of training
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from aiscale.config import ConfigError
from aiscale.plots import style
from aiscale.plots.curves import Series, xy

Points = Sequence[tuple[float, float]]

# Which entries -------------------------------------------------------------------------------------------------------


def mask_overlap(overlaps: Mapping[float, Points]) -> Axes:
    """Share of a choice that is chosen again, {density: [(steps in between, share)]}; dashed: by chance."""
    ax = style.new_axes(None, 7.5, 3.4)
    names = {f"d {density:g}": style.METHOD_COLORS.get(f"radius d {density:g}", style.MUTED) for density in overlaps}
    for (density, points), color in zip(overlaps.items(), names.values(), strict=True):
        style.draw(ax, "measured", *xy(points), color)
        steps = [steps for steps, _ in points]
        style.draw(ax, "predicted", [min(steps), max(steps)], [density, density], color, linewidth=1.2)
    ax.set_xscale("log")
    style.ranks_axis(ax.xaxis, [steps for points in overlaps.values() for steps, _ in points])
    ax.yaxis.set_major_formatter(PercentFormatter(1, 0))
    ax.set(ylim=(0, 1.04), xlabel="steps between two choices", ylabel="chosen again (%)")
    measured, chance = style.kind_handles(["measured", "predicted"])
    chance.set_label("by chance")
    style.legend_above(ax, style.legend_handles(names, [measured, chance]))
    return ax


# How training goes ---------------------------------------------------------------------------------------------------


def radius_curves(
    losses: Mapping[str, Series],
    perplexities: Mapping[str, Series],
    *,
    errors: Mapping[str, Sequence[tuple[float, ...]]] | None = None,
    switch: float | None = None,
    window: int = 1,
) -> np.ndarray:
    """Training loss, loss error (dense minus the run) and validation perplexity, as in the artifact's figures.

    losses, perplexities: {label: values by step, or [(step, value)]}, "dense" among them. errors: {label: [(step,
    mean, low, high)]} over several seeds; by default the differences of `losses`. A perplexity may also have low and
    high. switch: the last dense step. window: steps over which losses are averaged. Returns three Axes.
    """
    if "dense" not in losses:
        raise ConfigError(f"the baseline 'dense' is not among the runs {', '.join(losses) or '(none)'}")
    axes = plt.subplots(3, 1, figsize=(7.5, 7.4), layout="constrained", sharex=True)[1]
    looks = style.method_looks(dict.fromkeys([*losses, *perplexities]))
    colors = {label: look["color"] for label, look in looks.items()}
    smooth = {label: _averaged(*xy(series), window) for label, series in losses.items()}
    for label, (steps, values) in smooth.items():
        axes[0].plot(steps, values, color=colors[label], linewidth=3.2 if label == "dense" else 1.4)
        if label != "dense" and errors is None:
            shared, here, there = np.intersect1d(steps, smooth["dense"][0], return_indices=True)
            axes[1].plot(shared, smooth["dense"][1][there] - values[here], color=colors[label], linewidth=1.4)
    for label, points in (errors or {}).items():
        steps, means, *_ = zip(*points, strict=True)
        axes[1].plot(steps, means, color=colors[label], linewidth=1.4)
        _shade(axes[1], points, colors[label])
    for label, series in perplexities.items():
        spread = [point for point in series if np.ndim(point) and len(point) == 4]
        style.draw(axes[2], "measured", *xy([point[:2] for point in spread] or series), **looks[label])
        _shade(axes[2], spread, colors[label])
    axes[1].axhline(0, color=style.FAINT, linewidth=1.4, zorder=1)
    for ax in axes if switch is not None else ():
        ax.axvline(switch, color=style.MUTED, linewidth=0.9, linestyle=":", zorder=1)
    style.steps_axis(axes[2].xaxis)
    axes[0].set_ylabel("training loss (nats)")
    axes[1].set_ylabel("dense minus run (nats)")
    axes[2].set(ylabel="validation perplexity", xlabel="optimizer step")
    style.legend_above(axes[0], [Line2D([], [], label=label, **look) for label, look in looks.items()])
    return axes


def _shade(ax: Axes, points: Sequence[tuple[float, ...]], color: str) -> None:
    if points:
        steps, _, low, high = zip(*points, strict=True)
        ax.fill_between(steps, low, high, color=color, alpha=0.2, linewidth=0, zorder=1)


def _averaged(steps: np.ndarray, values: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Means over consecutive windows of `window` points, each at its last step."""
    whole = len(values) // window * window
    return steps[window - 1 : whole : window], values[:whole].reshape(-1, window).mean(axis=1)


# Cost and gain --------------------------------------------------------------------------------------------------------


def density_times(
    measured: Points = (), predicted: Points = (), published: Points = (), *, source: str = "", ax: Axes | None = None
) -> Axes:
    """Time of a step over that of a dense one, by density, [(density, ratio)]; below the grey line Radius is faster."""
    series = {"measured": measured, "predicted": predicted, "published": published}
    series = {kind: points for kind, points in series.items() if len(points)}
    ax = style.new_axes(ax, 7.5, 3.4)
    for kind, points in series.items():
        color = style.INK if kind == "published" else style.STRATEGY_COLORS["radius"]
        style.draw(ax, kind, *xy(sorted(points)), color)
    ax.axhline(1, color=style.FAINT, linewidth=1.4, zorder=1)
    ax.set(xlim=(0, 1.02), xlabel="density d (share of entries sent)", ylabel="time of a step (dense = 1)")
    ax.set_ylim(0, 1.08 * max(1, *(ratio for points in series.values() for _, ratio in points)))
    style.legend_above(ax, style.kind_handles(series, source))
    return ax


def link_speedups(
    measured: Mapping[str, Points], *, marks: Mapping[str, float] | None = None, ax: Axes | None = None
) -> Axes:
    """Speed-up over the baseline by link rate, {label: [(Mbit/s, speed-up)]}; marks: {label: rate}."""
    ax = style.new_axes(ax, 7.5, 3.8)
    looks = style.method_looks(measured)
    for label, points in measured.items():
        style.draw(ax, "measured", *xy(points), **looks[label])
    ax.axhline(1, color=style.FAINT, linewidth=1.4, zorder=1)
    for name, rate in (marks or {}).items():
        ax.axvline(rate, color=style.MUTED, linewidth=1, linestyle=":", zorder=1)
        place = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "fontsize": 8.5}
        ax.annotate(name, (rate, 1), xytext=(4, -4), va="top", color=style.MUTED, **place)
    ax.set_xscale("log")
    style.ranks_axis(ax.xaxis, [rate for points in measured.values() for rate, _ in points])
    ax.xaxis.set_major_formatter(lambda rate, _: f"{rate:,.0f}")
    ax.set(xlabel="rate of each rank's link (Mbit/s)", ylabel="speed-up (baseline = 1)")
    ax.set_ylim(bottom=0)
    style.legend_above(ax, [Line2D([], [], label=label, **look) for label, look in looks.items()])
    return ax


Spread = tuple[float, float, float, float]  # x, then mean, lowest and highest over seeds


def perplexity_trend(runs: Mapping[str, Sequence[Spread]], *, ax: Axes | None = None) -> Axes:
    """Perplexity increase over the length of training, {label: [(steps, mean, low, high) in percent]}.

    Labels are offset sideways, so that their error bars do not overlap.
    """
    beside = [1.035 ** (i - (len(runs) - 1) / 2) for i in range(len(runs))]
    shifted = {
        label: [(steps * shift, *spread) for steps, *spread in points]
        for (label, points), shift in zip(runs.items(), beside, strict=True)
    }
    ax = perplexities(shifted, ax)
    lengths = {point[0] for points in runs.values() for point in points}
    ax.set(xscale="log", xlim=(min(lengths) / 1.25, 1.25 * max(lengths)))
    style.ranks_axis(ax.xaxis, lengths)
    ax.xaxis.set_major_formatter(lambda steps, _: f"{steps:,.0f}")
    ax.set_xlabel("optimizer steps of the whole run")
    return ax


def perplexities(runs: Mapping[str, Sequence[Spread]], ax: Axes | None = None) -> Axes:
    """A line through the means of each label, an error bar from lowest to highest; grey: as good as dense."""
    ax = style.new_axes(ax, 7.5, 3.8)
    looks = style.method_looks(runs)
    for label, points in runs.items():
        x, mean, low, high = np.asarray(sorted(points), dtype=float).T
        reach = np.maximum([mean - low, high - mean], 0)
        color = looks[label]["color"]
        ax.errorbar(x, mean, yerr=reach, color=color, capsize=3, linestyle="", linewidth=1.4, zorder=2)
        style.draw(ax, "measured", x, mean, **looks[label])
    ax.axhline(0, color=style.FAINT, linewidth=1.4, zorder=1)
    ax.set_ylabel("perplexity over dense (%)")
    style.legend_above(ax, [Line2D([], [], label=label, **look) for label, look in looks.items()])
    return ax
