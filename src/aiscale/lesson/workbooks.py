"""Exercises: the participants' notebooks in workshop/exercises/, made from workshop/solutions/.

A source is a notebook with nbgrader's markers. Its first code cell, the set-up, stands alone; then
follows, for each exercise, the heading that its grader states (`## 03.1 · Unequal shares (core, 10
minutes)`), its goal, code, and a cell `check("03.1")`. One cell holds the solution, inside a
function, between ### BEGIN SOLUTION and ### END SOLUTION.
"""

from __future__ import annotations

import copy
import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from aiscale.errors import write_whole
from aiscale.lesson.grading import Exercise, Task
from aiscale.lesson.notebook import LessonError, Notebook, choose

if TYPE_CHECKING:
    from nbformat import NotebookNode


def workshop() -> Path:
    """The folder workshop/ of the working directory or above it, else that of the source tree."""
    here = Path.cwd()
    for tree in (here, *here.parents, Path(__file__).resolve().parents[3]):
        if (tree / "workshop" / "graders").is_dir():
            return tree / "workshop"
    raise LessonError(
        "there is no folder workshop/graders here or above: run this in the project's folder"
    )


def lessons(names: Sequence[str] = (), root: str | Path | None = None) -> dict[str, Path]:
    """The lessons with graders, such as 03_ddp, and their files: all, or by name or number."""
    folder = Path(root or workshop()) / "graders"
    paths = choose("lesson with exercises", names, sorted(folder.glob("[0-9][0-9]_*.py")), folder)
    return {path.stem: path for path in paths}


def exercises(grader: Path) -> dict[str, Exercise]:
    """The exercises of a lesson's file of graders, by their ids."""
    return {id: task for id, task in _graded(grader).items() if isinstance(task, Exercise)}


def gaps(grader: Path) -> dict[str, Task]:
    """The gaps of a lesson's file of graders, by their ids."""
    return {id: task for id, task in _graded(grader).items() if not isinstance(task, Exercise)}


def _graded(grader: Path) -> dict[str, Task]:
    # Not imported: bytecode that Python keeps is known by the source's second, and a grader may
    # change twice in one.
    names = {"__name__": f"graders_{grader.stem}", "__file__": str(grader)}
    exec(compile(grader.read_bytes(), grader, "exec"), names)
    tasks = [value for value in names.values() if isinstance(value, Task)]
    return {task.id: task for task in tasks}


def find(id: str) -> tuple[str, Task]:
    """(lesson, exercise or gap) of an id such as 03.2 or 03.a."""
    ((lesson, path),) = lessons([str(id)[:2]]).items()
    there = _graded(path)
    if id not in there:
        raise LessonError(f"there is no exercise {id}: there are {', '.join(there)}")
    return lesson, there[id]


BLOCK = re.compile(
    r"^(?P<indent>[ \t]*)### BEGIN SOLUTION\n(?P<code>.*?)^[ \t]*### END SOLUTION[^\n]*$",
    re.M | re.S,
)
_HEADING = re.compile(r"^## (\d\d\.\d+) · .*$", re.M)


def sections(cells: Sequence[NotebookNode]) -> dict[str, list[NotebookNode]]:
    """The code cells of the set-up ("") and of each exercise, without those that check.

    The rest belongs to nobody.
    """
    parts: dict[str, list[NotebookNode]] = {"": []}
    now: str | None = ""
    for cell in cells:
        if cell.cell_type == "markdown" and re.search(r"^## ", cell.source, re.M):
            heading = _HEADING.search(cell.source)
            now = heading[1] if heading else None
            parts.setdefault(now, [])
        elif (
            cell.cell_type == "code"
            and now is not None
            and not cell.source.lstrip().startswith("check")
        ):
            parts[now].append(cell)
    parts.pop(None, None)
    return parts


