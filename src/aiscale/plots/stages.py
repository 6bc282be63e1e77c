"""What each rank holds: the stages of ZeRO, and the layers of a step of FSDP. Drawings to scale, from no measurement.

plots.zero_stages(4)          # stages 0 to 3 on four ranks: an area is as large as its bytes
plots.fsdp_step(3, 4)         # rank 0's weights and gradients of three layers, while the step goes on
"""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from aiscale import cost
from aiscale.config import ConfigError
from aiscale.plots import style
from aiscale.plots.one_step import BORROWED

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
