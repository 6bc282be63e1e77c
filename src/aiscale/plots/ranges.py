"""How numbers lie in a format's range: which of them it keeps, blurs, loses to zero or to infinity.

plots.value_range({"as it is": gradient, "times 2^16": gradient * 2**16}, "fp16")
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes

from aiscale.config import ConfigError
from aiscale.plots import style
from aiscale.plots.numbers import FORMATS, NumberFormat

_ZONES = "#F1F3F6"


def lost_share(values: np.ndarray, kind: NumberFormat) -> float:
    """The share of `values` that are not zero and become zero in `kind`: at most half its smallest number."""
    size = np.abs(np.asarray(values, dtype=np.float64)).ravel()
    return float(np.mean((size > 0) & (size <= kind.smallest_normal * kind.step_at_one / 2)))


def value_range(values: Mapping[str, np.ndarray], kind: str = "fp16", *, ax: Axes | None = None) -> Axes:
    """Histograms of the sizes of numbers, by powers of two, over the range of one format.

    values: {label: array}; zeros are left out of the histogram. The grey zones are what the format cannot hold: below
    half its smallest number everything becomes 0, above its largest infinity; between its smallest number and its
    smallest normal one, digits are lost. The legend says what share of each array is lost to zero.
    """
    formats = {known.name: known for known in FORMATS}
    if kind not in formats:
        raise ConfigError(f"unknown format {kind!r}: it may be one of {', '.join(formats)}")
    if not values:
        raise ConfigError("nothing to draw: give value_range {label: array}")
    target = formats[kind]
    zero = np.log2(target.smallest_normal * target.step_at_one / 2)
    normal, largest = np.log2(target.smallest_normal), np.log2(target.largest)
    sizes = {label: np.abs(np.asarray(array, dtype=np.float64)).ravel() for label, array in values.items()}
    powers = {label: np.log2(size[size > 0]) for label, size in sizes.items()}
    every = np.concatenate([*powers.values(), [zero, largest]])
    low, high = np.floor(every.min()) - 2, np.ceil(every.max()) + 4
    ax = style.new_axes(ax, 7.5, 3.3)
    ax.axvspan(low, zero, color=_ZONES, linewidth=0)
    ax.axvspan(largest, high, color=_ZONES, linewidth=0)
    ax.axvline(normal, color=style.MUTED, linewidth=1, linestyle=":")
    names = {}
    for (label, power), color in zip(powers.items(), style.series_colors(powers).values(), strict=True):
        share = 100 * np.histogram(power, bins=np.arange(low, high + 1))[0] / sizes[label].size
        ax.stairs(share, np.arange(low, high + 1), color=color, linewidth=1.6, label=f"_{label}")
        ax.stairs(share, np.arange(low, high + 1), fill=True, color=color, alpha=0.18, label="_")
        names[f"{label}: {100 * lost_share(values[label], target):.1f} % become 0"] = color
    place = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "va": "top", "fontsize": 8}
    ax.annotate(f"0 in {kind}", (zero, 1), xytext=(-5, -3), ha="right", color=style.MUTED, **place)
    ax.annotate("infinite", (largest, 1), xytext=(5, -3), ha="left", color=style.MUTED, **place)
    ax.annotate("all digits", (normal, 1), xytext=(5, -3), ha="left", color=style.MUTED, **place)
    ax.set_xlim(low, high)
    ax.set_ylim(0, 1.18 * ax.dataLim.ymax if ax.dataLim.ymax > 0 else 1)
    ax.xaxis.set_major_formatter(lambda power, _: f"$2^{{{power:.0f}}}$")
    ax.set(xlabel="size of a number", ylabel="share of all numbers (%)")
    style.legend_above(ax, style.legend_handles(names))
    return ax
