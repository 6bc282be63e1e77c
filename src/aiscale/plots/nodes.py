"""Machines drawn from the catalogue.

plots.node(machines.find_machine("frontier"))        # devices, packages, links and adapters, and how fast each is
plots.dragonfly(machines.find_machine("frontier"))   # groups of nodes, all joined with each other
"""

from __future__ import annotations

from itertools import combinations
from math import cos, pi, sin

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch

from aiscale.config import ConfigError
from aiscale.machines import Machine
from aiscale.plots import style

_DEVICE, _MATE, _LINK, _NIC = (style.RANK_COLORS[i] for i in (0, 6, 2, 4))
_BOX = 0.56  #: half of a device's width


def node(machine: Machine) -> np.ndarray:
    """The devices of one node and what joins them (left), and what a device reaches at which speed (right).

    Drawn is what the catalogue knows: packages (mate_gb_s), links between all pairs (pair_gb_s), or else one ring
    (ring_gb_s); of links without a figure nothing. Returns both Axes.
    """
    inside = machine.node
    _, axes = plt.subplots(1, 2, figsize=(8.2, 3.7), width_ratios=(1.55, 1), layout="constrained")
    places = _places(inside.devices)
    ring = list(zip(places, places[1:] + places[:1], strict=True)) if inside.devices > 2 else [tuple(places)]
    if inside.devices > 1 and inside.pair_gb_s:
        for a, b in combinations(places, 2):
            past = a[1] == b[1] and abs(places.index(a) - places.index(b)) > 1  # a line would pass through others
            _link(axes[0], a, b, _LINK, inside.pair_gb_s, 0.32 * past * (1 if a[1] else -1))
    elif inside.devices > 1 and inside.ring_gb_s:
        for a, b in ring:
            _link(axes[0], a, b, _LINK, inside.ring_gb_s)
    if inside.mate_gb_s:
        for a, b in zip(places[::2], places[1::2], strict=False):
            _package(axes[0], a, b)
            _link(axes[0], a, b, _MATE, inside.mate_gb_s)
    for number, place in enumerate(places):
        _box(axes[0], place, _BOX, _DEVICE, str(number))
    _adapters(axes[0], machine, max(x for x, _ in places))
    _reach(axes[1], machine)
    axes[0].set_title(f"{inside.devices} × {inside.accelerator.name.upper()}", fontsize=10, color=style.INK)
    return axes


def _places(devices: int) -> list[tuple[float, float]]:
    """Two rows, numbered around: a ring through all of them crosses nothing."""
    top, gap = (devices + 1) // 2, 2.0 if devices > 4 else 3.2
    above = [(i * gap, 2.0 if devices > 1 else 1.0) for i in range(top)]
    return above + [((top - 1 - i) * gap, 0.0) for i in range(devices - top)]


def _box(ax: Axes, center: tuple[float, float], half: float, color: str, text: str, height: float = 0.0) -> None:
    x, y = center
    high = height or half
    shape = "round,pad=0,rounding_size=0.12"
    patch = FancyBboxPatch((x - half, y - high), 2 * half, 2 * high, boxstyle=shape, color=color, zorder=4)
    ax.add_patch(patch)
    ax.text(x, y, text, ha="center", va="center", color=style.text_color(color), fontsize=9.5, zorder=5)


def _package(ax: Axes, a: tuple[float, float], b: tuple[float, float]) -> None:
    left, right = sorted((a[0], b[0]))
    box = (left - 0.78, min(a[1], b[1]) - 0.78), right - left + 1.56, abs(a[1] - b[1]) + 1.56
    shape = "round,pad=0,rounding_size=0.25"
    ax.add_patch(FancyBboxPatch(*box, boxstyle=shape, facecolor=style.tint(_MATE, 0.16), edgecolor="none", zorder=1))


def _link(ax: Axes, a: tuple, b: tuple, color: str, gb_s: float, bend: float = 0.0) -> None:
    """A line whose width grows with the root of the bandwidth."""
    way = {"arrowstyle": "-", "connectionstyle": f"arc3,rad={bend}", "linewidth": 0.4 * gb_s**0.5}
    ax.add_patch(FancyArrowPatch(a, b, color=color, zorder=1 if bend else 2, **way))


