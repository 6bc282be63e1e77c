"""What Radius costs and gains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from aiscale.measure.plots import style
from aiscale.measure.plots.curves import xy

Points = Sequence[tuple[float, float]]


def density_times(
    measured: Points = (),
    predicted: Points = (),
    published: Points = (),
    *,
    source: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Time of a step over that of a dense one, by density, [(density, ratio)].

    Below the grey line Radius is faster.
    """
    series = {"measured": measured, "predicted": predicted, "published": published}
    series = {kind: points for kind, points in series.items() if len(points)}
    ax = style.new_axes(ax, 7.5, 3.4)
    for kind, points in series.items():
        color = style.INK if kind == "published" else style.STRATEGY_COLORS["radius"]
        style.draw(ax, kind, *xy(sorted(points)), color)
    ax.axhline(1, color=style.FAINT, linewidth=1.4, zorder=1)
    ax.set(
        xlim=(0, 1.02),
        xlabel="density d (share of entries sent)",
        ylabel="time of a step (dense = 1)",
    )
    ax.set_ylim(0, 1.08 * max(1, *(ratio for points in series.values() for _, ratio in points)))
    style.legend_above(ax, style.kind_handles(series, source))
    return ax


def link_speedups(
    measured: Mapping[str, Points],
    *,
    marks: Mapping[str, float] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Speed-up over the baseline by link rate, {label: [(Mbit/s, speed-up)]}.

    marks: {label: rate}.
    """
    ax = style.new_axes(ax, 7.5, 3.8)
    looks = style.method_looks(measured)
    for label, points in measured.items():
        style.draw(ax, "measured", *xy(points), **looks[label])
    ax.axhline(1, color=style.FAINT, linewidth=1.4, zorder=1)
    for name, rate in (marks or {}).items():
        ax.axvline(rate, color=style.MUTED, linewidth=1, linestyle=":", zorder=1)
        place = {
            "xycoords": ("data", "axes fraction"),
            "textcoords": "offset points",
            "fontsize": 8.5,
        }
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
    """Perplexity increase over the length of training.

    {label: [(steps, mean, low, high) in percent]}; labels are offset sideways, so that their error
    bars do not overlap.
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
    """A line through each label's means, an error bar from lowest to highest.

    The grey line: as good as dense.
    """
    ax = style.new_axes(ax, 7.5, 3.8)
    looks = style.method_looks(runs)
    for label, points in runs.items():
        x, mean, low, high = np.asarray(sorted(points), dtype=float).T
        reach = np.maximum([mean - low, high - mean], 0)
        color = looks[label]["color"]
        ax.errorbar(
            x, mean, yerr=reach, color=color, capsize=3, linestyle="", linewidth=1.4, zorder=2
        )
        style.draw(ax, "measured", x, mean, **looks[label])
    ax.axhline(0, color=style.FAINT, linewidth=1.4, zorder=1)
    ax.set_ylabel("perplexity over dense (%)")
    style.legend_above(ax, [Line2D([], [], label=label, **look) for label, look in looks.items()])
    return ax
