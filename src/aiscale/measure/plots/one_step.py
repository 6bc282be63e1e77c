"""One step over time: timelines of ranks and pipeline schedules."""

from __future__ import annotations

from collections.abc import Iterable

from matplotlib.axes import Axes

from aiscale.errors import ConfigError
from aiscale.measure.plots import style
from aiscale.plan.cost import Event

Events = Iterable[Event | tuple]  #: (rank, name, start_s, end_s, kind)


def timeline(
    events: Events = (),
    predicted: Events = (),
    *,
    names: bool = True,
    until_s: float = 0.0,
    ax: Axes | None = None,
) -> Axes:
    """A Gantt chart of (rank, name, start_s, end_s, kind) events.

    Kinds are coloured as style.EVENT_COLORS; each rank has a row for computation and below it one
    for communication. predicted events are pale, in rows below. names: write a bar's name into it
    where it fits. until_s: the time axis reaches at least to here.
    """
    groups, rows = _groups(events, predicted)
    ax = style.new_axes(ax, 7.5, 0.9 + 0.62 * len(rows))
    end = max(until_s, *(event.end_s for _, group in groups for event in group))
    begin = min(event.start_s for _, group in groups for event in group)
    factor, unit = _milliseconds(end - begin)
    for kind, group in groups:
        talks = {event.rank for event in group if event.kind == "communication"}
        for event in group:
            lane, height = rows.index((kind, event.rank)), 0.72
            if event.rank in talks:
                lane, height = lane + (0.19 if event.kind == "communication" else -0.19), 0.34
            # The share of the width that 8-point letters take at 7.5 inches
            needed = 0.0105 * len(event.name) + 0.01
            fits = names and (event.end_s - event.start_s) / (end - begin) > needed
            _bar(ax, lane, height, event, kind, factor, event.name if fits else "", fontsize=8)
    ax.set_xlim(begin * factor, (end + 0.01 * (end - begin)) * factor)
    style.for_bars(ax)
    return _finish(ax, groups, rows, unit)


def pipeline(events: Events = (), predicted: Events = (), *, ax: Axes | None = None) -> Axes:
    """A pipeline's schedule, measured or predicted: one row per rank, one box per piece of work.

    The gaps between boxes are the bubble. A name is the micro-batch, "3", or with several chunks on
    a rank also the chunk, "3.1", which has its own lane.
    """
    groups, rows = _groups(events, predicted)
    ((kind, group),) = groups
    lanes = 1 + max(map(_piece, group))
    ax = style.new_axes(ax, 7.5, 0.9 + (0.2 + 0.14 * lanes) * len(rows))
    begin = min(event.start_s for event in group)
    span = max(event.end_s for event in group) - begin
    factor, unit = _milliseconds(span)
    for event in group:
        lane = rows.index((kind, event.rank)) + 0.84 * ((_piece(event) + 0.5) / lanes - 0.5)
        number = event.name.partition(".")[0]
        # The share of the width that 7-point digits take at 7.5 inches
        fits = (event.end_s - event.start_s) / span > 0.0105 * len(number) + 0.003
        moved = event._replace(start_s=event.start_s - begin, end_s=event.end_s - begin)
        word = number if fits else ""
        _bar(ax, lane, 0.84 / lanes, moved, kind, factor, word, fontsize=7, linewidth=0.6)
    ax.set_xlim(0, span * factor * 1.005)
    ax.grid(visible=False)
    return _finish(ax, groups, rows, unit)


Groups = list[tuple[str, list[Event]]]  #: measured and predicted, whichever exist
Rows = list[tuple[str, int]]  #: (measured or predicted, rank)


def _groups(events: Events, predicted: Events) -> tuple[Groups, Rows]:
    groups = [
        ("measured", [Event(*event) for event in events]),
        ("predicted", [Event(*event) for event in predicted]),
    ]
    groups = [(kind, group) for kind, group in groups if group]
    if not groups:
        raise ConfigError("nothing to draw: give rows of (rank, name, start_s, end_s, kind)")
    rows = []
    for kind, group in groups:
        rows += [(kind, rank) for rank in sorted({event.rank for event in group})]
    return groups, rows


def _milliseconds(span_s: float) -> tuple[float, str]:
    return (1e3, "ms") if span_s < 2 else (1, "s")


def _piece(event: Event) -> int:
    return int(event.name.partition(".")[2] or 0)


def _bar(
    ax: Axes,
    lane: float,
    height: float,
    event: Event,
    kind: str,
    factor: float,
    word: str,
    fontsize: int,
    **look,
) -> None:
    options = style.bar_style(kind, style.EVENT_COLORS.get(event.kind, style.MUTED)) | look
    start, width = event.start_s * factor, (event.end_s - event.start_s) * factor
    ax.barh(lane, width, left=start, height=height, label=f"_{kind}:{event.name}", **options)
    if word:
        ink = style.text_color(options["facecolor"])
        place = {"ha": "center", "va": "center", "clip_on": True}
        ax.text(start + width / 2, lane, word, color=ink, fontsize=fontsize, **place)


def _finish(ax: Axes, groups: Groups, rows: Rows, unit: str) -> Axes:
    """Label the ranks' rows and the time axis; a legend of colours and marks above."""
    several = len({kind for kind, _ in rows}) > 1
    labels = [f"rank {rank}" + (f", {kind}" if several else "") for kind, rank in rows]
    ax.set_yticks(range(len(rows)), labels)
    ax.set_ylim(len(rows) - 0.45, -0.55)
    ax.set_xlabel(f"time ({unit})")
    kinds = dict.fromkeys(event.kind for _, group in groups for event in group)
    order = [kind for kind in style.EVENT_COLORS if kind in kinds]
    order += [kind for kind in kinds if kind not in style.EVENT_COLORS]
    colors = {kind: style.EVENT_COLORS.get(kind, style.MUTED) for kind in order}
    shown = [kind for kind, _ in groups]
    more = style.kind_handles(shown, bars=True) if shown != ["measured"] else []
    style.legend_above(ax, style.legend_handles(colors, more, bars=True))
    return ax