def _adapters(ax: Axes, machine: Machine, right: float) -> None:
    """The frame of the node, its network adapters across the edge, and the network below."""
    shape = "round,pad=0,rounding_size=0.3"
    frame = ((-1.1, -1.75), right + 2.2, 4.85)
    ax.add_patch(FancyBboxPatch(*frame, boxstyle=shape, facecolor="none", edgecolor=style.MUTED, linewidth=1.2))
    nics = machine.network.nics or 0
    for i in range(nics):
        x = -0.9 + (right + 1.8) * (i + 0.5) / nics
        ax.plot([x, x], [-1.75, -2.75], color=_NIC, linewidth=0.4 * (machine.network.nic_gb_s or 1) ** 0.5 + 0.6)
        _box(ax, (x, -1.75), min(0.52, 0.42 * (right + 1.8) / nics), _NIC, "NIC", 0.3)
    if nics:
        bar = ((-1.1, -3.25), right + 2.2, 0.55)
        ax.add_patch(FancyBboxPatch(*bar, boxstyle=shape, facecolor=style.tint(_NIC, 0.16), edgecolor="none"))
        text = (machine.network.topology or machine.network.name).replace("+", " +")
        ax.text(right / 2, -2.98, text, ha="center", va="center", fontsize=9, color=style.INK)
    ax.set_xlim(-1.4, right + 1.4)
    ax.set_ylim(-3.5 if nics else -2.0, 3.35)
    style.bare(ax)


def _reach(ax: Axes, machine: Machine) -> None:
    """One-directional bandwidth to memory, package, node and network, on a logarithmic axis."""
    inside, network = machine.node, machine.network
    share = network.injection_bytes_s and network.injection_bytes_s / 1e9 / inside.devices
    speeds = [
        ("its own memory", inside.accelerator.memory_tb_s and 1000 * inside.accelerator.memory_tb_s, _DEVICE),
        ("its mate in the package", inside.mate_gb_s, _MATE),
        ("each other device", inside.pair_gb_s, _LINK),
        ("around the ring", None if inside.pair_gb_s else inside.ring_gb_s, _LINK),
        ("the network, its share", share, _NIC),
    ]
    known = [(name, speed, color) for name, speed, color in speeds if speed]
    if not known:
        raise ConfigError(f"{machine.name}: the catalogue has no bandwidth to draw")
    for y, (name, speed, color) in enumerate(known):
        ax.barh(y, speed, color=color, height=0.42)
        ax.text(1, y - 0.34, name, fontsize=9, color=style.INK, va="bottom")
        ax.text(speed * 1.15, y, f"{speed:,.4g}", fontsize=9, color=style.INK, va="center")
    ax.set(
        xscale="log", xlim=(1, 9e3), ylim=(len(known) - 0.4, -0.75), yticks=[], xlabel="GB/s from one device, nominal"
    )
    ax.spines["left"].set_visible(False)
    style.for_bars(ax)


def dragonfly(machine: Machine, drawn: int = 12, *, ax: Axes | None = None) -> Axes:
    """Groups of nodes in a circle, every group joined with every other; at most `drawn` of them."""
    network = machine.network
    if network.topology not in ("dragonfly", "dragonfly+") or not (network.group_nodes and machine.nodes):
        raise ConfigError(f"{machine.name}: the catalogue knows no dragonfly of it: its topology is {network.topology}")
    groups = -(-machine.nodes // network.group_nodes)
    ax, shown = style.new_axes(ax, 4.6, 4.2), min(groups, drawn)
    centers = [(5 * sin(2 * pi * i / shown), 5 * cos(2 * pi * i / shown)) for i in range(shown)]
    dots = np.array([(x, y) for x in range(-3, 4) for y in range(-3, 4) if x * x + y * y < 9.5])
    for a, b in combinations(centers, 2):
        ax.plot(*zip(a, b, strict=True), color=style.tint(_NIC, 0.45), linewidth=0.7, zorder=1)
    for center in centers:
        ax.add_patch(Circle(center, 0.98, facecolor=style.PAPER, edgecolor=_NIC, linewidth=1.3, zorder=2))
        ax.scatter(
            *zip(*((center[0] + 0.24 * x, center[1] + 0.24 * y) for x, y in dots), strict=True),
            s=3,
            color=_DEVICE,
            zorder=3,
        )
    few = f"{shown} of them drawn" if shown < groups else ""
    text = f"{groups} groups of\n{network.group_nodes} nodes" + f"\n{few}" * bool(few)
    ax.text(0, 0, text, ha="center", va="center", fontsize=9, color=style.INK, zorder=4)
    ax.texts[-1].set_bbox({"facecolor": style.PAPER, "edgecolor": "none", "boxstyle": "round,pad=0.5"})
    ax.set(xlim=(-6.3, 6.3), ylim=(-6.3, 6.3))
    style.bare(ax)
    return ax
