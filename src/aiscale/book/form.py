"""Checks the form of the notebooks in notebooks/, and restores it.

    check_form("notebooks/03_ddp.ipynb")    # -> ["cell 7 has 31 lines: at most 25", ...]
    strip("notebooks/03_ddp.ipynb")    # removes outputs, execution counts, editors' metadata; True if the file changed

The form ensures that a notebook runs offline, says what it is, can be read cell by cell, and is committed without
outputs. `aiscale.book.notebook` shows it. Cells are numbered from 1. ruff checks the code, %%px cells included.
"""

from __future__ import annotations

import ast
import copy
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from aiscale.book.core import DRAWS, SUFFIX, TAG, headings, is_optional
from aiscale.book.notebook import BookError, Notebook, parse_parameters, read, tags

if TYPE_CHECKING:
    from nbformat import NotebookNode

Cells = Sequence[tuple[int, "NotebookNode"]]  #: with their numbers
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
LONGEST_CELL_LINES = 25
LARGEST_MEDIAN_LINES = 10
KNOWN_TAGS = ("parameters", "cover", "raises-exception", "optional")
#: Names that every rank has without importing them.
ON_RANKS = ("rank", "world_size", "world", "torch", "dist")

_IN_CODE = {
    r"https?://": "holds a network address: notebooks run offline",
    r"\bload_dataset\(": "loads a data set from a hub: use aiscale.data",
    r"\bfrom_pretrained\(\s*[\"'](?![./])": "loads weights from a hub: give it a folder made here",
    r"\b(urlretrieve|snapshot_download|hf_hub_download)\b|^\s*(wget|curl)\b": "downloads something",
    r"^\s*[%!]+\s*(pip|conda|mamba|uv)\b": "installs packages: they belong in pyproject.toml",
    r"^%%px.*\n(.*\n)*.*(?<![.\w])predict\(": "predicts on the ranks: predict in a cell without %%px",
    r"^\s*!|=\s*!(?!=)": "uses !command, whose failure goes unseen: use %%bash or subprocess.run",
}
_IN_PROSE = {
    r"!\[[^\]]*\]\(\s*(https?:)?//|<(img|script|iframe|video|link)\b[^>]*(https?:)?//": (
        "shows something from the network: notebooks are read offline"
    ),
    r"^```mermaid": "holds a mermaid diagram, which is drawn by a script from the network: use a plot or text",
    r"<script\b": "holds a script",
}
_STARTS = re.compile(r"^\s*(?:(?P<name>\w+) = |(?P<closed>with ))?.*\bcluster\.start\(", re.M)
_RUFF_JSON = ("--output-format=json", f"--config=builtins = {json.dumps(ON_RANKS)}")
_HIDDEN = "# IPython: %"  #: how a line of IPython in a %%px cell is passed to ruff


def check_form(path: str | Path) -> list[str]:
    """The problems of a lesson's notebook, one line each; empty if there are none."""
    notebook = Notebook(Path(path))
    cells = list(enumerate(notebook.content.cells, 1))
    code = [(number, cell) for number, cell in cells if cell.cell_type == "code"]
    return [
        *_check_file(notebook),
        *notebook.header.problems,
        *_check_parameters(code),
        *_check_sections(cells),
        *_check_core(notebook),
        *_check_end(cells),
        *check_cells(notebook),
    ]


def check_cells(notebook: Notebook) -> list[str]:
    cells = list(enumerate(notebook.content.cells, 1))
    code = [(number, cell) for number, cell in cells if cell.cell_type == "code"]
    found = (_check_lengths(code), _check_turns(cells), _check_ranks(code), _check_words(cells), _lint(notebook))
    return [problem for problems in found for problem in problems]


def strip(path: str | Path) -> bool:
    """Write a notebook in its committed form, with formatted code; returns whether the file changed."""
    path = Path(path)
    text = _as_committed(path)
    if path.read_text(encoding="utf-8") == text:
        return False
    path.write_text(text, encoding="utf-8")
    return True


