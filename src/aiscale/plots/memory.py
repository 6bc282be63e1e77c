"""What memory goes into: bars of predicted and measured bytes by category, and memory over a step.

plots.memory_bars(cost.training_bytes(model, 8, 256), measured)                # one configuration
plots.memory_bars({"fp32": {...}, "bf16": {...}}, {"fp32": {...}, ...})        # several, one under the other
plots.memory_over_time(seconds, {"parameters": [...], "activations": [...]}, marks={"backward": 0.12})
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from aiscale.config import ConfigError
from aiscale.plots import style

Categories = Mapping[str, float]
_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


def _unit(largest: float) -> tuple[int, str]:
    """The unit in which the largest value is above 1."""
    return next(((scale, name) for scale, name in _UNITS if largest >= scale), (1, "B"))


def _by_configuration(given: Mapping | None) -> dict[str, Categories]:
    """{configuration: {category: bytes}}; a bare {category: bytes} is the configuration without a name."""
    if not given:
        return {}
    if all(isinstance(value, Mapping) for value in given.values()):
        return dict(given)
    return {"": given}


def _ordered(categories) -> list[str]:
    known = [name for name in style.MEMORY_COLORS if name in categories]
    return known + [name for name in categories if name not in known]


def memory_bars(
    predicted: Mapping | None = None,
    measured: Mapping | None = None,
    published: Mapping | None = None,
    *,
    capacity_bytes: float | None = None,
    source: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Bytes by category, stacked; for each configuration a bar for what is predicted, measured and published.

    Each of the three is {category: bytes} or {configuration: {category: bytes}}. capacity_bytes draws the memory of
    the device as a line. Categories keep their colour in every figure (style.MEMORY_COLORS).
    """
    kinds = {"predicted": predicted, "measured": measured, "published": published}
    groups = {kind: _by_configuration(given) for kind, given in kinds.items() if given}
    if not groups:
        raise ConfigError("nothing to draw: give memory_bars predicted, measured or published bytes")
    labels = list(dict.fromkeys(label for group in groups.values() for label in group))
    rows = [(label, kind) for label in labels for kind in groups if label in groups[kind]]
    categories = _ordered(dict.fromkeys(c for label, kind in rows for c in groups[kind][label]))
    categories = [c for c in categories if any(groups[kind][label].get(c, 0) for label, kind in rows)]
    scale, unit = _unit(max(sum(groups[kind][label].values()) for label, kind in rows))
    ax = style.new_axes(ax, 7.5, 0.95 + 0.36 * len(rows) + 0.22 * len(labels))
    ticks, y = [], 0.0
    for i, (label, kind) in enumerate(rows):
        y += 1.0 if i == 0 or rows[i - 1][0] == label else 1.6
        _bar(ax, y, groups[kind][label], categories, kind, scale)
        ticks.append((y, f"{label}, {kind}" if label else kind))
    ax.set_yticks([t for t, _ in ticks], [name for _, name in ticks])
    ax.set_ylim(y + 0.65, 0.35 if capacity_bytes is None else 0.05)  # a line of text over the bars
    ax.grid(visible=True, axis="x")
    ax.grid(visible=False, axis="y")
    ax.set_xlim(0, 1.13 * max([*(sum(groups[k][n].values()) for n, k in rows), capacity_bytes or 0]) / scale)
    if capacity_bytes is not None:
        _capacity(ax, capacity_bytes / scale)
    ax.set_xlabel(f"memory ({unit})")
    names = {c: style.MEMORY_COLORS.get(c, style.MEMORY_COLORS["other"]) for c in categories}
    style.legend_above(ax, style.legend_handles(names, style.kind_handles(groups, source, bars=True), bars=True))
    return ax


def _capacity(ax: Axes, x: float) -> None:
    ax.axvline(x, color=style.INK, linewidth=1.2, linestyle=":")
    place = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "va": "top", "fontsize": 8}
    ax.annotate("memory of the device", (x, 1), xytext=(-4, 0), ha="right", color=style.MUTED, **place)


def _bar(ax: Axes, y: float, values: Categories, categories: Sequence[str], kind: str, scale: float) -> None:
    left, total = 0.0, sum(values.values()) / scale
    for category in categories:
        width = values.get(category, 0) / scale
        if not width:
            continue
        color = style.MEMORY_COLORS.get(category, style.MEMORY_COLORS["other"])
        ax.barh(y, width, left=left, height=0.78, label=f"_{kind}:{category}", **style.bar_style(kind, color))
        left += width
    ax.annotate(
        f"{total:.3g}", (left, y), textcoords="offset points", xytext=(5, 0), va="center", color=style.INK, fontsize=8.5
    )


def memory_over_time(
    seconds: Sequence[float],
    held: Mapping[str, Sequence[float]],
    *,
    marks: Mapping[str, float] | None = None,
    predicted_peak_bytes: float | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Measured bytes over time, stacked by category.

    seconds: (n,) when each sample was taken; held: {category: (n,) bytes}; marks: {what begins: second};
    predicted_peak_bytes: a dashed level.
    """
    ax = style.new_axes(ax)
    categories = _ordered(held)
    stack = np.array([held[c] for c in categories], dtype=float)
    peak = stack.sum(axis=0).max()
    scale, unit = _unit(max(peak, predicted_peak_bytes or 0))
    time = np.asarray(seconds, dtype=float)
    factor, second = (1e3, "ms") if time.max() < 2 else (1, "s")
    colors = [style.MEMORY_COLORS.get(c, style.MEMORY_COLORS["other"]) for c in categories]
    ax.stackplot(time * factor, stack / scale, colors=colors, labels=[f"_{c}" for c in categories], linewidth=0)
    ax.set_xlim(time.min() * factor, time.max() * factor)
    ax.set_ylim(0, 1.14 * max(peak, predicted_peak_bytes or 0) / scale)
    for name, at in (marks or {}).items():
        ax.axvline(at * factor, color=style.INK, linewidth=0.8, linestyle=(0, (1, 2)))
        place = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "fontsize": 8.5}
        ax.annotate(name, (at * factor, 1), xytext=(4, -3), va="top", color=style.MUTED, **place)
    handles = style.legend_handles(dict(zip(categories, colors, strict=True)), bars=True)
    if predicted_peak_bytes is not None:
        ax.axhline(predicted_peak_bytes / scale, color=style.INK, linewidth=1.4, linestyle="--")
        handles += [*style.kind_handles(["predicted"])]
    ax.set(xlabel=f"time ({second})", ylabel=f"memory ({unit})")
    style.legend_above(ax, handles)
    return ax
