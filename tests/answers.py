"""What a lesson measures is what `answers.toml` says, and no answer stands before its question.

    content = read("build/notebooks/03_ddp.ipynb")
    wrong_answers(content, "03_ddp")    # -> ["'speed-up of 4 ...' is 0.5, but the ..."]
    given_away(content)                 # -> [(12, "the answer to 'bytes of a step', ...")]
    told_beside(content, "03_ddp")      # -> ["'messages ...': '# 4 of them' says 4"]

tests/test_notebooks.py asks this of every lesson that it ran. `predict` and `.against(...)` leave
the name and what was measured in their outputs' metadata; every number of three or more significant
digits in or above the cell of `predict`, in source or output, is compared with it, in any unit
(4,096; 4.00 KiB). What differs from run to run (seconds, rates, ratios of times, and fractions that
a cell printed) may share three digits by chance, so four are asked for. `told_beside` needs no run:
it takes exact answers, and choices of several words, from answers.toml, and looks for them,
whatever their digits, in the headings and comments of the section.
"""

from __future__ import annotations

import ast
import math
import re
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from aiscale.lesson.notebook import tags

if TYPE_CHECKING:
    from nbformat import NotebookNode

_PREFIXES = {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SCALES = {
    "bytes": {p + "B": n for p, n in _PREFIXES.items()}
    | {p + "iB": 2.0 ** (10 * i) for i, p in enumerate("KMGT", 1)},
    "s": {"ms": 1e-3, "µs": 1e-6, "us": 1e-6, "min": 60.0},
    "": {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12},
}
_NUMBER = re.compile(
    r"(?<![\w.])((?:\d{1,3}(?:[,_]\d{3})+|\d+)(?:\.\d+)?(?:[eE][+-]?\d+)?)(?![\d,_.]*\d)"
    r"(?:[ \u00a0]?([A-Za-zµ]+))?"
)
_DIGITS, _NOISY_DIGITS = 3, 4
_SCRIPT = re.compile(r"%%(write|change) ")
ANSWERS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def wrong_answers(content: NotebookNode, lesson: str) -> list[str]:
    """A line for each prediction, but for grids, whose measured answer is not answers.toml's."""
    found = []
    for cell in content.cells:
        for facts in _facts(cell):
            if "against" not in facts or "measured" not in facts:
                continue
            name, measured = facts["against"], facts["measured"]
            for known, answer in ANSWERS.get(lesson, {}).items():
                if fnmatchcase(name, known) and not _is(measured, answer):
                    found.append(f"{name!r} is {measured!r}, but answers.toml says {answer!r}")
    return found


def _is(measured: object, answer: object) -> bool:
    if not isinstance(answer, list):
        return measured == answer or (
            not isinstance(answer, str) and math.isclose(measured, answer, rel_tol=1e-3)
        )
    if isinstance(answer[0], str):
        return measured in answer
    low, high = answer
    return low <= measured <= high


def given_away(content: NotebookNode) -> list[tuple[int, str]]:
    """(cell of `predict` in the source, a line) for each prediction with its answer above it."""
    cells = [cell for cell in content.cells if "injected-parameters" not in tags(cell)]
    asked: dict[str, int] = {}  # name: place of the cell
    found = []
    for place, cell in enumerate(cells):
        for facts in _facts(cell):
            if "predict" in facts:
                asked[facts["predict"]] = place
            elif facts.get("kind") == "number" and facts["against"] in asked:
                name, value, unit = facts["against"], facts["measured"], facts["unit"]
                where = _first(cells[: asked[name] + 1], value, unit)
                if where:
                    answer = f"{value} {unit}".strip()
                    said = f"the answer to {name!r}, {answer}, stands above it: {where}"
                    found.append((asked[name] + 1, said))
    return found


def predictions(cell: NotebookNode) -> Iterator[tuple[str, dict[str, str]]]:
    """Name and keywords of each `predict` in a cell. An f-string's name is a pattern."""
    if cell.cell_type != "code" or _SCRIPT.match(cell.source):
        return
    whole = cell.source.replace("\\\n", "").splitlines()
    lines = [line for line in whole if not re.match(r"\s*([%!]|\w+ = !)", line)]
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "predict":
            name = re.sub(r"\{[^}]*\}", "*", ast.unparse(node.args[0]).removeprefix("f"))[1:-1]
            yield name, {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}


def told_beside(content: NotebookNode, lesson: str) -> list[str]:
    """A line for each heading or comment that answers a prediction of its section."""
    found, aside = [], []
    for cell in content.cells:
        for line in _asides(cell):
            if line.startswith("## "):
                aside = []
            aside.append(line)
        for name, options in predictions(cell):
            for known, answer in ANSWERS[lesson].items():
                if fnmatchcase(known, name) and not isinstance(answer, list):
                    unit = options.get("unit", "''")[1:-1]
                    told = [line for line in aside if _tells(line, answer, unit)]
                    found += [f"{known!r}: {line!r} says {answer}" for line in told]
    return found


def _asides(cell: NotebookNode) -> list[str]:
    """Headings as they are, and comments with one mark, so that none begins a section."""
    if cell.cell_type == "markdown":
        blocks = re.split("^```.*\n", cell.source, flags=re.M)
        headings = [line for text in blocks[::2] for line in re.findall("^#+ .*", text, flags=re.M)]
        return headings + [line for text in blocks[1::2] for line in _comments(text)]
    return _comments(cell.source)


def _comments(code: str) -> list[str]:
    return ["# " + text for text in re.findall(r"#+:? (.*)", code)]


def _tells(line: str, answer: object, unit: str) -> bool:
    if isinstance(answer, str):
        return " " in answer and answer.lower() in line.lower()  # one word is often a label
    numbers = _NUMBER.findall(line)
    return any(_equal(*number, answer, unit, varies=False, least=1) for number in numbers)


def _facts(cell: NotebookNode) -> Iterator[dict]:
    return (output.get("metadata", {}).get("aiscale", {}) for output in cell.get("outputs", []))


def _first(cells: list[NotebookNode], value: float, unit: str) -> str:
    """The first cell that shows the value, and how; empty if none does."""
    for number, cell in enumerate(cells, 1):
        for text in (cell.source, *_shown(cell)):
            varies = not isinstance(value, int) and text is not cell.source
            for literal, suffix in _NUMBER.findall(text):
                if _equal(literal, suffix, value, unit, varies):
                    return f"cell {number} shows {literal} {suffix}".rstrip()
    return ""


def _shown(cell: NotebookNode) -> Iterator[str]:
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        yield output.get("text", "")
        yield (
            data.get("text/plain", "")
            if "text/html" not in data
            else re.sub(r"<[^>]*>", " ", data["text/html"])
        )
        yield data.get("text/markdown", "")


def _equal(
    literal: str, suffix: str, value: float, unit: str, varies: bool, least: int = _DIGITS
) -> bool:
    """Whether a number with this suffix says the value, to the digits that it has."""
    text = literal.replace(",", "").replace("_", "")
    mantissa = re.split("[eE]", text)[0]
    digits = len(mantissa.replace(".", "").lstrip("0"))
    noisy = varies or unit == "s" or "/s" in unit or unit.startswith("times")
    if digits < (_NOISY_DIGITS if noisy else least) or not value:
        return False
    scale = _SCALES.get(unit, _SCALES[""]).get(suffix, 1.0)
    decimals = len(mantissa.partition(".")[2]) - (
        int(re.split("[eE]", text)[1]) if len(mantissa) < len(text) else 0
    )
    said = float(text) * scale
    exact = digits < _DIGITS or isinstance(value, int) and scale == 1.0 and "." not in text
    return (
        said == value
        if exact
        else math.isclose(said, value, rel_tol=0, abs_tol=0.5000001 * 10.0**-decimals * scale)
    )
