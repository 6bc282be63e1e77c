"""What strategies send: bars of bytes by collective, predicted and measured.

plots.traffic_bars({"zero1": {"all_reduce": 4e6}}, {"zero1": {"all_reduce": 4e6}}, unit_bytes=2e6, unit="weights")
"""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes

from aiscale.config import ConfigError
from aiscale.plots import style

#: Colour of a collective, from the palette of ranks, which is known to keep apart.
COLLECTIVE_COLORS = {
    "all_reduce": "#D96709",
    "all_gather": "#0068B8",
    "reduce_scatter": "#60B4A1",
    "send": "#572D88",
    "broadcast": "#FAC62D",
    "other": "#7C828A",
}
Sent = Mapping[str, Mapping[str, float]]


def _order(item: tuple[str, float]) -> tuple[int, str]:
    """The same from bar to bar: that of COLLECTIVE_COLORS."""
    known = list(COLLECTIVE_COLORS)
    return known.index(item[0]) if item[0] in known else len(known), item[0]


def traffic_bars(
    predicted: Sent | None = None,
    measured: Sent | None = None,
    *,
    unit_bytes: float = 2**20,
    unit: str = "MiB",
    ax: Axes | None = None,
) -> Axes:
    """Bytes by collective, stacked; for each configuration a bar for what is predicted and one for what is measured.

    Both are {configuration: {collective: bytes}}. The axis counts in `unit_bytes`, called `unit`.
    """
    kinds = {kind: given for kind, given in (("predicted", predicted), ("measured", measured)) if given}
    if not kinds:
        raise ConfigError("nothing to draw: give traffic_bars predicted or measured bytes")
    labels = list(dict.fromkeys(label for given in kinds.values() for label in given))
    rows = [(label, kind) for label in labels for kind in kinds if label in kinds[kind]]
    ax = style.new_axes(ax, 7.5, 0.95 + 0.3 * len(rows) + 0.16 * len(labels))
    ticks, y, seen = [], 0.0, {}
    for i, (label, kind) in enumerate(rows):
        y += 1.0 if i == 0 or rows[i - 1][0] == label else 1.5
        left = 0.0
        for collective, nbytes in sorted(kinds[kind][label].items(), key=_order):
            color = COLLECTIVE_COLORS.get(collective, COLLECTIVE_COLORS["other"])
            seen[collective.replace("_", "-")] = color
            options = {"label": f"_{kind}:{collective}", **style.bar_style(kind, color)}
            ax.barh(y, nbytes / unit_bytes, left=left, height=0.78, **options)
            left += nbytes / unit_bytes
        place = {"textcoords": "offset points", "xytext": (5, 0), "va": "center", "fontsize": 8.5}
        ax.annotate(f"{left:.3g}", (left, y), color=style.INK, **place)
        ticks.append((y, f"{label}, {kind}"))
    ax.set_yticks([t for t, _ in ticks], [name for _, name in ticks])
    ax.set_ylim(y + 0.65, 0.35)
    ax.set_xlim(0, 1.13 * ax.dataLim.x1)
    ax.grid(visible=True, axis="x")
    ax.grid(visible=False, axis="y")
    ax.set_xlabel(f"sent by a rank in one step ({unit})")
    style.legend_above(ax, style.legend_handles(seen, style.kind_handles(kinds, bars=True), bars=True))
    return ax
