"""The core path of a notebook: its cells that are not tagged `optional`.

    check_sections(cells)                        # -> one line for each problem; a part of `aiscale.book.check_form`
    place(cells, "The ring")                     # -> 33: the index of the cell with this heading

An optional section is optional as a whole, its heading included, which ends with "(optional)"; it ends at the next
heading of its level or above. A core section may have optional subsections.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from aiscale.book.notebook import BookError, tags
from aiscale.config import hint

if TYPE_CHECKING:
    from nbformat import NotebookNode

TAG, SUFFIX = "optional", "(optional)"
_HEADING = re.compile(r"^(#{1,6}) +(.*?)\s*$", re.M)
_FENCED = re.compile(r"^```.*?^```", re.M | re.S)

Cells = Sequence[tuple[int, "NotebookNode"]]  #: with their numbers


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


def check_sections(cells: Cells) -> Iterator[str]:
    level, section = 0, ""  # of the optional section that is open
    for number, cell in cells:
        for place, (depth, title) in enumerate(headings(cell)):
            if depth <= level:
                level = 0
            if title.endswith(SUFFIX) and not level:
                level, section = depth, title
                if place or not cell.source.lstrip().startswith("#"):
                    yield f"cell {number} holds the heading {title!r} below other text: begin a cell with it"
        if level and not is_optional(cell):
            yield f"cell {number} is in the section {section!r}, but it is not tagged {TAG}"
        if is_optional(cell) and not level:
            yield f"cell {number} is tagged {TAG}, but the heading of its section does not end with {SUFFIX}"
