"""`aiscale exercises`: make the participants' notebooks, grade the graders, grade a notebook.

Each answer is graded alone: in an empty namespace, after the set-up and the cells of its exercise
only. A second `cluster.start` in a process reuses the ranks and empties their namespaces, so that
an answer costs tenths of a second.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.io import capture_output
from traitlets.config import Config

from aiscale.lesson import cluster
from aiscale.lesson.grading import Exercise, Graded
from aiscale.lesson.notebook import LessonError, Notebook
from aiscale.lesson.workbooks import (
    answered,
    exercises,
    find,
    lessons,
    make_all,
    problems,
    sections,
    workshop,
)

DRAWS = 5  #: how often a solution is graded: a grader must not refuse it by chance


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "names",
        nargs="*",
        metavar="NAME",
        help="a lesson's name or number (default: all that have exercises)",
    )
    task = parser.add_mutually_exclusive_group()
    task.add_argument(
        "--check",
        action="store_true",
        help="try every solution, stub and wrong answer on the graders",
    )
    task.add_argument(
        "--grade",
        metavar="NOTEBOOK",
        help="run a participant's notebook and say which exercises pass",
    )


def run(args: argparse.Namespace) -> int:
    root = workshop()
    if args.grade:
        with Seat() as seat:
            return _report(grade(seat, Path(args.grade)))
    selection = lessons(args.names)
    if not args.check:
        print(*make_all(list(selection), root, root / "exercises"), sep="\n")
        return 0
    if faults := [f"{lesson}: {line}" for lesson in selection for line in problems(lesson, root)]:
        print(*faults, sep="\n")
        return 1
    with Seat() as seat:
        return _report(row for lesson in selection for row in check_graders(seat, lesson, root))


def _report(rows: Iterable[Row]) -> int:
    done = []
    for row in rows:
        print(
            f"{row.exercise} {row.answer}: {'ok' if row.ok else 'NOT OK'}: {row.message}",
            flush=True,
        )
        done.append(row.ok)
    print(f"{sum(done)} of {len(done)} ok")
    return 0 if all(done) else 1


@dataclass(frozen=True)
class Row:
    exercise: str
    #: solution, stub, the name of a wrong answer, or the title of an exercise that was graded
    answer: str
    ok: bool
    message: str


class Seat:
    """A shell whose cells run as a notebook's; its ranks, one set at most, end with the context."""

    def __enter__(self) -> Seat:
        os.environ.setdefault("MPLBACKEND", "agg")
        quiet = Config(
            {"HistoryManager": {"enabled": False}, "InteractiveShell": {"colors": "NoColor"}}
        )
        self._shell = InteractiveShell.instance(config=quiet)
        return self

    def __exit__(self, *_: object) -> None:
        cluster.stop()
        type(self._shell).clear_instance()

    def run(self, sources: Sequence[str]) -> str:
        """Run cells; returns the first error, or nothing."""
        for source in sources:
            with capture_output():
                done = self._shell.run_cell(source)
            if error := done.error_before_exec or done.error_in_exec:
                if not isinstance(error, Exception):  # Ctrl-C, SIGTERM
                    raise error
                return f"{type(error).__name__}: {error}".splitlines()[0]
        return ""

    def graded(self, task: Exercise, set_up: Sequence[str], cells: Sequence[str]) -> Graded:
        """Run the set-up and an exercise's cells in an empty namespace, and grade it."""
        self._shell.reset(new_session=False)
        if error := self.run(set_up):
            raise LessonError(f"the set-up of {task.id} failed: {error}")
        error = self.run(cells)
        verdict = self.again(task)
        if error and verdict.state == "empty":
            return Graded("wrong", f"its cells stopped at {error}")
        return verdict

    def again(self, task: Exercise) -> Graded:
        with capture_output():
            return task.graded(self._shell.user_ns, cluster.current())


def check_graders(seat: Seat, lesson: str, root: Path) -> Iterator[Row]:
    """Solution right, stub empty and naming its exercise, wrong ones refused and told why."""
    tasks = exercises(root / "graders" / f"{lesson}.py")
    source, stubs = (
        sections(Notebook(root / f / f"{lesson}.ipynb").cells) for f in ("solutions", "exercises")
    )
    set_up = [cell.source for cell in source[""]]
    # IPython collects at each reset: half a second with torch's objects, nothing without
    gc.freeze()
    for id, task in tasks.items():
        attempts = [("solution", [cell.source for cell in source[id]], "right", "")]
        attempts += [
            ("stub", [cell.source for cell in stubs[id]], "empty", f'NotImplementedError("{id}")')
        ]
        attempts += [
            (name, answered(source[id], wrong), "wrong", part) for name, part, wrong in task.refused
        ]
        for name, cells, state, part in attempts:
            verdict = seat.graded(task, set_up, cells)
            for _ in range(1, DRAWS if state == "right" else 1):
                if verdict.state == "right":
                    verdict = seat.again(task)
            ok = verdict.state == state and part in verdict.text
            text = (
                verdict.text
                if ok
                else f"{verdict.text} [it must be {state}{f', and say {part!r}' if part else ''}]"
            )
            yield Row(id, name, ok, text)


def grade(seat: Seat, path: Path) -> Iterator[Row]:
    """A participant's own notebook, exercise by exercise; one whose cells are gone is not done."""
    parts = sections(Notebook(path).cells)
    ids = [id for id in parts if id]
    if not ids:
        raise LessonError(
            f"{path} holds no exercises: name a notebook such as workshop/exercises/03_ddp.ipynb"
        )
    lesson = find(ids[0])[0]
    for id, task in exercises(lessons([lesson])[lesson]).items():
        set_up, cells = ([cell.source for cell in parts.get(part, [])] for part in ("", id))
        verdict = seat.graded(task, set_up, cells)
        yield Row(id, task.title, verdict.state == "right", verdict.text)
