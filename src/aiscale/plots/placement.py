"""Where each rank sits in the parallel grid, and which part of each tensor it holds.

plots.rank_grid(tp=4, pp=2, dp=2, per_node=8, of_rank=5)  # rank = tp + tp (dp + dp pp), Megatron-Core's order
plots.shards(cost.parameter_shapes(model), 4)             # which rows of which tensor are on which rank
plots.mlp_cut(4)                                          # tensor parallelism: columns of A, rows of B, f and g
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


def mlp_cut(ranks: int, *, ax: Axes | None = None) -> Axes:
    """y = GELU(x A) B on tensor-parallel ranks: A cut by columns, B by rows, in the colour of the rank that holds them.

    What every rank holds whole is grey. f and g mark where ranks talk (Shoeybi et al. 2019, figure 3).
    """
    if not 1 <= ranks <= len(style.RANK_COLORS):
        raise ConfigError(f"mlp_cut draws 1 to {len(style.RANK_COLORS)} ranks, not {ranks}")
    ax = style.new_axes(ax, 7.5, 2.9)
    tokens, narrow, wide, gap = 1.3, 1.6, 4.0, 1.1  # T, D and the hidden width as drawn; between two tensors
    names = {"x": "x", "A": "A, by columns", "h": "hidden = GELU(x A)", "B": "B, by rows", "y": "y"}
    stream, hidden = (narrow, tokens), (wide, tokens)
    sizes = {"x": stream, "A": (wide, narrow), "h": hidden, "B": (narrow, wide), "y": stream}
    left = 0.0
    for part, (width, height) in sizes.items():
        top = (wide - height) / 2
        cut = {"A": (width / ranks, 0), "h": (width / ranks, 0), "B": (0, height / ranks)}.get(part)
        for rank in range(ranks if cut else 1):
            dx, dy = cut or (0, 0)
            color = style.RANK_COLORS[rank] if cut else style.FAINT
            place = (left + rank * dx, top + rank * dy)
            box = Rectangle(place, dx or width, dy or height, facecolor=color, edgecolor=style.PAPER, linewidth=1)
            box.set_label(f"_{part}:{rank if cut else 'all'}")
            ax.add_patch(box)
        ax.text(left + width / 2, top - 0.15, names[part], ha="center", va="bottom", fontsize=9, color=style.INK)
        if part in "xB":
            _talk(ax, left + width + gap / 2, wide / 2, *_TALKS[part])
        left += width + gap
    ax.set_xlim(-0.1, left - gap + 0.1)
    ax.set_ylim(wide + 1.3, -0.7)
    style.bare(ax)
    shown = {f"rank {rank}": style.RANK_COLORS[rank] for rank in range(ranks)} | {"every rank": style.FAINT}
    style.legend_above(ax, style.legend_handles(shown, bars=True))
    return ax


#: Name, and what it does forward and backward.
_TALKS = {"x": ("f", "forward nothing,\nbackward a sum"), "B": ("g", "forward a sum,\nbackward nothing")}


def _talk(ax: Axes, x: float, y: float, name: str, does: str) -> None:
    """An arrow through which ranks talk, with what it does at the bottom."""
    look = {"ha": "center", "color": _COLORS["tensor"]}
    ax.annotate("", (x + 0.4, y), (x - 0.4, y), arrowprops={"arrowstyle": "->", "color": _COLORS["tensor"], "lw": 1.8})
    ax.text(x, y - 0.2, name, va="bottom", fontsize=12, fontstyle="italic", **look)
    ax.plot([x, x], [y + 0.15, 4.25], color=_COLORS["tensor"], linewidth=0.8, linestyle=":")
    ax.text(x, 4.35, does, va="top", fontsize=8, linespacing=1.3, **look)
