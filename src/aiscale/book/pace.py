"""The minutes that a notebook takes someone who learns, estimated from its text.

    pace = measure(notebook.cells, core=True)        # -> Pace(words=2310, lines=241, figures=6, predictions=5, ...)
    pace.minutes                                     # words / 100 + lines / 8 + figures + predictions + its cells' time

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

from aiscale.book.core import is_optional
from aiscale.book.notebook import tags

if TYPE_CHECKING:
    from nbformat import NotebookNode

DRAWS = re.compile(r"\b(plots|plt)\.(?!use_style|close|format_|set_loglevel)\w+\(")
PREDICTS = re.compile(r"(?<![.\w])predict\(")
RUN_S = 40.0
_IMAGE = re.compile(r"!\[[^\]]*\]\([^)]*\)|<img\b[^>]*>|<svg\b.*?</svg>", re.S)
_FORMULA = re.compile(r"\$\$.+?\$\$|\$[^$\n]+\$", re.S)
_UNREAD = re.compile(r"^```.*?^```|<[^>]+>|\]\([^)]*\)|https?://\S+", re.M | re.S)
_UNSTUDIED = re.compile(r"\s*(#|[%!]|import |from \S+ import |$)")


@dataclass(frozen=True)
class Pace:
    words: int
    lines: int
    figures: int
    predictions: int
    seconds: float

    @property
    def minutes(self) -> int:
        exact = self.words / 100 + self.lines / 8 + self.figures + self.predictions + self.seconds / 60
        return round(exact)

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