def _as_committed(path: Path) -> str:
    import nbformat

    content = read(path)
    content.metadata = nbformat.from_dict(METADATA)
    content.nbformat_minor = max(5, content.nbformat_minor)
    for number, cell in enumerate(content.cells, 1):
        kept = tags(cell)
        cell.metadata = nbformat.from_dict({"tags": kept} if kept else {})
        cell.setdefault("id", f"cell-{number:02d}")
        cell.source = "\n".join(line.rstrip() for line in cell.source.strip("\n").splitlines())
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    _format_code(content, path)
    return nbformat.writes(content, indent=1).rstrip("\n") + "\n"


# the parts of the form ----------------------------------------------------------------------------------------------


def _check_file(notebook: Notebook) -> Iterator[str]:
    header = notebook.header
    if not re.fullmatch(r"A\d_[a-z0-9_]+" if notebook.is_appendix else r"\d\d_[a-z0-9_]+", notebook.name):
        number = "A and a digit" if notebook.is_appendix else "two digits"
        yield f"the file is called {notebook.name}: it must be {number}, _ and words_in_lower_case"
    if header.number and not notebook.name.startswith(header.number):
        yield f"the title says {header.number}, the file's name {notebook.name[:2]}"
    folders = notebook.path.parents[: 2 if notebook.is_appendix else 1]
    if header.needs not in ("", "nothing") and not any((f / f"{header.needs}.ipynb").exists() for f in folders):
        yield f"comes before is {header.needs!r}: it must be the name of a notebook beside this one, or nothing"


def _check_parameters(code: Cells) -> Iterator[str]:
    if not code or not _is_imports(code[0][1].source):
        yield "the first code cell is not the imports: imports, % lines and plots.use_style() only"
    tagged = [place for place, (_, cell) in enumerate(code) if "parameters" in tags(cell)]
    if tagged != [1]:
        yield f"{len(tagged)} cells are tagged parameters: the second code cell must be, and only that"
        return
    try:
        parameters = parse_parameters(code[1][1].source)
    except BookError as error:
        yield str(error)
        return
    later = "\n".join(cell.source for _, cell in code[2:])
    for parameter in parameters.values():
        if not parameter.comment:
            yield f"parameter {parameter.name} has no comment on its line that says what it is"
        if not re.search(rf"\b{parameter.name}\b", later):
            yield f"parameter {parameter.name} is not used"


def _is_imports(source: str) -> bool:
    try:
        tree = ast.parse(re.sub(r"^%.*", "", source, flags=re.M))
    except SyntaxError:
        return False
    return all(
        isinstance(node, ast.Import | ast.ImportFrom) or ast.unparse(node) == "plots.use_style()" for node in tree.body
    )


def _check_lengths(code: Cells) -> Iterator[str]:
    lengths = {number: len(cell.source.splitlines()) for number, cell in code}
    for number, lines in lengths.items():
        if lines > LONGEST_CELL_LINES:
            yield f"cell {number} has {lines} lines: at most {LONGEST_CELL_LINES}"
    median = statistics.median(lengths.values()) if lengths else 0
    if median > LARGEST_MEDIAN_LINES:
        yield f"half of the code cells have over {median:g} lines: at most {LARGEST_MEDIAN_LINES}"


def _check_sections(cells: Cells) -> Iterator[str]:
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


def _check_turns(cells: Cells) -> Iterator[str]:
    """Prose separates code cells, and prose after a figure interprets it."""
    for (number, cell), (_, following) in zip(cells, [*cells[1:], (0, None)], strict=True):
        if cell.cell_type != "code":
            continue
        prose = following is not None and following.cell_type == "markdown"
        if following is not None and following.cell_type == "code":
            yield f"cells {number} and {number + 1} are both code: put prose between them"
        elif DRAWS.search(cell.source) and not (prose and not following.source.lstrip().startswith("#")):
            yield f"cell {number} draws, but the figure is not read: follow it with prose that says what it shows"


