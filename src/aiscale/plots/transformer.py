"""What a model is made of: a block with its shapes and parameters, attention masks, and the parameters of each part.

plots.transformer_layer(run.model)
plots.attention_masks({"GPT: the past only": causal, "BERT: both ways": everything})
plots.parameter_breakdown({"gpt2": recipe("gpt2").model, ...})
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Circle, FancyArrowPatch

from aiscale import cost
from aiscale.config import ConfigError, ModelConfig
from aiscale.config.choices import ACTIVATIONS
from aiscale.plots import style

#: Colour of a part of the model; the names are those of `cost.parameters`.
PART_COLORS = {
    "token_embedding": "#7AB9EE",
    "position_embedding": "#D9DCE1",
    "attention": "#34548F",
    "mlp": "#F0AF00",
    "norms": "#24272D",
    "head": "#BC6EA3",
}


@dataclass(frozen=True)
class _Box:
    name: str
    weight: str  #: its shape, or a word on the operation if it has none
    parameters: int
    output: str
    part: str = ""


def _branches(model: ModelConfig) -> tuple[list[_Box], list[_Box]]:
    """The operations of attention and of the MLP, from the residual stream back to it."""
    D, F, layer = model.d_model, model.ff_width, cost.layer_parameters(model)
    qkv = (model.n_head + 2 * model.kv_heads) * model.d_head
    up = F * (2 if model.gated else 1)
    norm = "RMS norm" if model.norm == "rmsnorm" else "layer norm"
    norms = [_Box(norm, f"{D}", layer["norms"] // 2, f"{D}", "norms") for _ in range(2)]
    down = D * F + D * model.bias
    heads = f"{model.n_head} heads" + (f", {model.kv_heads} kv" if model.kv_heads != model.n_head else "")
    activation = ACTIVATIONS[model.activation].label
    attention = [
        norms[0],
        _Box("q, k, v", f"{D} × {qkv}", layer["qkv"], f"{qkv}", "attention"),
        _Box("attention", f"{heads}\nof {model.d_head}", 0, f"{D}"),
        _Box("out", f"{D} × {D}", layer["attention_out"], f"{D}", "attention"),
    ]
    mlp = [
        norms[1],
        _Box("up", f"{D} × {up}", layer["mlp"] - down, f"{up}", "mlp"),
        _Box(activation, "each number\nby itself", 0, f"{F}"),
        _Box("down", f"{F} × {D}", down, f"{D}", "mlp"),
    ]
    return attention, mlp


_WIDTH, _HEIGHT, _GAP = 1.5, 0.96, 0.34  # of a box and between boxes, in data units
_LEFT = 0.75  # from the stream to the first box
_THIN = {"color": style.INK, "linewidth": 1.1}
_HEAD = {"arrowstyle": "-|>,head_length=3.5,head_width=2", "shrinkA": 0, "shrinkB": 0, **_THIN}


def transformer_layer(model: ModelConfig, *, ax: Axes | None = None) -> Axes:
    """One block of `GPT(model)`: its operations, the shapes of their weights and outputs, and their parameters.

    The line on the left is the residual stream, tensors of (B, T, D); each branch reads it and adds to it. The width of
    its output is below each box. With parallel_residual both branches read the same stream.
    """
    attention, mlp = _branches(model)
    rows, turns = (0.0, -2.35), (-1.1, -3.45)
    right = _LEFT + 4 * _WIDTH + 3 * _GAP
    ax = style.new_axes(ax, 7.5, 7.5 * 5.15 / (right + 1.1))
    arrow = {"arrowstyle": "-|>,head_length=5,head_width=2.6", "color": style.INK, "linewidth": 1.8}
    ax.add_patch(FancyArrowPatch((0, 1.0), (0, -4.05), shrinkA=0, shrinkB=0, zorder=1, **arrow))
    note = {"fontsize": 8, "color": style.MUTED, "va": "center"}
    ax.text(0.14, 0.9, f"residual stream (B, T, {model.d_model})", **note)
    total = sum(cost.layer_parameters(model).values())
    word = f"to the next of {model.n_layer} layers, {style.format_count(total)} parameters each"
    ax.text(0.14, -3.92, word, **note)
    for y, name, boxes in zip(rows, ("attention", "mlp"), (attention, mlp), strict=True):
        _branch(ax, y, name, boxes)
    if model.parallel_residual:
        ax.plot([0.4, 0.4, _LEFT], [rows[0], rows[1], rows[1]], zorder=1, **_THIN)
        _return(ax, right, rows[0], turns[1])
        ax.plot([right, right + 0.3], [rows[1], rows[1]], zorder=1, **_THIN)
        _plus(ax, right + 0.3, rows[1])
    else:
        ax.plot([0, _LEFT], [rows[1], rows[1]], zorder=1, **_THIN)
        for y, turn in zip(rows, turns, strict=True):
            _return(ax, right, y, turn)
    ax.set_xlim(-0.25, right + 0.85)
    ax.set_ylim(-4.1, 1.05)
    style.bare(ax)
    return ax


def _plus(ax: Axes, x: float, y: float) -> None:
    ax.add_patch(Circle((x, y), 0.15, facecolor=style.PAPER, edgecolor=style.INK, linewidth=1.3, zorder=3))
    ax.text(x, y - 0.005, "+", ha="center", va="center", fontsize=10, zorder=4)


def _return(ax: Axes, right: float, y: float, turn: float) -> None:
    """An arrow from the end of a row at height y back to the stream at height `turn`, where it is added."""
    ax.plot([right, right + 0.3, right + 0.3, 0.5], [y, y, turn, turn], zorder=1, **_THIN)
    ax.add_patch(FancyArrowPatch((0.6, turn), (0.15, turn), **_HEAD))
    _plus(ax, 0, turn)


def _branch(ax: Axes, y: float, name: str, boxes: Sequence[_Box]) -> None:
    ax.plot([0 if y == 0 else _LEFT, _LEFT], [y, y], zorder=1, **_THIN)
    for i, box in enumerate(boxes):
        x = _LEFT + i * (_WIDTH + _GAP)
        ax.add_patch(FancyArrowPatch((x - _GAP, y), (x, y), **_HEAD))
        _draw_box(ax, x, y, box)
    count = sum(box.parameters for box in boxes if box.part == name)
    word = f"{name if name == 'attention' else 'MLP'}: {style.format_count(count)} parameters"
    middle = _LEFT + _WIDTH + _GAP
    ax.text(middle, y + _HEIGHT / 2 + 0.12, word, va="bottom", fontsize=8.5, weight="bold")


def _draw_box(ax: Axes, x: float, y: float, box: _Box) -> None:
    color = PART_COLORS.get(box.part)
    face = style.tint(color, 0.22) if color else style.PAPER
    edge = color or "#AEB5C0"
    look = {"facecolor": face, "edgecolor": edge, "linewidth": 1.1, "zorder": 3}
    style.rounded(ax, (x, y - _HEIGHT / 2), _WIDTH, _HEIGHT, 0.1, **look)
    middle = {"ha": "center", "va": "center", "zorder": 4}
    ax.text(x + _WIDTH / 2, y + 0.26, box.name, fontsize=8.5, weight="bold", **middle)
    if box.parameters:
        ax.text(x + _WIDTH / 2, y - 0.02, box.weight, fontsize=8, **middle)
        ax.text(x + _WIDTH / 2, y - 0.28, style.format_count(box.parameters), fontsize=8, **middle)
    else:
        ax.text(x + _WIDTH / 2, y - 0.13, box.weight, fontsize=8, linespacing=1.3, **middle)
    below = {"ha": "center", "va": "top", "fontsize": 7.5, "color": style.MUTED}
    ax.text(x + _WIDTH / 2, y - _HEIGHT / 2 - 0.08, f"(B, T, {box.output})", **below)


def attention_masks(masks: Mapping[str, np.ndarray], *, tokens: Sequence[str] | None = None) -> np.ndarray:
    """Which positions each token attends to; returns one Axes per mask.

    masks: {label: (T, T) booleans or numbers}; row: the query token, column: the key token. Numbers (attention
    weights) are drawn as shades. tokens: the T words, written along the axes.
    """
    style.check_given(masks, "attention_masks {label: (T, T) array}")
    size = (min(7.5, 3.6 * len(masks)), 3.7)
    _, axes = plt.subplots(1, len(masks), figsize=size, squeeze=False, layout="constrained")
    shades = ListedColormap([style.tint(style.STRATEGY_COLORS["ddp"], s) for s in np.linspace(0.08, 1, 64)])
    for ax, (label, mask) in zip(axes[0], masks.items(), strict=True):
        values = np.asarray(mask, dtype=float)
        if values.ndim != 2 or values.shape[0] != values.shape[1]:
            raise ConfigError(f"mask {label!r} has shape {values.shape}: it must be square, (T, T)")
        size = len(values)
        ax.pcolormesh(values, cmap=shades, vmin=0, vmax=max(1.0, values.max()), edgecolors=style.PAPER, linewidth=1.5)
        ax.set_aspect("equal")
        ax.invert_yaxis()
        ax.grid(False)
        ax.spines[:].set_visible(False)
        names = list(tokens) if tokens is not None else [str(i) for i in range(size)]
        every = 1 if tokens is not None else max(1, size // 8)
        ax.set_xticks(np.arange(size)[::every] + 0.5, names[::every], rotation=45 if tokens is not None else 0)
        ax.set_yticks(np.arange(size)[::every] + 0.5, names[::every])
        ax.tick_params(length=0)
        ax.set_xlabel(f"looks at (token)\n{label}")
    axes[0][0].set_ylabel("token that looks (token)")
    return axes[0]


def parameter_breakdown(models: Mapping[str, ModelConfig], *, ax: Axes | None = None) -> Axes:
    """The share of the parameters in each part, one bar per model, with the total at its end."""
    ax = style.new_axes(ax, 7.5, 0.95 + 0.36 * len(models))
    used = {}
    for row, model in enumerate(models.values()):
        parts, total, left = cost.parameters(model), cost.parameter_count(model), 0.0
        for part, color in PART_COLORS.items():
            share = 100 * parts[part] / total
            if not share:
                continue
            used[part.replace("_", " ")] = color
            ax.barh(row, share, left=left, height=0.72, color=color, edgecolor=style.PAPER, label=f"_{part}")
            if share > 6:
                ink = style.text_color(color)
                ax.text(left + share / 2, row, f"{share:.0f}", ha="center", va="center", fontsize=8, color=ink)
            left += share
        place = {"textcoords": "offset points", "xytext": (6, 0), "va": "center", "annotation_clip": False}
        ax.annotate(style.format_count(total), (100, row), **place)
    ax.set_yticks(range(len(models)), list(models))
    ax.set_ylim(len(models) - 0.4, -0.6)
    ax.set_xlim(0, 100)
    ax.grid(False)
    ax.set_xlabel("share of the parameters (%)")
    style.legend_above(ax, style.legend_handles(used, bars=True))
    return ax
