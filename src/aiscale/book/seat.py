"""Exercises run and graded without a browser: a seat is an IPython shell with at most one set of ranks.

    with Seat() as seat:
        for row in check_graders(seat, "03_ddp", root): ...      # solution, stub and wrong answers of each exercise
        for row in grade(seat, Path("03_ddp.ipynb")): ...        # a participant's own notebook

Each answer is graded alone: in an empty namespace, after the set-up and the cells of its exercise only. A second
`cluster.start` in a process reuses the ranks and empties their namespaces, so that an answer costs tenths of a second.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from aiscale import cluster
from aiscale.book.grading import Exercise, Graded
from aiscale.book.notebook import BookError, Notebook
from aiscale.book.workbooks import answered, exercises, find, lessons, sections

CHECK_LIMIT_S = 30.0  #: of one answer under --check, where a hang is what some wrong answers do
DRAWS = 5  #: how often a solution is graded: a grader must not refuse it by chance


@dataclass(frozen=True)
class Row:
    """What became of one answer."""

    exercise: str
    answer: str  #: solution, stub, the name of a wrong answer, or the notebook that was graded
    ok: bool
    state: str
    said: str
    seconds: float
    seed: int


class Seat:
    """A shell whose cells run as a notebook's do; a context manager, which stops the ranks."""

    def __enter__(self) -> Seat:
        os.environ.setdefault("MPLBACKEND", "agg")
        from IPython.core.interactiveshell import InteractiveShell
        from traitlets.config import Config

        quiet = Config({"HistoryManager": {"enabled": False}, "InteractiveShell": {"colors": "NoColor"}})
        self._shell = InteractiveShell.instance(config=quiet)
        return self

    def __exit__(self, *_: object) -> None:
        cluster.stop()
        type(self._shell).clear_instance()

    def run(self, sources: Sequence[str]) -> str:
        """Run cells; returns the first error, or nothing."""
        from IPython.utils.io import capture_output

        for source in sources:
            with capture_output():
                done = self._shell.run_cell(source)
            if error := done.error_before_exec or done.error_in_exec:
                if not isinstance(error, Exception):  # Ctrl-C, SIGTERM
                    raise error
                return f"{type(error).__name__}: {error}".splitlines()[0]
        return ""

    def graded(self, task: Exercise, set_up: Sequence[str], cells: Sequence[str], **how: object) -> Graded:
        """Run the set-up and an exercise's cells in an empty namespace, and grade it."""
        self._shell.reset(new_session=False)
        if error := self.run(set_up):
            raise BookError(f"the set-up of {task.id} failed: {error}")
        error = self.run(cells)
        verdict = self.again(task, **how)
        if error and verdict.state == "empty":
            return Graded("wrong", f"its cells stopped at {error}", verdict.seed, verdict.seconds)
        return verdict

    def again(self, task: Exercise, **how: object) -> Graded:
        """Grade what stands in the namespace."""
        from IPython.utils.io import capture_output

        with capture_output():
            return task.graded(self._shell.user_ns, cluster.current(), **how)


def check_graders(seat: Seat, lesson: str, root: Path, seed: int | None = None) -> Iterator[Row]:
    """Solution right, stub empty and naming its exercise, wrong answers refused with what must be said."""
    tasks = exercises(root / "graders" / f"{lesson}.py")
    source, given = (sections(Notebook(root / f / f"{lesson}.ipynb").cells) for f in ("solutions", "exercises"))
    set_up = [cell.source for cell in source[""]]
    gc.freeze()  # IPython collects at each reset: half a second with torch's objects, nothing without
    for id, task in tasks.items():
        attempts = [("solution", [cell.source for cell in source[id]], "right", "")]
        attempts += [("stub", [cell.source for cell in given[id]], "empty", f'NotImplementedError("{id}")')]
        attempts += [(wrong.name, answered(source[id], wrong.source), "wrong", wrong.said) for wrong in task.refused]
        for name, cells, state, said in attempts:
            verdict = seat.graded(task, set_up, cells, seed=seed, limit_s=CHECK_LIMIT_S)
            for _ in range(1, DRAWS if state == "right" and seed is None else 1):
                if verdict.state == "right":
                    verdict = seat.again(task, limit_s=CHECK_LIMIT_S)
            ok = verdict.state == state and said in verdict.text
            text = verdict.text if ok else f"{verdict.text} [it must be {state}{f', and say {said!r}' if said else ''}]"
            yield Row(id, name, ok, verdict.state, text, round(verdict.seconds, 2), verdict.seed)


def grade(seat: Seat, path: Path) -> Iterator[Row]:
    """A participant's own notebook, exercise by exercise; one whose cells are gone is not done."""
    parts = sections(Notebook(path).cells)
    ids = [id for id in parts if id]
    if not ids:
        raise BookError(f"{path} holds no exercises: name a notebook such as workshop/exercises/03_ddp.ipynb")
    lesson = find(ids[0])[0]
    for id, task in exercises(lessons([lesson])[lesson]).items():
        set_up, cells = ([cell.source for cell in parts.get(part, [])] for part in ("", id))
        verdict = seat.graded(task, set_up, cells)
        done = verdict.state == "right"
        yield Row(id, task.title, done, verdict.state, verdict.text, round(verdict.seconds, 2), verdict.seed)
