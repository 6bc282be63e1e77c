"""Where each rank sits in the parallel grid, and which rows of each tensor it holds.

plots.rank_grid(tp=4, pp=2, dp=2, per_node=8, of_rank=5)  # rank = tp + tp (dp + dp pp), Megatron-Core's order
plots.shards(cost.parameter_shapes(model), 4)             # which rows of which tensor are on which rank
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Rectangle

from aiscale.config import ConfigError
from aiscale.plots import style

_COLORS = {"tensor": style.STRATEGY_COLORS["tp"], "pipeline": style.STRATEGY_COLORS["pp"]}
_COLORS["data"] = style.STRATEGY_COLORS["ddp"]


def rank_grid(
    tp: int, pp: int, dp: int, *, per_node: int = 0, of_rank: int | None = None, ax: Axes | None = None
) -> Axes:
    """One panel per copy of the model (dp), one row per pipeline stage, one column per tensor-parallel rank.

    per_node: ranks per node; nodes differ in shade. of_rank: frame this rank's three communication groups.
    """
    if min(tp, pp, dp) < 1 or per_node < 0:
        raise ConfigError(f"tp {tp}, pp {pp}, dp {dp}, per_node {per_node}: the first three are at least 1")
    size = tp * pp * dp
    if of_rank is not None and not 0 <= of_rank < size:
        raise ConfigError(f"of_rank {of_rank}: tp {tp} x pp {pp} x dp {dp} has ranks 0 to {size - 1}")
    panel = tp + 0.9
    ax = style.new_axes(ax, min(7.5, 1.2 + 0.6 * dp * panel), 1.0 + 0.6 * pp)
    for rank in range(size):
        t, d, p = _place(rank, tp, dp)
        shade = 0.16 if per_node == 0 else (0.12, 0.42)[rank // per_node % 2]
        ax.add_patch(
            Rectangle((d * panel + t, p), 0.92, 0.92, facecolor=style.tint(style.MUTED, shade), edgecolor=style.PAPER)
        )
        ax.text(d * panel + t + 0.46, p + 0.46, str(rank), ha="center", va="center", fontsize=9, color=style.INK)
    if of_rank is not None:
        _frame_groups(ax, of_rank, tp, dp, size, panel)
    for d in range(dp):
        ax.text(d * panel + tp / 2, -0.25, f"copy {d}", ha="center", va="bottom", fontsize=9, color=style.MUTED)
    for p in range(pp):
        ax.text(-0.2, p + 0.46, f"stage {p}", ha="right", va="center", fontsize=9, color=style.MUTED)
    ax.set_xlim(-1.6, dp * panel - 0.7)
    ax.set_ylim(pp + 0.15, -0.7)
    style.bare(ax)
    names = {f"rank {of_rank}'s {name} group": color for name, color in _COLORS.items()} if of_rank is not None else {}
    style.legend_above(ax, style.legend_handles(names))
    return ax


def _place(rank: int, tp: int, dp: int) -> tuple[int, int, int]:
    return rank % tp, rank // tp % dp, rank // (tp * dp)


def _frame_groups(ax: Axes, of_rank: int, tp: int, dp: int, size: int, panel: float) -> None:
    """Nested frames around the ranks that share two coordinates with of_rank."""
    own = _place(of_rank, tp, dp)
    for inset, (name, axis) in zip((0.0, 0.06, 0.12), (("tensor", 0), ("pipeline", 2), ("data", 1)), strict=True):
        for rank in range(size):
            place = _place(rank, tp, dp)
            if all(a == b for i, (a, b) in enumerate(zip(place, own, strict=True)) if i != axis):
                t, d, p = place
                side = 0.92 - 2 * inset
                frame = FancyBboxPatch(
                    (d * panel + t + inset, p + inset),
                    side,
                    side,
                    boxstyle="square,pad=0",
                    fill=False,
                    edgecolor=_COLORS[name],
                    linewidth=2.2,
                    label=f"_{name}:{rank}",
                )
                ax.add_patch(frame)


def shards(shapes: Mapping[str, tuple[int, ...]], ranks: int, *, ax: Axes | None = None) -> Axes:
    """One bar per tensor, as wide as its number of rows, cut as FSDP cuts it: ceil(rows / ranks) rows per rank.

    Padding up to a multiple of that is drawn hollow. All bars have the scale of the longest one.
    """
    style.check_given(shapes, "shards {name: shape}, for example cost.parameter_shapes(model)")
    ax = style.new_axes(ax, 7.5, 0.9 + 0.27 * len(shapes))
    longest = max(ranks * ceil(shape[0] / ranks) for shape in shapes.values())
    for y, shape in enumerate(shapes.values()):
        each = ceil(shape[0] / ranks)
        for rank in range(ranks):
            begin, end = min(rank * each, shape[0]), min((rank + 1) * each, shape[0])
            color = style.RANK_COLORS[rank % len(style.RANK_COLORS)]
            ax.barh(y, end - begin, left=begin, height=0.74, color=color, linewidth=0, label=f"_rank {rank}")
            if end - begin > 0.045 * longest:
                number = {"ha": "center", "va": "center", "fontsize": 8, "color": style.text_color(color)}
                ax.text((begin + end) / 2, y, str(end - begin), **number)
        padding = ranks * each - shape[0]
        hollow = {"facecolor": style.PAPER, "edgecolor": style.MUTED, "linestyle": (0, (2, 1.5)), "linewidth": 0.8}
        if padding:
            ax.add_patch(Rectangle((shape[0], y - 0.37), padding, 0.74, label="_padding", **hollow))
    names = [f"{name}  ({' × '.join(map(str, shape))})" for name, shape in shapes.items()]
    ax.set_yticks(range(len(shapes)), names, fontsize=8.5)
    ax.set_ylim(len(shapes) - 0.5, -0.5)
    ax.set_xlim(0, longest * 1.01)
    ax.grid(visible=False)
    ax.set_xlabel("rows of the tensor")
    colors = {f"rank {rank}": style.RANK_COLORS[rank % len(style.RANK_COLORS)] for rank in range(ranks)}
    padded = any(shape[0] % ranks for shape in shapes.values())
    more = [Rectangle((0, 0), 1, 1, label="padding", **hollow)] if padded else []
    style.legend_above(ax, style.legend_handles(colors, more, bars=True))
    return ax
