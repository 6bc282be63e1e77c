"""What `aiscale study` measured, as a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from aiscale.plots import style


def study_ratios(cells: Mapping[str, Sequence[Mapping[str, float]]], names: Sequence[str] = ()) -> Axes:
    """A mark at the median and a line over the interval, for each study: {cell: [{"median", "low", "high"}, ...]}."""
    ax = style.new_axes(None, 7.5, 0.9 + 0.21 * len(cells))
    for y, studies in enumerate(cells.values()):
        for i, ratio in enumerate(studies):
            look = {"color": (style.INK, style.RANK_COLORS[6])[i], "marker": "os"[i], "markersize": 5}
            at = y + 0.44 * (i - (len(studies) - 1) / 2)
            ax.plot([ratio["low"], ratio["high"]], [at, at], color=look["color"])
            ax.plot(ratio["median"], at, **look, linestyle="", label="" if y or not names else names[i])
    ax.axvline(1, color=style.MUTED, linestyle=":", zorder=0)
    ax.set(xscale="log", xlabel="time of an epoch over that of the base beside it", ylim=(len(cells) - 0.4, -0.6))
    ax.set_yticks(range(len(cells)), cells)
    ax.minorticks_off()
    low, high = ax.get_xlim()
    ticks = [tick for tick in (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if low <= tick <= high]
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    if names:
        style.legend_above(ax, ax.get_legend_handles_labels()[0])
    return ax
