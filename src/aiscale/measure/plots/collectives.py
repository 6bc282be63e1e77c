"""Collectives: what they do, and how long they take; a participant's grid beside the true one."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle

from aiscale.measure.plots import style
from aiscale.plan import cost

Grid = Sequence[Sequence[object]]
#: Collectives that sum over all ranks.
_REDUCTIONS = {"all_reduce", "reduce", "reduce_scatter"}
WRONG = "#B3261E"


def collective(op: str, before: Grid, after: Grid, *, ax: Axes | None = None) -> Axes:
    """What a collective does: every rank's chunks before and after, one row per rank.

    [rank][chunk]: numbers, strings, None. A chunk has the colour of the rank that it comes from; a
    sum has the colours of all.
    """
    widths = max(map(len, before)), max(map(len, after))
    gap = 2.7
    n = len(before)
    width = sum(widths) + gap + 1.5
    unit = min(0.52, 7.5 / width)  # inches per cell
    ax = style.new_axes(ax, unit * width, unit * (n + 0.6))
    for rank in range(n):
        ax.text(
            -0.25, n - 1 - rank + 0.5, f"rank {rank}", ha="right", va="center", color=style.MUTED
        )
    origins = [[[rank] for _ in row] for rank, row in enumerate(before)]
    _grid(ax, 0, before, origins)
    _grid(ax, widths[0] + gap, after, _origins(op, before, after))
    middle = widths[0] + gap / 2
    arrow = {"arrowstyle": "-|>,head_length=5,head_width=2.5", "color": style.INK, "linewidth": 1.4}
    ends = (middle - 0.8, n / 2), (middle + 0.8, n / 2)
    ax.add_patch(FancyArrowPatch(*ends, shrinkA=0, shrinkB=0, **arrow))
    ax.text(middle, n / 2 + 0.22, op.replace("_", "-"), ha="center", va="bottom", weight="bold")
    for x, word in ((widths[0] / 2, "before"), (widths[0] + gap + widths[1] / 2, "after")):
        ax.text(x, -0.15, word, ha="center", va="top", color=style.MUTED)
    ax.set_xlim(-1.4, sum(widths) + gap + 0.1)
    ax.set_ylim(-0.55, n + 0.05)
    style.bare(ax)
    return ax


def guessed(
    guess: Grid | None,
    truth: Grid,
    *,
    rows: str | Sequence[str] = "rank",
    columns: str | Sequence[str] = "step",
    same: Callable[[object, object], bool] = operator.eq,
) -> Axes:
    """A participant's grid beside the true one; a cell that is wrong is framed and crossed out.
    Without a guess, the truth alone. rows, columns: a word that is numbered, or a name for each."""
    n, width = len(truth), max(map(len, truth))
    shown = {"truth": truth} if guess is None else {"your guess": guess, "truth": truth}
    names = [f"{rows} {r}" for r in range(n)] if isinstance(rows, str) else list(rows)
    span = (width + 1) * len(shown) - 1
    unit = min(0.52, 5.9 / span)  # inches per cell
    left_room = 0.25 + 0.085 * max(map(len, names)) / unit  # an inch holds about twelve letters
    head = 1.15 if isinstance(columns, str) else 0.8 + 0.05 * max(map(len, columns)) / unit
    ax = style.new_axes(None, unit * (span + left_room + 0.3), unit * (n + 0.1 + head))
    for r, name in enumerate(names):
        ax.text(-0.25, n - r - 0.5, name, ha="right", va="center", color=style.MUTED)
    for left, (word, grid) in zip(range(0, 99, width + 1), shown.items(), strict=False):
        ax.text(left, n + head - 0.05, word, ha="left", va="top", color=style.INK)
        if isinstance(columns, str):
            ax.text(
                left, n + 0.05, f"{columns} 0, 1, ...", ha="left", va="bottom", color=style.MUTED
            )
        else:
            for c, name in enumerate(columns):
                look = {
                    "rotation": 35,
                    "rotation_mode": "anchor",
                    "ha": "left",
                    "va": "bottom",
                    "fontsize": 8,
                }
                ax.text(left + c + 0.35, n + 0.1, name, color=style.MUTED, **look)
        _guessed_cells(ax, left, grid, truth, operator.is_ if grid is truth else same)
    ax.set_xlim(-left_room, span + 0.3)
    ax.set_ylim(-0.1, n + head)
    style.bare(ax)
    return ax


def _guessed_cells(
    ax: Axes, left: float, grid: Grid, truth: Grid, same: Callable[[object, object], bool]
) -> None:
    for r, row in enumerate(grid):
        for c, value in enumerate(row):
            x, y = left + c, len(grid) - 1 - r
            right = same(value, truth[r][c])
            line = (0, (2, 2)) if value is None else "-"
            _cell(
                ax,
                x,
                y,
                facecolor=style.PAPER,
                edgecolor=style.FAINT if right else WRONG,
                linestyle=line,
            )
            if not right:
                ax.plot(
                    [x + 0.15, x + 0.85], [y + 0.15, y + 0.85], color=WRONG, linewidth=1, alpha=0.6
                )
            text = "" if value is None else f"{value}"
            size = 9 if len(text) <= 3 else 7.5
            ax.text(
                x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=size, color=style.INK
            )


def _origins(op: str, before: Grid, after: Grid) -> list[list[list[int]]]:
    """The ranks from which each chunk of `after` comes: all for a sum, the root, each in turn."""
    n = len(before)
    if op in _REDUCTIONS:
        return [[list(range(n)) for _ in row] for row in after]
    if op in ("broadcast", "scatter"):
        root = next((rank for rank, row in enumerate(before) if after[0][0] in row), 0)
        return [[[root] for _ in row] for row in after]
    return [[[column * n // len(row)] for column in range(len(row))] for row in after]


def _grid(ax: Axes, left: float, rows: Grid, origins: list[list[list[int]]]) -> None:
    n = len(rows)
    for rank, row in enumerate(rows):
        for column, value in enumerate(row):
            x, y = left + column, n - 1 - rank
            if value is None:
                _cell(ax, x, y, facecolor="none", edgecolor=style.FAINT, linestyle=(0, (2, 2)))
                continue
            colors = [style.RANK_COLORS[r % len(style.RANK_COLORS)] for r in origins[rank][column]]
            if len(colors) == 1:
                _cell(ax, x, y, facecolor=colors[0])
                ink = style.text_color(colors[0])
            else:
                _cell(ax, x, y, facecolor=style.PAPER, edgecolor=style.FAINT)
                part = 0.6 / len(colors)
                for i, color in enumerate(colors):
                    corner = (x + 0.2 + i * part, y + 0.19)
                    ax.add_patch(Rectangle(corner, part, 0.13, facecolor=color, linewidth=0))
                ink = style.INK
            size = 9 if len(str(value)) <= 3 else 7.5
            rise = 0.5 if len(colors) == 1 else 0.6
            ax.text(
                x + 0.5, y + rise, f"{value}", ha="center", va="center", color=ink, fontsize=size
            )


def _cell(ax: Axes, x: float, y: float, **options) -> None:
    look = {"edgecolor": "none", "linewidth": 0.9, **options}
    style.rounded(ax, (x + 0.07, y + 0.07), 0.86, 0.86, 0.12, **look)


def latency_bandwidth(
    nbytes: Sequence[float],
    seconds: Sequence[float],
    link: cost.AlphaBeta,
    *,
    world: int,
    op: str = "all_reduce",
) -> np.ndarray:
    """Seconds (left) and GB/s that a rank sends (right) over message size.

    Measured on `world` ranks, and by a fitted link.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.5, 3.9), layout="constrained")
    grid = np.geomspace(min(nbytes), max(nbytes), 120)
    fitted = [link.seconds(op, n, world) for n in grid]
    for kind, sizes, took, line in (
        ("measured", nbytes, seconds, "none"),
        ("predicted", grid, fitted, "--"),
    ):
        sent = [cost.wire_bytes(op, n, world) for n in sizes]
        style.draw(left, kind, sizes, took, linestyle=line)
        style.draw(right, kind, sizes, np.divide(sent, took) / 1e9, linestyle=line)
    for ax, label in (
        (left, f"time of one {op.replace('_', '-')}"),
        (right, "sent by each rank (GB/s)"),
    ):
        ax.set(xscale="log", yscale="log", xlabel="message size (bytes)", ylabel=label)
        style.bytes_axis(ax.xaxis)
    style.seconds_axis(left.yaxis)
    right.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    handles = style.kind_handles(["measured", "predicted"])
    handles[1].set_label("fitted")
    handles[0].set_linestyle("none")  # dots alone: a line between them would draw the noise
    figure.legend(handles=handles, loc="outside upper left", ncols=2)
    return np.array([left, right])
