"""The house style: one colour per strategy, rank and kind of memory, and three distinct marks.

    measured    filled circles on a solid line, a solid bar      ours, by running it
    predicted   a dashed line without marks, a pale dashed bar   from `cost`
    published   hollow diamonds without a line, an empty bar     by others, source in the legend

The palettes are distinguishable under simulated protanopia, deuteranopia and tritanopia, which a
test checks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from itertools import cycle

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_hex, to_rgb
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import FancyBboxPatch, Patch
from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullLocator

STRATEGY_COLORS = {
    "serial": "#374452",
    "mpi": "#F2BE22",
    "ddp": "#3B79D1",
    "zero1": "#A9E2B6",
    "zero2": "#4BB390",
    "zero3": "#356F46",
    "fsdp": "#BC458F",
    "tp": "#F76A0C",
    "pp": "#5C0509",
    "megatron": "#6E29A8",
    "radius": "#63CBFD",
}
#: Colour of a compression method; a label takes that of the longest name it starts with.
METHOD_COLORS = {
    "dense": STRATEGY_COLORS["serial"],
    "dense, overlapped": STRATEGY_COLORS["ddp"],
    "dense bf16": "#8A94A3",
    "dense bf16, overlapped": STRATEGY_COLORS["fsdp"],
    "radius": STRATEGY_COLORS["radius"],
    "radius d 0.9": "#9AA5E8",
    "radius d 0.5": "#1F6FB5",
    "radius d 0.4": STRATEGY_COLORS["radius"],
    "radius d 0.1": "#E8862E",
    "top-k": STRATEGY_COLORS["zero3"],
    "random-k": STRATEGY_COLORS["mpi"],
    "powersgd": STRATEGY_COLORS["megatron"],
}
_NAMED = STRATEGY_COLORS | METHOD_COLORS
#: Variants of one method also differ in line, all labels of a figure in marker (filled: measured).
_LINES = ("-", ":", "-.", (0, (3, 1, 1, 1, 1, 1)))
_MARKERS = ("o", "s", "^", "v", "P", "X", "<", ">")
#: Colour of a rank and of the data that comes from it.
RANK_COLORS = (
    "#0068B8",
    "#FAC62D",
    "#60B4A1",
    "#AB2C4E",
    "#572D88",
    "#ADE0FC",
    "#D96709",
    "#7C828A",
)
#: Colour of a kind of memory; names are those of `cost.CATEGORIES` and of an engine's `tensors()`.
MEMORY_COLORS = {
    "parameters": "#34548F",
    "gradients": "#F0AF00",
    "optimizer states": "#1E8843",
    "weight casts": "#7AB9EE",
    "activations": "#BC6EA3",
    "buffers": "#24272D",
    "other": "#D5D8DD",
}
#: Colour of an event on a timeline.
EVENT_COLORS = {
    "forward": "#7AB9EE",
    "backward": "#0068B8",
    "weights": "#F2BB2D",  # weight-gradient half of a backward pass, delayed by zero-bubble
    "communication": "#D96709",
    "optimizer": "#572D88",
    "data": "#A5ABB5",
    "wait": "#E3E6EA",
}
INK, MUTED, FAINT, PAPER = "#2B313B", "#6B7380", "#D5D8DD", "#FFFFFF"
KINDS = ("measured", "predicted", "published")


def use_style() -> None:
    """Switch matplotlib to the house style."""
    plt.style.use(str(resources.files("aiscale.measure.plots") / "aiscale.mplstyle"))


def new_axes(ax: Axes | None, width: float = 7.5, height: float = 3.6) -> Axes:
    """`ax`, or the axes of a new figure of width x height inches."""
    return ax if ax is not None else plt.subplots(figsize=(width, height), layout="constrained")[1]


def series_colors(labels: Iterable[str]) -> dict[str, str]:
    """A colour for each label.

    That of the strategy or method that it starts with ("ddp x4", "radius d 0.4, bf16"), else the
    next of the cycle. Further labels of one name get other shades.
    """
    spare = cycle(entry["color"] for entry in plt.rcParams["axes.prop_cycle"])
    colors: dict[str, str] = {}
    for label in labels:
        name = named(label)
        base = _NAMED[name] if name else next(spare)
        others = (
            [0.62 * c for c in to_rgb(base)],
            [0.4 * c for c in to_rgb(base)],
            tint(base, 0.5),
        )
        shades = (base, *map(to_hex, others))
        colors[label] = next((shade for shade in shades if shade not in colors.values()), base)
    return colors


def named(label: str) -> str:
    """The longest name of a strategy or method that a label starts with; empty if there is none."""
    names = (name for name in _NAMED if re.match(rf"{re.escape(name)}(?![\w.])", label.lower()))
    return max(names, key=len, default="")


def method_looks(labels: Iterable[str]) -> dict[str, dict]:
    """Colour, line style and marker of each label: in greyscale, colours alone do not suffice."""
    looks, count = {}, {}
    for i, (label, color) in enumerate(series_colors(labels).items()):
        name = named(label) or label
        line = _LINES[count.get(name, 0) % len(_LINES)]
        count[name] = count.get(name, 0) + 1
        looks[label] = {"color": color, "linestyle": line, "marker": _MARKERS[i % len(_MARKERS)]}
    return looks


def tint(color: str, strength: float) -> tuple[float, float, float]:
    """`color` mixed with white; strength 1 is the colour, 0 white."""
    return tuple(1 - strength * (1 - channel) for channel in to_rgb(color))


def text_color(background: str | Sequence[float]) -> str:
    """Ink or white, whichever has more contrast on `background` (WCAG's formula)."""
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(background)
    ]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return PAPER if luminance < 0.22 else INK


