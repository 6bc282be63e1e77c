"""Machines drawn from the catalogue.

plots.node(machines.find_machine("frontier"))        # devices, packages, links and adapters
"""

from __future__ import annotations

from itertools import combinations

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch

from aiscale.machines import Machine
from aiscale.plots import style

_DEVICE, _MATE, _LINK, _NIC = (style.RANK_COLORS[i] for i in (0, 6, 2, 4))
_BOX = 0.56  #: half of a device's width


def node(machine: Machine) -> Axes:
    """The devices of one node and what joins them.

    Drawn is what the catalogue knows: packages (mate_gb_s), links between all pairs (pair_gb_s), or else one ring
    (ring_gb_s); of links without a figure nothing.
    """
    inside, ax = machine.node, style.new_axes(None, 5.0, 3.7)
    places = _places(inside.devices)
    ring = list(zip(places, places[1:] + places[:1], strict=True)) if inside.devices > 2 else [tuple(places)]
    if inside.devices > 1 and inside.pair_gb_s:
        for a, b in combinations(places, 2):
            past = a[1] == b[1] and abs(places.index(a) - places.index(b)) > 1  # a line would pass through others
            _link(ax, a, b, _LINK, inside.pair_gb_s, 0.32 * past * (1 if a[1] else -1))
    elif inside.devices > 1 and inside.ring_gb_s:
        for a, b in ring:
            _link(ax, a, b, _LINK, inside.ring_gb_s)
    if inside.mate_gb_s:
        for a, b in zip(places[::2], places[1::2], strict=False):
            _package(ax, a, b)
            _link(ax, a, b, _MATE, inside.mate_gb_s)
    for number, place in enumerate(places):
        _box(ax, place, _BOX, _DEVICE, str(number))
    _adapters(ax, machine, max(x for x, _ in places))
    ax.set_title(f"{inside.devices} × {inside.accelerator.name.upper()}", fontsize=10, color=style.INK)
    return ax


def _places(devices: int) -> list[tuple[float, float]]:
    """Two rows, numbered around: a ring through all of them crosses nothing."""
    top, gap = (devices + 1) // 2, 2.0 if devices > 4 else 3.2
    above = [(i * gap, 2.0 if devices > 1 else 1.0) for i in range(top)]
    return above + [((top - 1 - i) * gap, 0.0) for i in range(devices - top)]


def _box(ax: Axes, center: tuple[float, float], half: float, color: str, text: str, height: float = 0.0) -> None:
    x, y = center
    high = height or half
    style.rounded(ax, (x - half, y - high), 2 * half, 2 * high, 0.12, color=color, zorder=4)
    ax.text(x, y, text, ha="center", va="center", color=style.text_color(color), fontsize=9.5, zorder=5)


def _package(ax: Axes, a: tuple[float, float], b: tuple[float, float]) -> None:
    left, right = sorted((a[0], b[0]))
    box = (left - 0.78, min(a[1], b[1]) - 0.78), right - left + 1.56, abs(a[1] - b[1]) + 1.56
    style.rounded(ax, *box, 0.25, facecolor=style.tint(_MATE, 0.16), edgecolor="none", zorder=1)


def _link(ax: Axes, a: tuple, b: tuple, color: str, gb_s: float, bend: float = 0.0) -> None:
    """A line whose width grows with the root of the bandwidth."""
    way = {"arrowstyle": "-", "connectionstyle": f"arc3,rad={bend}", "linewidth": 0.4 * gb_s**0.5}
    ax.add_patch(FancyArrowPatch(a, b, color=color, zorder=1 if bend else 2, **way))


def _adapters(ax: Axes, machine: Machine, right: float) -> None:
    """The frame of the node, its network adapters across the edge, and the network below."""
    style.rounded(ax, (-1.1, -1.75), right + 2.2, 4.85, 0.3, facecolor="none", edgecolor=style.MUTED, linewidth=1.2)
    nics = machine.network.nics or 0
    for i in range(nics):
        x = -0.9 + (right + 1.8) * (i + 0.5) / nics
        ax.plot([x, x], [-1.75, -2.75], color=_NIC, linewidth=0.4 * (machine.network.nic_gb_s or 1) ** 0.5 + 0.6)
        _box(ax, (x, -1.75), min(0.52, 0.42 * (right + 1.8) / nics), _NIC, "NIC", 0.3)
    if nics:
        style.rounded(ax, (-1.1, -3.25), right + 2.2, 0.55, 0.3, facecolor=style.tint(_NIC, 0.16), edgecolor="none")
        text = (machine.network.topology or machine.network.name).replace("+", " +")
        ax.text(right / 2, -2.98, text, ha="center", va="center", fontsize=9, color=style.INK)
    ax.set_xlim(-1.4, right + 1.4)
    ax.set_ylim(-3.5 if nics else -2.0, 3.35)
    style.bare(ax)
