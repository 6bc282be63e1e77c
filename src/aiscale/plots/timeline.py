"""Who does what when: a row for each rank, a bar for each thing it does.

plots.timeline([(rank, name, start_s, end_s, kind), ...])          # measured
plots.timeline(measured, cost.ddp_timeline(...))                   # with the prediction in rows of its own
"""

from __future__ import annotations

from collections.abc import Iterable

from matplotlib.axes import Axes

from aiscale.config import ConfigError
from aiscale.cost import Event
from aiscale.plots import style


def timeline(
    events: Iterable[Event | tuple] = (),
    predicted: Iterable[Event | tuple] = (),
    *,
    names: bool = True,
    ax: Axes | None = None,
) -> Axes:
    """A Gantt chart of (rank, name, start_s, end_s, kind) events, kinds coloured as style.EVENT_COLORS.

    Computation fills a rank's upper lane, communication its lower one, so that overlap shows as one above the other.
    predicted events are drawn pale, in rows below. names: write a bar's name into it where it fits.
    """
    groups = [("measured", [Event(*event) for event in events]), ("predicted", [Event(*event) for event in predicted])]
    groups = [(kind, group) for kind, group in groups if group]
    if not groups:
        raise ConfigError("no events: give timeline (rank, name, start_s, end_s, kind) rows")
    rows = [(kind, rank) for kind, group in groups for rank in sorted({event.rank for event in group})]
    ax = style.new_axes(ax, 7.5, 0.9 + 0.62 * len(rows))
    end = max(event.end_s for _, group in groups for event in group)
    begin = min(event.start_s for _, group in groups for event in group)
    factor, unit = (1e3, "ms") if end - begin < 2 else (1, "s")
    for kind, group in groups:
        talks = {event.rank for event in group if event.kind == "communication"}
        for event in group:
            row = rows.index((kind, event.rank))
            _bar(ax, row, event, kind, factor, (end - begin) * factor, event.rank in talks, names)
    two = len(groups) > 1
    labels = [f"rank {rank}" + (f", {kind}" if two else "") for kind, rank in rows]
    ax.set_yticks(range(len(rows)), labels)
    ax.set_ylim(len(rows) - 0.45, -0.55)
    ax.set_xlim(begin * factor, (end + 0.01 * (end - begin)) * factor)
    ax.grid(visible=True, axis="x")
    ax.grid(visible=False, axis="y")
    ax.set_xlabel(f"time ({unit})")
    kinds = list(dict.fromkeys(event.kind for _, group in groups for event in group))
    colors = {name: style.EVENT_COLORS.get(name, style.MUTED) for name in sorted(kinds, key=_order)}
    shown = [kind for kind, _ in groups]
    more = style.kind_handles(shown, bars=True) if shown != ["measured"] else []
    style.legend_above(ax, style.legend_handles(colors, more, bars=True))
    return ax


def _order(kind: str) -> int:
    known = list(style.EVENT_COLORS)
    return known.index(kind) if kind in known else len(known)


def _bar(ax: Axes, row: int, event: Event, kind: str, factor: float, span: float, two_lanes: bool, names: bool) -> None:
    """One event; `span` is the width of the axes in their units."""
    color = style.EVENT_COLORS.get(event.kind, style.MUTED)
    lane, height = row, 0.72
    if two_lanes:
        lane, height = row + (0.19 if event.kind == "communication" else -0.19), 0.34
    start, width = event.start_s * factor, (event.end_s - event.start_s) * factor
    options = style.bar_style(kind, color)
    ax.barh(lane, width, left=start, height=height, label=f"_{kind}:{event.name}", **options)
    letters = len(event.name) * 0.0105 + 0.01  # the share of the width that 8-point letters take at 7.5 inches
    if names and width / span > letters:
        ink = style.text_color(options["facecolor"])
        ax.text(start + width / 2, lane, event.name, ha="center", va="center", fontsize=8, color=ink, clip_on=True)
