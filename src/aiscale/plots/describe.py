"""A figure in words, for those who do not see it: what its axes are, what its legend and its labels say.

    describe(ax.figure)    # -> "Lines. Across: ranks, 1 to 4. Up: speed-up (times), 0 to 4. Shown: ddp, ideal."

`plots.use_style()` lets a notebook keep these words in the metadata of each figure's output, from where the gallery and
the slides take their alternative text.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.container import BarContainer
from matplotlib.figure import Figure

_MOST_WORDS = 40  #: of a drawing's labels
_MOST_CATEGORIES = 9
_MATH = re.compile(r"\\math\w+|[${}\\]")


def describe(figure: Figure) -> str:
    """One to a few sentences, from what is written in the figure."""
    panels = [ax for ax in figure.axes if ax.get_visible() and ax.get_label() != "<colorbar>"]
    said: set[str] = set()  # panels share most of their labels
    parts = dict.fromkeys(part for ax in panels for part in _panel(ax, said))
    legends = [*figure.legends, *filter(None, (ax.get_legend() for ax in panels))]
    shown = _joined(text.get_text() for legend in legends for text in legend.get_texts())
    lead = [f"{len(panels)} panels"] if len(panels) > 1 else []
    return ". ".join([*lead, *parts, *([f"Shown: {shown}"] if shown else [])] or ["An empty figure"]) + "."


def keep_descriptions() -> None:
    """In a notebook: put the description of each figure that is shown into its output's metadata."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell:
        shell.display_formatter.mimebundle_formatter.for_type(
            Figure, lambda figure, **_: ({}, {"image/png": {"alt": describe(figure)}})
        )


def _panel(ax: Axes, said: set[str]) -> Iterable[str]:
    title = _joined(ax.get_title(loc=place) for place in ("left", "center", "right"))
    if title:
        yield title
    axes = [(name, axis) for name, axis in (("Across", ax.xaxis), ("Up", ax.yaxis)) if ax.axison and _is_read(axis)]
    if axes:
        yield _kind(ax)
        for name, axis in axes:
            yield f"{name}: {_axis(axis)}"
    words = dict.fromkeys(_plain(text.get_text()) for text in ax.texts)
    labels = [word for word in words if re.search(r"[^\W\d_]{2}", word) and word not in said]  # numbers are the data's
    said.update(labels)
    if labels:
        yield f"{'Labels' if axes else 'A drawing, labelled'}: {_short('; '.join(labels))}"
    elif not axes and not words and not title:
        yield "A drawing without words"


def _kind(ax: Axes) -> str:
    bars = any(isinstance(container, BarContainer) for container in ax.containers)
    images = bool(ax.images) or any(type(c).__name__ == "QuadMesh" for c in ax.collections)
    kinds = {"bars": bars, "lines": bool(ax.lines), "a map of colours": images}
    return (" and ".join(kind for kind, there in kinds.items() if there) or "shapes").capitalize()


def _is_read(axis: Axis) -> bool:
    return axis.get_visible() and bool(axis.get_label_text() or _ticks(axis))


def _ticks(axis: Axis) -> list[str]:
    low, high = sorted(axis.get_view_interval())
    ticks = zip(axis.get_majorticklocs(), axis.get_ticklabels(), strict=False)
    said = [_plain(label.get_text()) for place, label in ticks if low <= place <= high and label.get_visible()]
    return [text for text in said if text]


def _axis(axis: Axis) -> str:
    ticks = _ticks(axis)
    named = any(not re.match(r"[-−+]?\d", tick) for tick in ticks)
    few = named and len(ticks) <= _MOST_CATEGORIES
    values = "; ".join(ticks) if few else f"{ticks[0]} to {ticks[-1]}" if ticks else ""
    return ", ".join(filter(None, (_plain(axis.get_label_text()), values)))


def _joined(texts: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(filter(None, map(_plain, texts))))


def _plain(text: str) -> str:
    return " ".join(_MATH.sub("", text).split()).rstrip(".,")


def _short(text: str) -> str:
    words = text.split()
    return " ".join(words[:_MOST_WORDS]) + (" …" if len(words) > _MOST_WORDS else "")
