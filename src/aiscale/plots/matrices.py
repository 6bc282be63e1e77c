"""Small matrices with their values.

plots.matrices({"X": X, "W1": W1, "O1": O1})         # with their numbers, side by side, on one scale
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap

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
