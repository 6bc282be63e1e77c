"""Pipeline schedules: a row for each rank, a box for each piece of work with the number of its micro-batch.

plots.pipeline(events)                                              # measured, of all ranks, from PipelineTrace
plots.pipeline(predicted=cost.pipeline_timeline("1f1b", 4, 8))      # simulated
"""

from __future__ import annotations

from collections.abc import Iterable

from matplotlib.axes import Axes

from aiscale.config import ConfigError
from aiscale.cost import Event
from aiscale.plots import style


def pipeline(
    events: Iterable[Event | tuple] = (), predicted: Iterable[Event | tuple] = (), *, ax: Axes | None = None
) -> Axes:
    """Boxes of (rank, name, start_s, end_s, kind) events; what is empty between them is the bubble.

    A name is the micro-batch, "3", or with several pieces of the model on a rank the micro-batch and the piece, "3.1":
    then each piece has a lane of its own, the first one above. predicted events stand in rows below.
    """
    groups = [("measured", [Event(*event) for event in events]), ("predicted", [Event(*event) for event in predicted])]
    groups = [(kind, group) for kind, group in groups if group]
    if not groups:
        raise ConfigError("no events: give pipeline (rank, name, start_s, end_s, kind) rows")
    rows = [(kind, rank) for kind, group in groups for rank in sorted({event.rank for event in group})]
    lanes = 1 + max(_piece(event) for _, group in groups for event in group)
    ax = style.new_axes(ax, 7.5, 0.9 + (0.2 + 0.14 * lanes) * len(rows))
    begin = {kind: min(event.start_s for event in group) for kind, group in groups}
    span = max(event.end_s - begin[kind] for kind, group in groups for event in group)
    factor, unit = (1e3, "ms") if span < 2 else (1, "s")
    for kind, group in groups:
        for event in group:
            lane = rows.index((kind, event.rank)) + 0.84 * ((_piece(event) + 0.5) / lanes - 0.5)
            _box(ax, lane, 0.84 / lanes, event._replace(start_s=event.start_s - begin[kind]), factor, span, kind)
    several = len(groups) > 1
    ax.set_yticks(range(len(rows)), [f"rank {rank}" + (f", {kind}" if several else "") for kind, rank in rows])
    ax.set_ylim(len(rows) - 0.45, -0.55)
    ax.set_xlim(0, span * factor * 1.005)
    ax.grid(visible=False)
    ax.set_xlabel(f"time ({unit})")
    found = {event.kind for _, group in groups for event in group}
    colors = {kind: color for kind, color in style.EVENT_COLORS.items() if kind in found}
    shown = [kind for kind, _ in groups]
    more = style.kind_handles(shown, bars=True) if shown != ["measured"] else []
    style.legend_above(ax, style.legend_handles(colors, more, bars=True))
    return ax


def _piece(event: Event) -> int:
    return int(event.name.partition(".")[2] or 0)


def _box(ax: Axes, lane: float, height: float, event: Event, factor: float, span: float, kind: str) -> None:
    number = event.name.partition(".")[0]
    options = style.bar_style(kind, style.EVENT_COLORS.get(event.kind, style.MUTED))
    options["linewidth"] = 0.6
    start, width = event.start_s * factor, (event.end_s - event.start_s) * factor
    ax.barh(lane, width, left=start, height=height, label=f"_{kind}:{event.name}", **options)
    # The share of the width that 7-point digits take at 7.5 inches.
    if width / factor / span > 0.0105 * len(number) + 0.003:
        ink = style.text_color(options["facecolor"])
        ax.text(start + width / 2, lane, number, ha="center", va="center", fontsize=7, color=ink, clip_on=True)
