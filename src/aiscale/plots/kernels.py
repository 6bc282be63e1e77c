"""How a GPU's threads work on matrices: blocks, tiles, and what a warp reads together.

plots.thread_blocks(10, 14, block=4)                      # which thread computes which number
plots.warp_reads({"along a row": range(32), "down a column": range(0, 1024, 32)}, size=1024)
plots.product_tiles(32, 8)                                # what a block reads in one turn
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from aiscale.plots import style

DATA, WEIGHTS = style.MEMORY_COLORS["activations"], style.MEMORY_COLORS["parameters"]
PIECE = 8  #: numbers of fp32 in the 32 bytes that memory delivers at once
_HATCH = {"hatch": "////", "facecolor": style.PAPER, "edgecolor": style.FAINT, "linewidth": 0}


def _box(ax: Axes, x: float, y: float, width: float, height: float, **look) -> None:
    ax.add_patch(Rectangle((x, y), width, height, **{"edgecolor": style.PAPER, "linewidth": 0.8, **look}))


def _text(ax: Axes, x: float, y: float, text: str, size: float = 8.5, **options) -> None:
    ax.text(x, y, text, **{"ha": "center", "va": "center", "fontsize": size, "color": style.INK, **options})


def _view(ax: Axes, left: float, right: float, bottom: float, top: float) -> None:
    """Show this part of a diagram whose y axis points down, as rows do."""
    ax.set_xlim(left, right)
    ax.set_ylim(bottom, top)
    style.bare(ax)


def thread_blocks(rows: int = 10, columns: int = 14, block: int = 4) -> np.ndarray:
    """Blocks of block x block threads over a matrix that they do not divide; beside it one block's threads."""
    ratios = (columns + 2.5, block * 2.6)
    _, (whole, one) = plt.subplots(1, 2, figsize=(7.5, 3.3), layout="constrained", width_ratios=ratios)
    down, across = -(-rows // block), -(-columns // block)
    by, bx, ty, tx = down // 2, across // 2, block - 1, 1  # the block and the thread that are shown
    _box(whole, 0, 0, across * block, down * block, **_HATCH)
    for row in range(rows):
        for column in range(columns):
            mine = (row // block, column // block) == (by, bx)
            chosen = mine and (row % block, column % block) == (ty, tx)
            color = DATA if chosen else style.tint(DATA, 0.35 if mine else 0.12)
            _box(whole, column, row, 1, 1, facecolor=color)
    for y in range(down):
        for x in range(across):
            strong = {"facecolor": "none", "edgecolor": style.INK, "linewidth": 2 if (y, x) == (by, bx) else 0.8}
            _box(whole, x * block, y * block, block, block, **strong)
    for x in range(across):
        _text(whole, (x + 0.5) * block, -0.6, f"block x {x}", 8)
    for y in range(down):
        _text(whole, -0.3, (y + 0.5) * block, f"y {y}", 8, ha="right")
    _text(whole, columns / 2, down * block + 0.7, "hatched: threads without a number", 8, color=style.MUTED)
    _view(whole, -2, across * block + 0.3, down * block + 1.2, -1.2)
    for y in range(block):
        for x in range(block):
            color = DATA if (y, x) == (ty, tx) else style.tint(DATA, 0.35)
            _box(one, x, y, 1, 1, facecolor=color)
            _text(one, x + 0.5, y + 0.5, f"{x}, {y}", 8, color=style.text_color(color))
    _text(one, block / 2, -0.35, f"threads x, y of block {bx}, {by}", 8)
    said = f"row {by}·{block} + {ty} = {by * block + ty}\ncolumn {bx}·{block} + {tx} = {bx * block + tx}"
    _text(one, block / 2, block + 0.75, f"thread {tx}, {ty} computes\n{said}", 8)
    _view(one, -0.2, block + 0.2, block + 1.6, -0.8)
    return np.array([whole, one])


def warp_reads(reads: Mapping[str, Iterable[int]], size: int) -> np.ndarray:
    """For each label, the positions of an array of `size` fp32 numbers that the threads of a warp read at once.

    Memory delivers pieces of 32 bytes; those that the warp touches are filled.
    """
    figure, axes = plt.subplots(len(reads), 1, figsize=(7.5, 1.45 * len(reads)), layout="constrained", squeeze=False)
    for ax, (label, positions) in zip(axes[:, 0], reads.items(), strict=True):
        positions = list(positions)
        touched = {position // PIECE for position in positions}
        for piece in range(-(-size // PIECE)):
            color = DATA if piece in touched else style.tint(style.MUTED, 0.12)
            _box(ax, piece * PIECE, 0, PIECE, 12, facecolor=color, linewidth=0.4)
        gap = size / len(positions)
        for thread, position in enumerate(positions):
            x = (thread + 0.5) * gap
            _box(ax, x - 0.36 * gap, 62, 0.72 * gap, 12, facecolor=style.INK)
            ax.plot([x, position + 0.5], [60, 13], color=style.INK, linewidth=0.7, alpha=0.7)
        used = len(set(positions)) / (len(touched) * PIECE)
        said = f"{label}: {len(touched)} pieces, {100 * used:.3g} % of their bytes wanted"
        _text(ax, 0, 82, said, ha="left", va="bottom")
        _text(ax, -8, 68, "threads", 8, ha="right", color=style.MUTED)
        _text(ax, -8, 6, "memory", 8, ha="right", color=style.MUTED)
        ax.set_xlim(-85, size + 2)
        ax.set_ylim(-3, 100)
        ax.set_axis_off()
    return axes[:, 0]


def product_tiles(n: int, tile: int, ax: Axes | None = None) -> Axes:
    """C = A B: what the block that computes one tile of C reads of A and B, turn by turn; the second turn is filled."""
    ax = style.new_axes(ax, 5.6, 4.6)
    turns = n // tile
    gap, turn, by, bx = 0.16 * n, min(1, turns - 1), max(0, turns - 2), turns // 2
    places = {"A": (0, n + gap, DATA), "B": (n + gap, 0, WEIGHTS), "C": (n + gap, n + gap, DATA)}
    for name, (x, y, color) in places.items():
        _box(ax, x, y, n, n, facecolor=style.tint(color, 0.1), edgecolor=style.FAINT)
        _text(ax, x + n / 2, y - 0.05 * n, f"{name}  ({n} × {n})", color=style.MUTED)
    for k in range(turns):
        filled = 1.0 if k == turn else 0.35
        for x, y, color in ((k * tile, n + gap + by * tile, DATA), (n + gap + bx * tile, k * tile, WEIGHTS)):
            face = style.tint(color, filled)
            _box(ax, x, y, tile, tile, facecolor=face, linewidth=1.2)
            _text(ax, x + tile / 2, y + tile / 2, f"turn {k}", 7.5, color=style.text_color(face))
    x, y = n + gap + bx * tile, n + gap + by * tile
    _box(ax, x, y, tile, tile, facecolor=DATA, edgecolor=style.INK, linewidth=2)
    _text(ax, x + tile / 2, y + tile / 2, "this\nblock", 7.5, color=style.text_color(DATA))
    shared = f"in each turn, {tile} × {tile} threads\ncopy one tile of A and one of B\ninto shared memory,\n"
    shared += "and read them there"
    _text(ax, n / 2, n / 2, shared, 9)
    _view(ax, -0.02 * n, 2.02 * n + gap, 2.02 * n + gap, -0.12 * n)
    return ax
