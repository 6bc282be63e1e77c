"""The map of the field: how each strategy divides data and model among ranks, and what the ranks then send.

plots.field_map()                       # all nine, small
plots.field_map("workshop/field_map.svg")   # the README's copy; a test holds it to this drawing
plots.divided("fsdp")                   # one of them, larger; ZeRO's stages: plots.divided("zero1", "zero2", "zero3")
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from os import PathLike

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from aiscale.config import ConfigError
from aiscale.plots import style

_PARTS = {"parameters": "weights", "gradients": "gradients", "optimizer states": "Adam"}
_LAYERS, _ROWS = 4, 4  #: the model that is drawn: layers side by side, each cut into rows
_WIDE, _TALL = 0.3, 0.2  #: of a cell
_GAP, _BETWEEN = 0.3, 0.28  #: between parts; between ranks

#: Does this rank hold cell (layer, row) of this part?
Holds = Callable[[int, str, int, int], bool]


@dataclass(frozen=True)
class _Way:
    title: str
    sends: str  #: what, and when
    holds: Holds
    data: tuple[int, ...] = (0, 1, 2, 3)  #: which share of the batch each rank reads


def _row(rank: int, part: str, layer: int, row: int) -> bool:
    return row == rank


def _cut(*cut: str) -> Holds:
    """Ranks share these parts by layers, and each has all of the others."""
    return lambda rank, part, layer, row: part not in cut or layer == rank


_WAYS = {
    "ddp": _Way("DDP", "gradients, once a step", _cut()),
    # ZeRO's first stages lay all tensors into one long row and cut that, which looks like a cut by layers.
    "zero1": _Way("ZeRO-1", "gradients, then new weights,\nonce a step", _cut("optimizer states")),
    "zero2": _Way("ZeRO-2", "each gradient to its owner,\nthen new weights", _cut("optimizer states", "gradients")),
    "zero3": _Way("ZeRO-3", "a layer's weights before each use,\ngradients to their owners", _row),
    "fsdp": _Way("FSDP", "a layer's weights before each use,\ngradients to their owners", _row),
    "tp": _Way("tensor parallel", "activations, in every layer", _row, (0, 0, 0, 0)),
    "pp": _Way("pipeline parallel", "activations, from stage to stage", _cut(*_PARTS), (0, 0, 0, 0)),
    "ep": _Way(
        "expert parallel",
        "tokens to their experts and back,\ngradients of what is copied",
        lambda rank, part, layer, row: layer % 2 == 0 or row == rank,  # every other layer is made of experts
    ),
    "3d": _Way(
        "3D: tp 2 × pp 2 × dp 2",
        "activations in layers and between\nstages, gradients once a step",
        lambda rank, part, layer, row: row // 2 == rank % 2 and layer // 2 == rank // 4,
        (0, 0, 1, 1, 0, 0, 1, 1),
    ),
}


def divided(*names: str) -> np.ndarray:
    """A panel per strategy: one row per rank, and in it the share of the batch and of each part that the rank holds.

    A part is drawn as four layers side by side, each of four rows; what the rank does not hold is left empty.
    Raises ConfigError for an unknown name.
    """
    unknown = [name for name in names if name not in _WAYS]
    if unknown or not names:
        raise ConfigError(f"divided({', '.join(map(repr, names))}): it draws {', '.join(_WAYS)}")
    columns = min(3, len(names))
    rows = -(-len(names) // columns)
    size = (2.5 * columns, 0.35 + 1.95 * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for ax in axes.flat[len(names) :]:
        ax.remove()
    axes = axes.flatten()[: len(names)]
    for ax, name in zip(axes, names, strict=True):
        _panel(ax, _WAYS[name])
    handles = style.legend_handles({text: style.MEMORY_COLORS[part] for part, text in _PARTS.items()}, bars=True)
    figure.legend(handles=handles, loc="outside upper center", ncols=3)
    return axes


def field_map(path: str | PathLike = "") -> np.ndarray:
    """All strategies as small multiples: what is divided among ranks, what is sent, and when.

    path: an SVG file to write as well, the same bytes each time.
    """
    axes = divided(*_WAYS)
    if path:
        with plt.rc_context({"svg.hashsalt": "aiscale", "svg.fonttype": "none"}):
            axes[0].figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    return axes


def _panel(ax: Axes, way: _Way) -> None:
    scale = 4 / len(way.data)  # eight ranks take the room of four
    tall = _ROWS * _TALL * scale
    for rank, share in enumerate(way.data):
        top = rank * (_ROWS * _TALL + _BETWEEN) * scale
        ax.text(-0.95, top + tall / 2, f"rank {rank}", ha="right", va="center", fontsize=7, color=style.MUTED)
        color = style.RANK_COLORS[share]
        ax.add_patch(Rectangle((-0.8, top), 0.45, tall, facecolor=color, linewidth=0, label=f"_data {rank}:{share}"))
        for number, part in enumerate(_PARTS):
            left = number * (_LAYERS * _WIDE + _GAP)
            _part(ax, left, top, tall, part, partial(way.holds, rank, part))
    ax.text(-0.575, -0.12, "data", ha="center", fontsize=6.5, color=style.MUTED)
    bottom = 4 * (_ROWS * _TALL + _BETWEEN) + 0.05
    ax.text(-1.75, bottom, f"sends {way.sends}", ha="left", va="top", fontsize=7.5, color=style.INK, linespacing=1.3)
    ax.text(-1.75, -0.45, way.title, fontsize=9.5, fontweight="bold", color=style.INK)
    ax.set_xlim(-1.75, 3 * (_LAYERS * _WIDE + _GAP) - _GAP + 0.1)
    ax.set_ylim(bottom + 0.75, -0.8)
    ax.set_axis_off()


def _part(ax: Axes, left: float, top: float, tall: float, part: str, held: Callable[[int, int], bool]) -> None:
    """Four layers of four rows: filled where held, with an outline around all."""
    wide, row_tall = _LAYERS * _WIDE, tall / _ROWS
    for layer in range(_LAYERS):
        rows = [row for row in range(_ROWS) if held(layer, row)]
        if rows:  # one rectangle for all: what a rank holds of a layer lies together
            place = (left + layer * _WIDE, top + rows[0] * row_tall)
            color = style.MEMORY_COLORS[part]
            ax.add_patch(Rectangle(place, _WIDE, len(rows) * row_tall, facecolor=color, linewidth=0))
    for layer in range(1, _LAYERS):
        ax.plot([left + layer * _WIDE] * 2, [top, top + tall], color=style.PAPER, linewidth=0.7, solid_capstyle="butt")
    ax.add_patch(Rectangle((left, top), wide, tall, fill=False, edgecolor=style.FAINT, linewidth=0.8))
