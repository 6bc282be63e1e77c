"""The rules that a notebook in notebooks/ keeps, and the tool that brings one back to its committed form.

    check("notebooks/03_ddp.ipynb")    # -> ["cell 7 has 31 lines: at most 25", ...]
    strip("notebooks/03_ddp.ipynb")    # outputs, execution counts and editors' metadata go; True if the file changed

Cells are counted from 1, as a reader counts them. `aiscale.book.notebook` shows the form, `aiscale.book.rules` reads
single cells.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from aiscale.book import rules
from aiscale.book.notebook import BookError, Notebook, parse_parameters, read, tags

METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
LONGEST_CELL_LINES = 25
LARGEST_MEDIAN_LINES = 10
KNOWN_TAGS = ("parameters", "cover", "raises-exception")

Cells = Sequence[NotebookNode]


def check(path: str | Path) -> list[str]:
    """What is wrong with a notebook, a line each; an empty list where nothing is."""
    notebook = Notebook(Path(path))
    cells = notebook.content.cells
    problems = [*_check_file(notebook), *notebook.header.problems]
    for part in (_check_committed, _check_parameters, _check_turns, _check_figures, _check_ranks, _check_end):
        problems += part(cells)
    for number, cell in enumerate(cells, 1):
        find = rules.in_code if cell.cell_type == "code" else rules.in_prose
        problems += [f"cell {number} {problem}" for problem in find(cell.source)]
    return problems + rules.lint(notebook)


def strip(path: str | Path) -> bool:
    """Write a notebook as it is committed, its code formatted; returns whether that changed the file."""
    path = Path(path)
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
    rules.format_code(content, path)
    text = nbformat.writes(content, indent=1).rstrip("\n") + "\n"
    if path.read_text(encoding="utf-8") == text:
        return False
    path.write_text(text, encoding="utf-8")
    return True


def _check_file(notebook: Notebook) -> Iterator[str]:
    header, metadata = notebook.header, notebook.content.metadata
    if not re.fullmatch(r"\d\d_[a-z0-9_]+", notebook.name):
        yield f"the file is called {notebook.name}: it must be two digits, _ and words_in_lower_case"
    if header.number and not notebook.name.startswith(header.number):
        yield f"the title says {header.number}, the file's name {notebook.name[:2]}"
    if header.needs not in ("", "nothing") and not notebook.path.with_name(f"{header.needs}.ipynb").exists():
        yield f"comes before is {header.needs!r}: it must be the name of a notebook beside this one, or nothing"
    if metadata != METADATA:
        extra = ", ".join(sorted(set(metadata) - set(METADATA))) or "kernelspec or language_info"
        yield f"the notebook's metadata is not the plain one ({extra}): strip it"


def _check_committed(cells: Cells) -> Iterator[str]:
    for number, cell in enumerate(cells, 1):
        if set(cell.metadata) - {"tags"}:
            yield f"cell {number} carries metadata ({', '.join(sorted(set(cell.metadata) - {'tags'}))}): strip it"
        for tag in tags(cell):
            if tag not in KNOWN_TAGS:
                yield f"cell {number} has the tag {tag!r}: only {', '.join(KNOWN_TAGS)} mean something"
        if cell.cell_type == "code" and (cell.outputs or cell.execution_count is not None):
            yield f"cell {number} carries outputs or an execution count: strip it"


def _check_parameters(cells: Cells) -> Iterator[str]:
    code = [cell for cell in cells if cell.cell_type == "code"]
    if not code or not rules.is_imports(code[0].source):
        yield "the first code cell is not the imports: imports, % lines and plots.use_style() only"
    tagged = [cell for cell in cells if "parameters" in tags(cell)]
    if len(tagged) != 1 or len(code) < 2 or code[1] is not tagged[0]:
        yield f"{len(tagged)} cells are tagged parameters: the second code cell must be, and only that"
        return
    try:
        parameters = parse_parameters(tagged[0].source)
    except BookError as error:
        yield str(error)
        return
    later = "\n".join(cell.source for cell in code[2:])
    for parameter in parameters.values():
        if not parameter.comment:
            yield f"parameter {parameter.name} has no comment on its line that says what it is"
        if not re.search(rf"\b{parameter.name}\b", later):
            yield f"parameter {parameter.name} is not used"


def _check_turns(cells: Cells) -> Iterator[str]:
    for number, (cell, following) in enumerate(zip(cells, cells[1:], strict=False), 1):
        if cell.cell_type == following.cell_type == "code":
            yield f"cells {number} and {number + 1} are both code: put prose between them"
    lengths = []
    for number, cell in enumerate(cells, 1):
        if cell.cell_type == "raw":
            yield f"cell {number} is raw: use markdown or code"
        if not cell.source.strip():
            yield f"cell {number} is empty"
        if cell.cell_type == "code":
            lengths.append(len(cell.source.splitlines()))
            if lengths[-1] > LONGEST_CELL_LINES:
                yield f"cell {number} has {lengths[-1]} lines: at most {LONGEST_CELL_LINES}"
    if lengths and statistics.median(lengths) > LARGEST_MEDIAN_LINES:
        yield f"half of the code cells have over {statistics.median(lengths):g} lines: at most {LARGEST_MEDIAN_LINES}"


def _check_figures(cells: Cells) -> Iterator[str]:
    covers = [number for number, cell in enumerate(cells, 1) if "cover" in tags(cell)]
    if len(covers) > 1:
        yield f"cells {', '.join(map(str, covers))} are all tagged cover: one is enough"
    for number, cell in enumerate(cells, 1):
        if cell.cell_type != "code" or not rules.draws(cell.source):
            continue
        following = cells[number] if number < len(cells) else None
        if following is None or following.cell_type != "markdown" or following.source.lstrip().startswith("#"):
            yield f"cell {number} draws, but the figure is not read: follow it with prose that says what it shows"


def _check_ranks(cells: Cells) -> Iterator[str]:
    running: dict[str, int] = {}
    for number, cell in enumerate(cells, 1):
        if cell.cell_type != "code" or rules.is_foreign(cell.source):
            continue
        for name in rules.started(cell.source):
            if name is None:
                yield f"cell {number} starts ranks without a name: write `ranks = cluster.start(n)`"
            else:
                running[name] = number
        for name in rules.stopped(cell.source):
            running.pop(name, None)
    for name, number in running.items():
        yield f"cell {number} starts {name}, which no later cell stops: call {name}.stop()"


def _check_end(cells: Cells) -> Iterator[str]:
    sections = [
        (number, line)
        for number, cell in enumerate(cells, 1)
        if cell.cell_type == "markdown"
        for line in rules.without_fences(cell.source).splitlines()
        if line.startswith("## ")
    ]
    if [heading for _, heading in sections[-2:]] != ["## Key points", "## Exercises"]:
        yield "the last two sections are not '## Key points' and '## Exercises'"
        return
    (key, _), (exercises, _) = sections[-2:]
    lines = [line for line in cells[key - 1].source.splitlines() if line.strip()]
    if exercises != key + 1 or lines[0] != "## Key points" or not cells[exercises - 1].source.startswith("## Ex"):
        yield "key points and exercises are not two cells, one after the other, that start with their headings"
    elif not 3 <= len(lines) - 1 <= 5 or not all(line.startswith("- ") for line in lines[1:]):
        yield f"the key points are {len(lines) - 1} lines: they must be 3 to 5 bullets of one line each"
