"""How training scales with ranks, and how our numbers stand beside those that others published.

plots.speedup([1, 2, 4], {"ddp, strong": [1, 1.9, 2.1]}, {"ddp, strong": [1, 1.92, 2.0]})
plots.efficiency([1, 2, 4], ...)
plots.published_vs_measured(published, measured, xlabel="training time (s)", source="CS455 slides")
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from aiscale.config import ConfigError
from aiscale.plots import style

Values = Mapping[str, Sequence[float]] | Sequence[float]
Points = Mapping[str, tuple[Sequence[float], Sequence[float]]]


def _series(values: Values | None) -> dict[str, Sequence[float]]:
    if values is None:
        return {}
    return dict(values) if isinstance(values, Mapping) else {"": values}


def speedup(
    ranks: Sequence[int],
    measured: Values | None = None,
    predicted: Values | None = None,
    *,
    published: Points | None = None,
    source: str = "",
    ax: Axes | None = None,
) -> Axes:
    """How many times as fast as one rank. measured, predicted: (len(ranks),) or {label: (len(ranks),)}.

    published: {label: (ranks, speedups)} of others, with `source`. The grey line is ideal: n ranks, n times as fast.
    """
    ax = _over_ranks(ranks, measured, predicted, published, source, ax, 3.8)
    everywhere = sorted({*ranks, *(n for given, _ in (published or {}).values() for n in given)})
    ax.plot(everywhere, everywhere, color=style.FAINT, linewidth=1.4, zorder=1)
    top = everywhere[-1]
    place = {"textcoords": "offset points", "xytext": (-12, 2), "ha": "right", "va": "bottom", "fontsize": 8.5}
    ax.annotate("ideal", (top, top), color=style.MUTED, **place)
    if top > 8:
        ax.set_yscale("log", base=2)
        style.ranks_axis(ax.yaxis, everywhere)
        ax.set_ylim(top=top * 1.3)
    else:  # few ranks: a linear axis shows better how much is missing
        ax.set_xscale("linear")
        style.ranks_axis(ax.xaxis, everywhere)
        style.steps_axis(ax.yaxis)
        ax.set_ylim(0, top * 1.06)
    ax.set_ylabel("speed-up (times one rank)")
    return ax


def efficiency(
    ranks: Sequence[int],
    measured: Values | None = None,
    predicted: Values | None = None,
    *,
    published: Points | None = None,
    source: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Parallel efficiency, speed-up over ranks; arguments as in speedup, values between 0 and 1 (ideal)."""
    ax = _over_ranks(ranks, measured, predicted, published, source, ax, 3.4)
    ax.axhline(1, color=style.FAINT, linewidth=1.4, zorder=1)
    values = [v for given in (measured, predicted) for series in _series(given).values() for v in series]
    values += [v for _, series in (published or {}).values() for v in series]
    ax.set_ylim(0, max(1.08, 1.08 * max(values)))
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    ax.set_ylabel("efficiency (% of ideal)")
    return ax


def _over_ranks(ranks, measured, predicted, published, source, ax, height) -> Axes:
    """Series over the number of ranks, one colour a label, one mark a kind."""
    given = {"measured": _series(measured), "predicted": _series(predicted)}
    points = {kind: {label: (ranks, y) for label, y in series.items()} for kind, series in given.items()}
    points["published"] = dict(published or {})
    labels = list(dict.fromkeys(label for series in points.values() for label in series))
    if not labels:
        raise ConfigError("nothing to draw: give measured, predicted or published values")
    for kind, series in points.items():
        for label, (x, y) in series.items():
            if len(x) != len(y):
                raise ConfigError(f"{kind} {label}: {len(x)} ranks but {len(y)} values")
    ax = style.new_axes(ax, 7.5, height)
    colors = style.series_colors(labels) if labels != [""] else {"": style.STRATEGY_COLORS["ddp"]}
    for kind, series in points.items():
        for label, (x, y) in series.items():
            style.draw(ax, kind, x, y, colors[label])
    ax.set_xscale("log", base=2)
    style.ranks_axis(ax.xaxis, [n for series in points.values() for x, _ in series.values() for n in x])
    ax.set_xlabel("number of ranks")
    kinds = [kind for kind, series in points.items() if series]
    names = {label: color for label, color in colors.items() if label}
    style.legend_above(ax, style.legend_handles(names, style.kind_handles(kinds, source)))
    return ax


def published_vs_measured(
    published: Mapping[str, float],
    measured: Mapping[str, float],
    predicted: Mapping[str, float] | None = None,
    *,
    xlabel: str = "time (s)",
    source: str = "",
    log: bool | None = None,
    ax: Axes | None = None,
) -> Axes:
    """What others printed beside what we measured, one group of bars for each label; the value stands at the bar's end.

    Each: {label: value}, in the unit of xlabel. log: a logarithmic axis; by default where values span a factor of 30.
    """
    groups = {"published": published, "measured": measured, "predicted": predicted or {}}
    groups = {kind: group for kind, group in groups.items() if group}
    labels = list(dict.fromkeys(label for group in groups.values() for label in group))
    values = [value for group in groups.values() for value in group.values()]
    if not values or min(values) <= 0:
        raise ConfigError("published_vs_measured draws positive values, and at least one")
    rows = [(label, kind) for label in labels for kind in groups if label in groups[kind]]
    ax = style.new_axes(ax, 7.5, 0.9 + 0.3 * len(rows) + 0.18 * len(labels))
    colors = {label: style.STRATEGY_COLORS["ddp"] for label in labels}
    colors |= {label: color for label, color in style.series_colors(labels).items() if _is_strategy(label)}
    log = max(values) > 30 * min(values) if log is None else log
    left = 10 ** _floor(min(values)) if log else 0
    y, centers = 0.0, {label: [] for label in labels}
    for i, (label, kind) in enumerate(rows):
        y += 1.0 if i and rows[i - 1][0] == label else 1.6
        _value_bar(ax, y, left, groups[kind][label], kind, colors[label], label)
        centers[label].append(y)
    if log:
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    ax.set_xlim(left, max(values) * (2.2 if log else 1.12))
    ax.set_yticks([sum(at) / len(at) for at in centers.values()], labels)
    ax.set_ylim(y + 0.8, 0.8)
    ax.grid(visible=True, axis="x")
    ax.grid(visible=False, axis="y")
    ax.set_xlabel(xlabel)
    style.legend_above(ax, style.kind_handles(groups, source, bars=True))
    return ax


def _value_bar(ax: Axes, y: float, left: float, value: float, kind: str, color: str, label: str) -> None:
    ax.barh(y, value - left, left=left, height=0.8, label=f"_{kind}:{label}", **style.bar_style(kind, color))
    if kind == "published":
        style.draw(ax, "published", [value], [y], color, clip_on=False)
    place = {"textcoords": "offset points", "xytext": (7, 0), "va": "center", "fontsize": 8.5}
    ax.annotate(f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}", (value, y), color=style.INK, **place)


def _is_strategy(label: str) -> bool:
    return next(iter(label.lower().replace("-", " ").replace("+", " ").split()), "") in style.STRATEGY_COLORS


def _floor(value: float) -> int:
    """The power of ten at or below half of `value`, so that the shortest bar keeps some length."""
    return math.floor(math.log10(value / 2))
