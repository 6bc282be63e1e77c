"""Gaps: places of a script that its learner writes, marked in the file.

        # gap 02.a: the mean of each gradient over the ranks
        for weight in model.parameters():
            ...
        # end of gap 02.a

A text is `collapsed` while cells change it: each gap is its first line alone, so nothing that is
written in a gap can be taken for another line of the script. `expanded` puts the lines back.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass

from aiscale.lesson.notebook import LessonError

_FIRST = re.compile(r"^(?P<indent> *)# gap (?P<id>\d\d\.[a-z]): ")
_BY_KIT = ", filled in by the kit"


@dataclass(frozen=True)
class Filling:
    """What stands in a gap."""

    lines: str  #: without the indentation of the gap
    by_kit: bool = False  #: the kit's own lines, so that what follows can run


def collapsed(text: str) -> tuple[str, dict[str, Filling]]:
    """(the text with each gap as its first line, what stands in those that are filled)."""
    kept: list[str] = []
    fillings: dict[str, Filling] = {}
    lines = iter(text.splitlines())
    for line in lines:
        kept.append(line)
        gap = _FIRST.match(line)
        if gap and _last_line(gap["id"]) in text:
            inside, last = _inside(lines, _last_line(gap["id"]))
            written = textwrap.dedent("\n".join(inside))
            if written.strip() != _stub(gap["id"]):
                fillings[gap["id"]] = Filling(written, by_kit=last.endswith(_BY_KIT))
    return "".join(f"{line}\n" for line in kept), fillings


def _inside(lines, last_line: str) -> tuple[list[str], str]:
    inside: list[str] = []
    for line in lines:
        if line.strip().startswith(last_line):
            return inside, line
        inside.append(line)
    raise LessonError(f"the line `{last_line}` is gone: run the cell that writes this gap again")


def expanded(text: str, fillings: Mapping[str, Filling], marks: bool = True) -> str:
    """The text with its gaps, filled as far as `fillings` go; without `marks` none is seen."""
    written: list[str] = []
    for line in text.splitlines():
        gap = _FIRST.match(line)
        if not gap:
            written.append(line)
            continue
        id, indent = gap["id"], gap["indent"]
        filling = fillings.get(id, Filling(_stub(id)))
        inside = textwrap.indent(filling.lines, indent).splitlines()
        last = f"{indent}{_last_line(id)}{_BY_KIT if filling.by_kit else ''}"
        written += [line, *inside, last] if marks else inside
    return "".join(f"{line}\n" for line in written)


def gaps_in(text: str) -> list[str]:
    """The ids of a text's gaps."""
    found = (_FIRST.match(line) for line in text.splitlines())
    return [gap["id"] for gap in found if gap]


def without_marks(text: str) -> str:
    """The script as it is without the lines that mark gaps."""
    short, fillings = collapsed(text)
    return expanded(short, fillings, marks=False)


def with_gap(text: str, gap_line: str, solution: str) -> str:
    """A collapsed text in which these lines are a gap again, if they stand there once."""
    indent = _FIRST.match(gap_line)["indent"]
    lines = textwrap.indent(solution.rstrip("\n") + "\n", indent)
    return text.replace(lines, f"{gap_line}\n") if text.count(lines) == 1 else text


def written_in(cell: str, id: str) -> str:
    """The lines of a cell that fill a gap; nothing, if it holds comments alone.

    Raises LessonError if they are no Python.
    """
    lines = textwrap.dedent(cell).strip("\n")
    try:
        statements = ast.parse(lines).body
    except SyntaxError as error:
        raise LessonError(f"{id}, line {error.lineno} of the cell: {error.msg}") from None
    placeholders = [each for each in statements if ast.unparse(each) == "..."]
    return "" if len(placeholders) == len(statements) else lines


def _stub(id: str) -> str:
    return f'raise NotImplementedError("{id}")'


def _last_line(id: str) -> str:
    return f"# end of gap {id}"