def solution_of(lesson: str, id: str) -> str:
    """The source of a solution; empty if this machine has none."""
    path = workshop() / "solutions" / f"{lesson}.ipynb"
    cells = sections(Notebook(path).cells).get(id, []) if path.exists() else []
    blocks = [block["code"] for cell in cells for block in BLOCK.finditer(cell.source)]
    return textwrap.dedent("".join(blocks)).rstrip()


def answered(cells: Sequence[NotebookNode], code: str) -> list[str]:
    """The sources of an exercise's cells, with this code in place of the solution."""
    return [
        BLOCK.sub(lambda block: textwrap.indent(code, block["indent"]), cell.source)
        for cell in cells
    ]


_STUB = re.compile(r'^(?P<indent> +)raise NotImplementedError\("(?P<id>[\d.]+)"\)$', re.M)
_FILL = re.compile(r"%%fill \S+ (?P<id>\S+)\n")


def solved(notebook: Notebook) -> NotebookNode:
    """The content of a lesson whose gaps and exercises have the kit's lines."""
    content = copy.deepcopy(notebook.content)
    for cell in content.cells:
        if gap := _FILL.match(cell.source):
            cell.source = f"{gap[0]}{find(gap['id'])[1].lines}\n"
        elif stub := _STUB.search(cell.source):
            lines = solution_of(notebook.name, stub["id"])
            cell.source = cell.source.replace(stub[0], textwrap.indent(lines, stub["indent"]))
    return content


def make(lesson: str, root: Path) -> str:
    import nbformat

    content = copy.deepcopy(Notebook(root / "solutions" / f"{lesson}.ipynb").content)
    for id, cells in sections(content.cells).items():
        for cell, source in zip(
            cells, answered(cells, f'raise NotImplementedError("{id}")'), strict=True
        ):
            cell.source = source
    return nbformat.writes(content, indent=1).rstrip("\n") + "\n"


def make_all(chosen: Sequence[str], root: Path, out: Path) -> Iterator[Path]:
    """Write the participants' notebooks that have changed."""
    for lesson in chosen:
        text, target = make(lesson, root), out / f"{lesson}.ipynb"
        if not target.exists() or target.read_text(encoding="utf-8") != text:
            out.mkdir(parents=True, exist_ok=True)
            yield write_whole(target, text)


def problems(lesson: str, root: Path) -> list[str]:
    """Where a lesson's source, graders and participants' notebook do not fit; one line each."""
    source, target = (root / folder / f"{lesson}.ipynb" for folder in ("solutions", "exercises"))
    tasks, cells = exercises(root / "graders" / f"{lesson}.py"), Notebook(source).cells
    parts = sections(cells)
    faults = [
        f"{id} stands in the notebook, but has no grader" for id in parts if id and id not in tasks
    ]
    for id, task in tasks.items():
        faults += [f"{id}: {problem}" for problem in _misfits(task, cells, parts.get(id, []))]
    if not faults and (
        not target.exists() or target.read_text(encoding="utf-8") != make(lesson, root)
    ):
        faults.append(f"{target} is not what its source makes: run aiscale exercises")
    return faults


def _misfits(
    task: Exercise, cells: Sequence[NotebookNode], mine: Sequence[NotebookNode]
) -> Iterator[str]:
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    if task.heading not in text.splitlines():
        yield f"its heading must be {task.heading!r}"
    blocks = [block for cell in mine for block in BLOCK.finditer(cell.source)]
    if len(blocks) != 1 or not blocks[0]["indent"]:
        many = f"{len(blocks)} solutions stand between the markers"
        yield f"{many}: it must be one, inside a function"
    if not any(cell.source.strip() == f'check("{task.id}")' for cell in cells):
        yield f'no cell is check("{task.id}")'
    names = [name for name, _, _ in task.refused]
    if len(names) < 4 or not any("hard-coded" in name for name in names):
        must = "it must refuse four wrong answers, one of them hard-coded for the shown input"
        yield f"it refuses {names}: {must}"
