"""Where each rank sits in the parallel grid, which part of each tensor it holds, and how ranks meet.

plots.rank_grid(tp=4, pp=2, dp=2, per_node=8, of_rank=5)  # rank = tp + tp (dp + dp pp), Megatron-Core's order
plots.shards(cost.parameter_shapes(model), 4)             # which rows of which tensor are on which rank
plots.mlp_cut(4)                                          # tensor parallelism: columns of A, rows of B, f and g
plots.zero_stages(4)                                      # stages 0 to 3 on four ranks, to scale
plots.fsdp_step(3, 4)                                     # rank 0's weights and gradients, while the step goes on
plots.rendezvous()                                        # how processes that know nothing of each other become ranks
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from aiscale import cost
from aiscale.config import ConfigError
from aiscale.plots import style
from aiscale.plots.one_step import BORROWED

_COLORS = {"tensor": style.STRATEGY_COLORS["tp"], "pipeline": style.STRATEGY_COLORS["pp"]}
_COLORS["data"] = style.STRATEGY_COLORS["ddp"]


def rank_grid(tp: int, pp: int, dp: int, *, per_node: int, of_rank: int) -> Axes:
    """One panel per copy of the model (dp), one row per pipeline stage, one column per tensor-parallel rank.

    per_node: ranks per node; nodes differ in shade. of_rank: frame this rank's three communication groups.
    """
    size = tp * pp * dp
    if not 0 <= of_rank < size:
        raise ConfigError(f"of_rank {of_rank}: tp {tp} x pp {pp} x dp {dp} has ranks 0 to {size - 1}")
    panel = tp + 0.9
    ax = style.new_axes(None, min(7.5, 1.2 + 0.6 * dp * panel), 1.0 + 0.6 * pp)
    for rank in range(size):
        t, d, p = _place(rank, tp, dp)
        face = style.tint(style.MUTED, (0.12, 0.42)[rank // per_node % 2])
        ax.add_patch(Rectangle((d * panel + t, p), 0.92, 0.92, facecolor=face, edgecolor=style.PAPER))
        ax.text(d * panel + t + 0.46, p + 0.46, str(rank), ha="center", va="center", fontsize=9, color=style.INK)
    _frame_groups(ax, of_rank, tp, dp, size, panel)
    for d in range(dp):
        ax.text(d * panel + tp / 2, -0.25, f"copy {d}", ha="center", va="bottom", fontsize=9, color=style.MUTED)
    for p in range(pp):
        ax.text(-0.2, p + 0.46, f"stage {p}", ha="right", va="center", fontsize=9, color=style.MUTED)
    ax.set_xlim(-1.6, dp * panel - 0.7)
    ax.set_ylim(pp + 0.15, -0.7)
    style.bare(ax)
    names = {f"rank {of_rank}'s {name} group": color for name, color in _COLORS.items()}
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
                look = {"fill": False, "edgecolor": _COLORS[name], "linewidth": 2.2, "label": f"_{name}:{rank}"}
                ax.add_patch(Rectangle((d * panel + t + inset, p + inset), side, side, **look))


def shards(shapes: Mapping[str, tuple[int, ...]], ranks: int, *, ax: Axes | None = None) -> Axes:
    """One bar per tensor, as wide as its number of rows, cut as FSDP cuts it: ceil(rows / ranks) rows per rank.

    Padding up to a multiple of that is drawn hollow. All bars have the scale of the longest one.
    """
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


# What a rank holds, to scale -----------------------------------------------------------------------------------------

#: Bytes a parameter in mixed precision with Adam, whole: the ZeRO paper's 2 + 2 + 12.
_BYTES = cost.zero_state_bytes(1, 0, dp=1)


def zero_stages(ranks: int = 4, *, ax: Axes | None = None) -> Axes:
    """A row for each stage, a box for each rank. A box is as wide as a parameter's bytes and as high as the model, cut
    into a share for each rank; what the rank holds is filled."""
    _check(ranks)
    width, height = sum(_BYTES.values()), 8.0
    right, down = width + 3.5, height + 3
    ax = style.new_axes(ax, 7.2, 3.9)
    for stage in range(4):
        shared = cost.zero_state_bytes(1, stage, dp=ranks)
        for rank in range(ranks):
            x, y = rank * right, stage * down
            for part, nbytes in _BYTES.items():
                held = range(ranks) if shared[part] == nbytes else [rank]
                _slices(ax, x, y, nbytes, height, ranks, held, style.MEMORY_COLORS[part], f"{stage} {rank} {part}")
                x += nbytes
            if stage == 0:
                ax.text(rank * right + width / 2, -0.8, f"rank {rank}", ha="center", va="bottom", color=style.MUTED)
        middle = stage * down + height / 2
        ax.text(-1.5, middle, f"stage {stage}", ha="right", va="center", color=style.INK)
        total = f"{sum(shared.values()):.3g}"
        ax.text(ranks * right - 1.5, middle, f"{total} bytes\na parameter", ha="left", va="center", color=style.INK)
    ax.set_xlim(-9, ranks * right + 10)
    ax.set_ylim(4 * down - 2, -3)
    style.bare(ax)
    ax.set_aspect("auto")
    names = {f"{part}, {nbytes:g} bytes": style.MEMORY_COLORS[part] for part, nbytes in _BYTES.items()}
    style.legend_above(ax, style.legend_handles(names, bars=True))
    return ax


def fsdp_step(layers: int = 3, ranks: int = 4, *, ax: Axes | None = None) -> Axes:
    """What rank 0 holds of each layer's weights (left half of a box) and gradients (right half), column by column: the
    forward pass through the layers, then the backward pass."""
    _check(ranks)
    order = [("forward", i) for i in range(layers)] + [("backward", i) for i in reversed(range(layers))]
    ax = style.new_axes(ax, 7.5, 1.6 + 0.55 * layers)
    for column, (phase, at) in enumerate(order):
        x = 1.35 * column + (0.4 if phase == "backward" else 0)
        for layer in range(layers):
            done = ("backward", layer) in order[:column]
            everything = range(ranks) if layer == at else []
            place = (x, 1.2 * layer), f"{column} {layer}"
            _half(ax, place, 0, ranks, everything, [0], ("parameters", BORROWED))
            whole = everything if phase == "backward" else []
            _half(ax, place, 0.5, ranks, whole, [0] if done else [], ("gradients", style.MEMORY_COLORS["gradients"]))
        ax.add_patch(Rectangle((x - 0.06, 1.2 * at - 0.06), 1.12, 1.12, fill=False, edgecolor=style.INK, linewidth=1.4))
        words = "gather\ncompute\nfree" if phase == "forward" else "gather\ncompute\nreduce-scatter\nfree"
        ax.text(x + 0.5, 1.2 * layers + 0.05, words, ha="center", va="top", fontsize=8, color=style.INK)
        ax.text(x + 0.5, -0.15, f"{phase} {at}", ha="center", va="bottom", fontsize=8.5, color=style.MUTED)
    for layer in range(layers):
        ax.text(-0.15, 1.2 * layer + 0.5, f"layer {layer}", ha="right", va="center", color=style.INK)
    ax.set_xlim(-0.9, 1.35 * len(order) + 0.2)
    ax.set_ylim(1.2 * layers + 1.3, -0.5)
    style.bare(ax)
    ax.set_aspect("auto")
    colors = {"parameters, its own": style.MEMORY_COLORS["parameters"], "parameters, borrowed": BORROWED}
    style.legend_above(ax, style.legend_handles(colors | {"gradients": style.MEMORY_COLORS["gradients"]}, bars=True))
    return ax


def _half(ax: Axes, place: tuple, shift: float, ranks: int, whole, own, look: tuple[str, str]) -> None:
    (x, y), label = place
    part, color = look
    _slices(ax, x + shift, y, 0.5, 1.0, ranks, whole, color, f"{label} {part}")
    if own:
        _slices(ax, x + shift, y, 0.5, 1.0, ranks, own, style.MEMORY_COLORS[part], f"{label} own {part}", frame=False)


def _slices(
    ax: Axes, x: float, y: float, width: float, height: float, ranks: int, held, color: str, label: str, frame=True
) -> None:
    """A tensor cut into `ranks` slices from top to bottom, of which those in `held` are filled."""
    each = height / ranks
    for i in range(ranks):
        if i in held:
            look = {"facecolor": color, "edgecolor": style.PAPER, "linewidth": 0.5, "label": f"_{label}"}
            ax.add_patch(Rectangle((x, y + i * each), width, each, zorder=2, **look))
    if frame:
        ax.add_patch(Rectangle((x, y), width, height, fill=False, edgecolor=style.FAINT, linewidth=0.8, zorder=1))


def _check(ranks: int) -> None:
    if not 1 <= ranks <= 8:
        raise ConfigError(f"{ranks} ranks: from 1 to 8 can be drawn")


# How ranks meet ------------------------------------------------------------------------------------------------------

_MEETING = {0: (0.0, 0.0), 1: (2.6, 0.0), "store": (1.3, 1.35)}


def rendezvous() -> np.ndarray:
    """Two ranks meet at a store, in three panels: rank 0 waits; rank 1 signs in; both connect."""
    axes = plt.subplots(1, 3, figsize=(7.5, 2.5), layout="constrained")[1]
    texts = ("1  rank 0 opens the store, and waits", "2  rank 1 signs in", "3  ranks connect")
    for ax, text, there in zip(axes, texts, (1, 2, 2), strict=True):
        ax.text(1.3, 2.15, text, ha="center", fontsize=8.5, color=style.INK)
        ax.set_xlim(-0.75, 3.35)
        ax.set_ylim(-0.75, 2.4)
        style.bare(ax)
        _store(ax, "\n".join(f"rank {rank}: here" for rank in range(there)))
        for rank in (0, 1):
            _rank(ax, rank, rank < there)
    _arrow(axes[0], 0, "signs in")
    for rank, text in ((0, "reads"), (1, "signs in, reads")):
        _arrow(axes[1], rank, text)
    axes[2].annotate("", (2.05, 0), (0.55, 0), arrowprops={"arrowstyle": "<->", "color": style.INK, "lw": 1.6})
    axes[2].text(1.3, -0.16, "data", ha="center", va="top", fontsize=7.5, color=style.INK)
    return axes


def _rank(ax: Axes, rank: int, there: bool) -> None:
    x, y = _MEETING[rank]
    color = style.RANK_COLORS[rank]
    look = {"facecolor": color} if there else {"facecolor": style.PAPER, "edgecolor": style.MUTED, "linestyle": ":"}
    style.rounded(ax, (x - 0.52, y - 0.26), 1.04, 0.52, 0.04, **look)
    text = f"rank {rank}" if there else "not yet"
    ax.text(x, y, text, ha="center", va="center", fontsize=8, color=style.text_color(color) if there else style.MUTED)


def _store(ax: Axes, text: str) -> None:
    x, y = _MEETING["store"]
    look = {"facecolor": style.tint(style.MUTED, 0.15), "edgecolor": style.MUTED}
    style.rounded(ax, (x - 0.77, y - 0.35), 1.54, 0.7, 0.04, **look)
    ax.text(x, y, text, ha="center", va="center", fontsize=7.5, color=style.INK)


def _arrow(ax: Axes, rank: int, text: str) -> None:
    (x, y), (x1, y1) = _MEETING[rank], _MEETING["store"]
    side = -1 if x < x1 else 1
    arrow = {"arrowstyle": "->", "color": style.INK, "lw": 1.2}
    ax.annotate("", (x1 + side * 0.35, y1 - 0.38), (x, y + 0.3), arrowprops=arrow)
    place = {"ha": "right" if side < 0 else "left", "fontsize": 7.5}
    ax.text((x + x1) / 2 + side * 0.3, (y + y1) / 2 - 0.05, text, color=style.INK, **place)