# The three marks ---------------------------------------------------------------------------------

_LINE = {
    "measured": {"marker": "o", "linestyle": "-", "zorder": 3},
    "predicted": {"marker": "", "linestyle": "--", "zorder": 2},
    "published": {
        "marker": "D",
        "linestyle": "",
        "markerfacecolor": PAPER,
        "markeredgewidth": 1.4,
        "zorder": 4,
    },
}


def draw(
    ax: Axes, kind: str, x: Sequence[float], y: Sequence[float], color: str = INK, **options
) -> Line2D:
    """Draw a series of points in the style of `kind` (one of KINDS); options go to Axes.plot."""
    style = {"color": color, **_LINE[kind], **options}
    if kind == "measured":
        style = {"markeredgecolor": PAPER, "markeredgewidth": 0.8, **style}
    return ax.plot(x, y, label=f"_{kind}", **style)[0]


def bar_style(kind: str, color: str) -> dict:
    """Options for Axes.bar and barh that give a bar the style of its kind."""
    if kind == "measured":
        return {"facecolor": color, "edgecolor": PAPER, "linewidth": 0.8}
    if kind == "predicted":
        return {
            "facecolor": tint(color, 0.45),
            "edgecolor": color,
            "linewidth": 1.4,
            "linestyle": (0, (3, 2)),
        }
    return {"facecolor": PAPER, "edgecolor": color, "linewidth": 1.3}


def kind_handles(kinds: Iterable[str], source: str = "", bars: bool = False) -> list:
    """Legend entries that explain the marks; `source` names the publication."""
    handles = []
    for kind in KINDS:
        if kind not in set(kinds):
            continue
        label = f"published ({source})" if kind == "published" and source else kind
        line = Line2D([], [], color=MUTED, label=label, **_LINE[kind])
        bar = Patch(label=label, **bar_style(kind, MUTED))
        # A published bar ends in a diamond, so its entry has one too.
        handles.append(line if not bars else (bar, line) if kind == "published" else bar)
    return handles


def legend_handles(series: Mapping[str, str], more: Iterable = (), bars: bool = False) -> list:
    """Legend entries of {label: colour}, then `more`."""
    colored = []
    for label, color in series.items():
        if bars:
            colored.append(Patch(facecolor=color, label=label))
        else:
            colored.append(Line2D([], [], color=color, linewidth=3, label=label))
    return [*colored, *more]


def legend_above(ax: Axes, handles: Sequence):
    """A legend above the axes, in as few lines as fit, read from left to right."""
    if not handles:
        return None
    figure = ax.figure
    alone = figure.axes == [ax] and isinstance(figure.get_layout_engine(), ConstrainedLayoutEngine)
    room = figure.get_figwidth() * (1 if alone else ax.get_position().width)
    labels = [
        (handle[0] if isinstance(handle, tuple) else handle).get_label() for handle in handles
    ]
    columns = _columns(labels, room)
    # matplotlib fills columns from top to bottom; with this order rows read from left to right.
    order = [i for column in range(columns) for i in range(column, len(handles), columns)]
    handles, labels = [handles[i] for i in order], [labels[i] for i in order]
    if alone:
        return figure.legend(handles, labels, ncols=columns, loc="outside upper left")
    return ax.legend(
        handles, labels, ncols=columns, loc="lower left", bbox_to_anchor=(0, 1.02), borderaxespad=0
    )


