"""The core path of a notebook, its cells that are not tagged `optional`, and the minutes that a path takes someone.

    place(cells, "The ring")                         # -> 33: the index of the cell with this heading
    pace = measure(notebook.cells, core=True)        # -> Pace(words=2310, lines=241, figures=6, predictions=5, ...)
    pace.minutes                                     # words / 100 + lines / 8 + figures + predictions + its cells' time

An optional section is optional as a whole, its heading included, which ends with "(optional)"; it ends at the next
heading of its level or above. A core section may have optional subsections. What is counted:

- words: of prose, without code blocks, HTML tags, addresses and marks; a formula is one word, as is a `name`
- lines: of code, without blank lines, comments, magics, imports and parameters, which nobody studies line by line
- figures: cells that draw (`plots.`, `plt.`), and images in prose
- predictions: calls of `predict`
- seconds: of the last run on the same path, if given, else 40
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiscale.book.notebook import BookError, tags
from aiscale.config import hint

if TYPE_CHECKING:
    from nbformat import NotebookNode

TAG, SUFFIX = "optional", "(optional)"
_HEADING = re.compile(r"^(#{1,6}) +(.*?)\s*$", re.M)
_FENCED = re.compile(r"^```.*?^```", re.M | re.S)
DRAWS = re.compile(r"\b(plots|plt)\.(?!use_style|close|format_|set_loglevel)\w+\(")
PREDICTS = re.compile(r"(?<![.\w])predict\(")
RUN_S = 40.0
_IMAGE = re.compile(r"!\[[^\]]*\]\([^)]*\)|<img\b[^>]*>|<svg\b.*?</svg>", re.S)
_FORMULA = re.compile(r"\$\$.+?\$\$|\$[^$\n]+\$", re.S)
_UNREAD = re.compile(r"^```.*?^```|<[^>]+>|\]\([^)]*\)|https?://\S+", re.M | re.S)
_UNSTUDIED = re.compile(r"\s*(#|[%!]|import |from \S+ import |$)")


def is_optional(cell: NotebookNode) -> bool:
    return TAG in tags(cell)


def headings(cell: NotebookNode) -> list[tuple[int, str]]:
    """(level, text) of the headings in a cell of prose."""
    text = _FENCED.sub("", cell.source) if cell.cell_type == "markdown" else ""
    return [(len(marks), title) for marks, title in _HEADING.findall(text)]


def place(cells: Sequence[NotebookNode], section: str) -> int:
    """The index of the cell with this heading, case and "(optional)" aside; raises BookError if there is none."""
    found: dict[str, int] = {}
    for index, cell in enumerate(cells):
        for depth, title in headings(cell):
            if depth > 1:
                found.setdefault(title.removesuffix(SUFFIX).strip(), index)
    wanted = section.removesuffix(SUFFIX).strip().casefold()
    if (index := next((index for title, index in found.items() if title.casefold() == wanted), None)) is not None:
        return index
    there = [repr(title) for title in found]
    others = f"there are {', '.join(there)}"
    raise BookError(f"no section is called {section!r}: {hint(repr(section), there, others)}")


# minutes ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pace:
    words: int
    lines: int
    figures: int
    predictions: int
    seconds: float

    @property
    def minutes(self) -> int:
        return round(self.words / 100 + self.lines / 8 + self.figures + self.predictions + self.seconds / 60)

    def describe(self) -> str:
        text = f"{self.words} words, {self.lines} lines of code, {self.figures} figures, "
        return f"{text}{self.predictions} predictions, {self.seconds:.0f} s to run"


def measure(cells: Sequence[NotebookNode], core: bool, seconds: float | None = None) -> Pace:
    """What the cells hold: all, or the core path alone."""
    chosen = [cell for cell in cells if not (core and is_optional(cell))]
    prose = "\n".join(cell.source for cell in chosen if cell.cell_type == "markdown")
    code = [cell.source for cell in chosen if cell.cell_type == "code" and "parameters" not in tags(cell)]
    text = _UNREAD.sub(" ", _FORMULA.sub(" formula ", _IMAGE.sub(" ", re.sub(r"`[^`\n]+`", "name", prose))))
    return Pace(
        words=sum(any(map(str.isalnum, word)) for word in text.split()),
        lines=sum(not _UNSTUDIED.match(line) for source in code for line in source.splitlines()),
        figures=sum(bool(DRAWS.search(source)) for source in code) + len(_IMAGE.findall(prose)),
        predictions=sum(len(PREDICTS.findall(source)) for source in code),
        seconds=RUN_S if seconds is None else seconds,
    )
