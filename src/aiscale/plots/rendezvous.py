"""How processes that know nothing of each other become ranks.

plots.rendezvous()
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from aiscale.plots import style

_PLACES = {0: (0.0, 0.0), 1: (2.6, 0.0), "store": (1.3, 1.35)}


def rendezvous() -> np.ndarray:
    """Two ranks meet at a store, in three panels: rank 0 waits; rank 1 signs in; both connect."""
    figure, axes = plt.subplots(1, 3, figsize=(7.5, 2.5), layout="constrained")
    for ax, text in zip(
        axes, ("1  rank 0 opens the store, and waits", "2  rank 1 signs in", "3  ranks connect"), strict=True
    ):
        ax.text(1.3, 2.15, text, ha="center", fontsize=8.5, color=style.INK)
        ax.set_xlim(-0.75, 3.35)
        ax.set_ylim(-0.75, 2.4)
        style.bare(ax)
    _store(axes[0], "rank 0: here")
    _store(axes[1], "rank 0: here\nrank 1: here")
    _store(axes[2], "rank 0: here\nrank 1: here")
    _arrow(axes[0], 0, "signs in")
    for rank, text in ((0, "reads"), (1, "signs in, reads")):
        _arrow(axes[1], rank, text)
    axes[2].annotate("", (2.05, 0), (0.55, 0), arrowprops={"arrowstyle": "<->", "color": style.INK, "lw": 1.6})
    axes[2].text(1.3, -0.16, "data", ha="center", va="top", fontsize=7.5, color=style.INK)
    for ax, there in zip(axes, ((0,), (0, 1), (0, 1)), strict=True):
        for rank in (0, 1):
            _rank(ax, rank, rank in there)
    return axes


def _rank(ax: Axes, rank: int, there: bool) -> None:
    x, y = _PLACES[rank]
    color = style.RANK_COLORS[rank]
    look = {"facecolor": color} if there else {"facecolor": style.PAPER, "edgecolor": style.MUTED, "linestyle": ":"}
    style.rounded(ax, (x - 0.52, y - 0.26), 1.04, 0.52, 0.04, **look)
    text = f"rank {rank}" if there else "not yet"
    ax.text(x, y, text, ha="center", va="center", fontsize=8, color=style.text_color(color) if there else style.MUTED)


def _store(ax: Axes, text: str) -> None:
    x, y = _PLACES["store"]
    look = {"facecolor": style.tint(style.MUTED, 0.15), "edgecolor": style.MUTED}
    style.rounded(ax, (x - 0.77, y - 0.35), 1.54, 0.7, 0.04, **look)
    ax.text(x, y, text, ha="center", va="center", fontsize=7.5, color=style.INK)


def _arrow(ax: Axes, rank: int, text: str) -> None:
    (x, y), (x1, y1) = _PLACES[rank], _PLACES["store"]
    side = -1 if x < x1 else 1
    ax.annotate(
        "", (x1 + side * 0.35, y1 - 0.38), (x, y + 0.3), arrowprops={"arrowstyle": "->", "color": style.INK, "lw": 1.2}
    )
    ax.text(
        (x + x1) / 2 + side * 0.3,
        (y + y1) / 2 - 0.05,
        text,
        ha="right" if side < 0 else "left",
        fontsize=7.5,
        color=style.INK,
    )
