"""Numbers: small matrices with their values, floating-point formats, and what they cannot represent.

plots.matrices({"X": X, "W1": W1, "O1": O1})         # with their numbers, side by side, on one scale
plots.number_formats()                               # fp32, tf32, bf16 and fp16, bit by bit
plots.value_range({"as it is": gradient, "times 2^16": gradient * 2**16}, "fp16")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.patches import Rectangle

from aiscale.config import ConfigError
from aiscale.plots import style

#: Negative orange, zero white, positive blue.
DIVERGING = LinearSegmentedColormap.from_list(
    "aiscale_diverging", ["#D96709", "#F9DFC8", "#FFFFFF", "#C5DDF1", "#0068B8"]
)


def matrices(values: Mapping[str, np.ndarray], *, digits: int = 2, between: Sequence[str] = ()) -> Axes:
    """Small matrices side by side on one colour scale, each with its name and shape.

    between: text between neighbours, for example "×" and "="; none by default.
    """
    arrays = {name: np.atleast_2d(np.asarray(array, dtype=float)) for name, array in values.items()}
    if not arrays or any(array.ndim != 2 or max(array.shape) > 16 for array in arrays.values()):
        raise ConfigError("matrices draws matrices of at most 16 x 16 numbers: cut a corner out of larger ones")
    if between and len(between) != len(arrays) - 1:
        raise ConfigError(f"between has {len(between)} signs for {len(arrays)} matrices: give {len(arrays) - 1}")
    top = max(np.abs(array).max() for array in arrays.values()) or 1.0
    gap = 1.1
    width = sum(array.shape[1] for array in arrays.values()) + gap * (len(arrays) - 1)
    height = max(array.shape[0] for array in arrays.values())
    unit = min(0.62, 7.4 / width)  # inches per cell
    ax = style.new_axes(None, unit * width + 0.1, unit * height + 0.35)
    left = 0.0
    for i, (name, array) in enumerate(arrays.items()):
        bottom = (height - array.shape[0]) / 2
        _cells(ax, left, bottom, array, top, digits, 8.5 if unit > 0.5 else 7)
        rows, columns = array.shape
        place = {"ha": "center", "va": "top", "color": style.MUTED, "fontsize": 8.5}
        ax.text(left + columns / 2, bottom - 0.12, f"{name}  ({rows} × {columns})", **place)
        left += columns + gap
        if between and i < len(between):
            ax.text(left - gap / 2, height / 2, between[i], ha="center", va="center", fontsize=13)
    ax.set_xlim(-0.05, width + 0.05)
    ax.set_ylim(-0.6, height + 0.05)
    style.bare(ax)
    return ax


def _cells(ax: Axes, left: float, bottom: float, array: np.ndarray, top: float, digits: int, size: float) -> None:
    rows, columns = array.shape
    for r in range(rows):
        for c in range(columns):
            color = DIVERGING(0.5 + 0.5 * array[r, c] / top)[:3]
            x, y = left + c, bottom + rows - 1 - r
            edge = {"edgecolor": style.FAINT, "linewidth": 0.6}
            style.rounded(ax, (x + 0.04, y + 0.04), 0.92, 0.92, 0.06, facecolor=color, **edge)
            ink = style.text_color(color)
            number = f"{array[r, c]:.{digits}f}".replace("-", "−")
            ax.text(x + 0.5, y + 0.5, number, ha="center", va="center", fontsize=size, color=ink)


@dataclass(frozen=True)
class NumberFormat:
    """A binary floating-point format: one sign bit, `exponent_bits`, `fraction_bits`, and bits that are not used."""

    name: str
    exponent_bits: int
    fraction_bits: int
    unused_bits: int = 0

    @property
    def largest(self) -> float:
        """The largest finite number."""
        return (2 - self.step_at_one) * 2.0 ** (2 ** (self.exponent_bits - 1) - 1)

    @property
    def smallest_normal(self) -> float:
        """The smallest number with full precision; below it, digits are lost one by one."""
        return 2.0 ** (2 - 2 ** (self.exponent_bits - 1))

    @property
    def step_at_one(self) -> float:
        """Distance from 1 to the next number: torch.finfo(...).eps."""
        return 2.0**-self.fraction_bits


#: tf32 takes 32 bits in memory, as fp32; tensor cores read 19 of them.
FORMATS = (
    NumberFormat("fp32", 8, 23),
    NumberFormat("tf32", 8, 10, 13),
    NumberFormat("bf16", 8, 7),
    NumberFormat("fp16", 5, 10),
)
_FIELDS = {"sign": "#4A4F58", "exponent (range)": "#F0AF00", "fraction (precision)": "#0068B8", "not read": "#E9ECF0"}


def number_formats() -> Axes:
    """The bits of each format, its largest and smallest normal number, and the step from 1 to the next number."""
    rows = len(FORMATS)
    ax = style.new_axes(None, 7.5, 0.95 + 0.36 * rows)
    bits = 32
    columns = [bits + 4.2, bits + 10.2, bits + 16.2]
    for row, kind in enumerate(FORMATS):
        y = 1.5 * (rows - 1 - row)
        ax.text(-1, y + 0.5, kind.name, ha="right", va="center", weight="bold")
        lengths = (1, kind.exponent_bits, kind.fraction_bits, kind.unused_bits)
        x = 0
        for color, length in zip(_FIELDS.values(), lengths, strict=True):
            for _ in range(length):
                ax.add_patch(Rectangle((x + 0.07, y + 0.06), 0.86, 0.88, facecolor=color, linewidth=0))
                x += 1
        for column, value in zip(columns, (kind.largest, kind.smallest_normal, kind.step_at_one), strict=True):
            ax.text(column, y + 0.5, _power(value), ha="center", va="center", fontsize=8.5)
    for column, word in zip(columns, ("largest", "smallest\nnormal", "step at 1"), strict=True):
        ax.text(column, 1.5 * rows - 0.2, word, ha="center", va="bottom", fontsize=8.5, color=style.MUTED)
    ax.set_xlim(-4.2, bits + 19)
    ax.set_ylim(-0.2, 1.5 * rows + 1.3)
    ax.set_axis_off()
    style.legend_above(ax, style.legend_handles(_FIELDS, bars=True))
    return ax


def _power(value: float) -> str:
    if 1e-4 < value < 1e6:
        return f"{value:,.5g}" if value >= 1 else f"{value:.2g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return rf"{mantissa} × $10^{{{int(exponent)}}}$"


def lost_share(values: np.ndarray, kind: NumberFormat) -> float:
    """The share of the nonzero `values` that `kind` rounds to zero: at most half its smallest number."""
    size = np.abs(np.asarray(values, dtype=np.float64)).ravel()
    return float(np.mean((size > 0) & (size <= kind.smallest_normal * kind.step_at_one / 2)))


def value_range(values: Mapping[str, np.ndarray], kind: str = "fp16", *, ax: Axes | None = None) -> Axes:
    """Histograms of magnitudes, by powers of two, over the range of one format.

    values: {label: array}; zeros are left out of the histogram. The grey zones are out of range: below half the
    format's smallest number everything becomes 0, above its largest infinity; between its smallest number and its
    smallest normal one, digits are lost. The legend gives the share of each array that becomes zero.
    """
    formats = {known.name: known for known in FORMATS}
    if kind not in formats:
        raise ConfigError(f"unknown format {kind!r}: it may be one of {', '.join(formats)}")
    style.check_given(values, "value_range {label: array}")
    target = formats[kind]
    zero = np.log2(target.smallest_normal * target.step_at_one / 2)
    normal, largest = np.log2(target.smallest_normal), np.log2(target.largest)
    sizes = {label: np.abs(np.asarray(array, dtype=np.float64)).ravel() for label, array in values.items()}
    powers = {label: np.log2(size[size > 0]) for label, size in sizes.items()}
    every = np.concatenate([*powers.values(), [zero, largest]])
    low, high = np.floor(every.min()) - 2, np.ceil(every.max()) + 4
    ax = style.new_axes(ax, 7.5, 3.3)
    ax.axvspan(low, zero, color="#F1F3F6", linewidth=0)
    ax.axvspan(largest, high, color="#F1F3F6", linewidth=0)
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