def _columns(labels: Sequence[str], room: float) -> int:
    """Legend columns that fit, in rows of even length.

    About 0.058 inches per letter, 0.55 for handle and gap.
    """
    widths = [0.058 * len(label) + 0.55 for label in labels]
    for columns in range(len(labels), 0, -1):
        if sum(max(widths[column::columns]) for column in range(columns)) <= room:
            rows = -(-len(labels) // columns)
            return -(-len(labels) // rows)
    return 1


# Units on axes -----------------------------------------------------------------------------------


def format_bytes(nbytes: float, digits: int = 3) -> str:
    """1536 -> '1.5 KiB'; `digits` significant ones."""
    if nbytes == 0:
        return "0"
    unit_bytes, unit = memory_unit(abs(nbytes))
    return f"{_significant(nbytes / unit_bytes, digits)} {unit}"


def memory_unit(largest: float) -> tuple[int, str]:
    """(bytes, name) of the unit in which the largest value is above 1."""
    units = ((2**50, "PiB"), (2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
    return next(((nbytes, name) for nbytes, name in units if largest >= nbytes), (1, "B"))


def format_seconds(seconds: float, digits: int = 3) -> str:
    """0.00025 -> '250 µs'."""
    if seconds == 0:
        return "0"
    units = ((1, "s"), (1e-3, "ms"), (1e-6, "µs"))
    scale, unit = next(
        (unit for unit in units if abs(seconds) >= unit[0] * (1 - 1e-9)), (1e-9, "ns")
    )
    return f"{_significant(seconds / scale, digits)} {unit}"


def format_count(number: float, digits: int = 3) -> str:
    """124439808 -> '124 M'."""
    units = ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k"))
    scale, unit = next((unit for unit in units if abs(number) >= unit[0]), (1, ""))
    return _significant(number / scale, digits) + unit


def _significant(value: float, digits: int) -> str:
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:.0f}"
    return f"{value:.{digits}g}"


def bytes_axis(axis: Axis) -> None:
    """At most seven ticks at powers of two, written as KiB, MiB; called after drawing."""
    first, last = (round(math.log2(end)) for end in axis.get_data_interval())
    step = next(step for step in (1, 2, 5, 10, 20) if (last - first) / step < 7)
    powers = range(-(-first // step) * step, last + 1, step)
    axis.set_major_locator(FixedLocator([2.0**power for power in powers]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: format_bytes(value))


def seconds_axis(axis: Axis) -> None:
    """Ticks of a logarithmic axis written as µs, ms, s: the fewer decades, the more in each.

    Called after drawing.
    """
    low, high = axis.get_data_interval()
    decades = math.log10(high / low)
    subs = (1, 2, 5) if decades < 1.5 else (1, 3) if decades < 3 else (1,)
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(lambda value, _: format_seconds(value))
    axis.set_minor_locator(NullLocator())


def steps_axis(axis: Axis) -> None:
    """Whole numbers only."""
    axis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))


def ranks_axis(axis: Axis, ranks: Sequence[int]) -> None:
    """Ticks at the world sizes that were run."""
    axis.set_major_locator(FixedLocator(sorted(set(ranks))))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: f"{value:g}")


def for_bars(ax: Axes) -> None:
    """A grid for horizontal bars: vertical lines only."""
    ax.grid(visible=True, axis="x")
    ax.grid(visible=False, axis="y")


def rounded(
    ax: Axes, corner: tuple[float, float], width: float, height: float, rounding: float, **look
) -> None:
    """A box with round corners, from its lower left one."""
    box = f"round,pad=0,rounding_size={rounding}"
    ax.add_patch(FancyBboxPatch(corner, width, height, boxstyle=box, **look))


def bare(ax: Axes) -> None:
    """Hide the axes: for diagrams."""
    ax.set_axis_off()
    ax.set_aspect("equal")