def _check_ranks(code: Cells) -> Iterator[str]:
    for place, (number, cell) in enumerate(code):
        for start in _STARTS.finditer(cell.source):
            on_path = [other.source for _, other in code[place + 1 :] if is_optional(cell) or not is_optional(other)]
            later = "\n".join([cell.source[start.end() :], *on_path])
            name = start["name"]
            if not name and not start["closed"]:
                yield f"cell {number} starts ranks without a name: write `ranks = cluster.start(n)`"
            elif name and f"{name}.stop()" not in later:
                yield f"cell {number} starts {name}, which no later cell stops: call {name}.stop()"


def _check_end(cells: Cells) -> Iterator[str]:
    last = [cell.source.splitlines() for _, cell in cells if cell.cell_type == "markdown" and "## " in cell.source][-2:]
    if [lines[0] for lines in last] != ["## Key points", "## Exercises"]:
        yield "the last two sections are not '## Key points' and '## Exercises', each in a cell of its own"
        return
    points = [line for line in last[0][1:] if line.strip()]
    if not 3 <= len(points) <= 5 or not all(line.startswith("- ") for line in points):
        yield f"the key points are {len(points)} lines: they must be 3 to 5 bullets of one line each"


def _check_words(cells: Cells) -> Iterator[str]:
    for number, cell in cells:
        for tag in tags(cell):
            if tag not in KNOWN_TAGS:
                yield f"cell {number} has the tag {tag!r}: only {', '.join(KNOWN_TAGS)} mean something"
        rules = _IN_CODE if cell.cell_type == "code" else _IN_PROSE
        found = (problem for pattern, problem in rules.items() if re.search(pattern, cell.source, re.M | re.I))
        yield from (f"cell {number} {problem}" for problem in found)


# code, as ruff reads it ---------------------------------------------------------------------------------------------


def _lint(notebook: Notebook) -> Iterator[str]:
    found = json.loads(_ruff(("check", "--select=E,F,I,UP,B,W", *_RUFF_JSON), notebook.content, notebook.path).stdout)
    for item in found:
        where = f"cell {item['cell']} line {item['location']['row']}"
        yield f"{where}: {item['code']} {item['message']}"
    readable = all(item["code"] != "invalid-syntax" for item in found)
    if readable and json.loads(_as_committed(notebook.path)) != json.loads(notebook.path.read_text(encoding="utf-8")):
        yield "it is not as committed (outputs, counts, metadata, format): run aiscale notebooks --strip"


def _check_core(notebook: Notebook) -> Iterator[str]:
    """The core path is run without optional cells: no core cell uses a name that only they define."""
    core = copy.deepcopy(notebook.content)
    numbers = [number for number, cell in enumerate(core.cells, 1) if not is_optional(cell)]
    if len(numbers) == len(core.cells):
        return
    core.cells = [core.cells[number - 1] for number in numbers]
    for item in json.loads(_ruff(("check", "--select=F821", *_RUFF_JSON), core, notebook.path).stdout):
        if item["code"] == "F821":
            yield f"cell {numbers[item['cell'] - 1]}: {item['message']} without the optional cells"


def _format_code(content: NotebookNode, path: Path) -> None:
    import nbformat

    done = _ruff(("format",), content, path)
    if done.returncode:
        raise BookError(f"{path} holds code that ruff cannot format: {done.stderr.strip().splitlines()[0]}")
    for cell, formatted in zip(content.cells, nbformat.reads(done.stdout, as_version=4).cells, strict=True):
        cell.source = re.sub(f"^{_HIDDEN}", "%", formatted.source, flags=re.M)


def _ruff(arguments: Sequence[str], content: NotebookNode, path: Path) -> subprocess.CompletedProcess:
    import nbformat

    shown = copy.deepcopy(content)
    for cell in shown.cells:  # ruff skips cells with a cell magic, so %%px cells must look like Python
        if cell.cell_type == "code" and cell.source.startswith("%%px"):
            cell.source = re.sub("^%", _HIDDEN, cell.source, flags=re.M)
    ruff = shutil.which("ruff", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if not ruff:
        raise BookError("ruff is not installed, which reads the notebooks' code: `make setup` installs it")
    options = ["--isolated", "--target-version=py311", "--line-length=120", f"--stdin-filename={path.name}", "-"]
    text = nbformat.writes(shown)
    return subprocess.run([ruff, *arguments, *options], input=text, capture_output=True, text=True)
