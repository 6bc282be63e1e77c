"""One payload, cut into more and more messages: what each message costs by itself.

plots.message_count([1, 4, 16], measured_s, predicted_s, payload_bytes=4_194_304)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator

from aiscale.config import ConfigError
from aiscale.plots import style


def message_count(
    counts: Sequence[int],
    measured_s: Sequence[float],
    predicted_s: Sequence[float] | None = None,
    *,
    payload_bytes: int,
    ax: Axes | None = None,
) -> Axes:
    """Seconds to send `payload_bytes` in all, cut into that many messages; the upper axis gives one message's size."""
    for name, values in (("measured_s", measured_s), ("predicted_s", predicted_s)):
        if values is not None and len(values) != len(counts):
            raise ConfigError(f"{len(counts)} counts of messages but {len(values)} values of {name}: give one for each")
    ax = style.new_axes(ax, 7.5, 3.8)
    color = style.STRATEGY_COLORS["mpi"]
    style.draw(ax, "measured", counts, measured_s, color)
    kinds = ["measured"]
    if predicted_s is not None:
        style.draw(ax, "predicted", counts, predicted_s, style.INK)
        kinds.append("predicted")
    ax.set(xscale="log", yscale="log", ylabel="time for all of them (s)")
    ax.set_xlabel(f"number of messages that {style.format_bytes(payload_bytes)} are cut into")
    style.ranks_axis(ax.xaxis, counts)
    values = [*measured_s, *(predicted_s or [])]
    decades = math.log10(max(values) / min(values))
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 1.5 else (1, 3) if decades < 3 else (1,)))
    style.seconds_axis(ax.yaxis)
    sizes = ax.secondary_xaxis("top")
    sizes.set_xticks(counts, [style.format_bytes(payload_bytes / n) for n in counts])
    sizes.minorticks_off()
    sizes.set_xlabel("size of one message")
    handles = style.kind_handles(kinds)
    ax.legend(handles=handles, loc="upper left")
    return ax
