"""`check`: run a participant's program on simulated ranks, draw it, and hold it to its puzzle's targets.

    check("ring", ring)          # draws the ranks; says what is wrong or too much, or that it is solved

New numbers are drawn for each check, and further numbers of ranks are tried. Once solved, our answer is shown: it comes
from workshop/solutions/puzzles.ipynb, and its figures are measured as the participant's are. `check.card()` shows what
is solved, beside the exercises (`aiscale.lesson.exercises`).
"""

from __future__ import annotations

import functools
import html
import json
from collections.abc import Callable
from pathlib import Path

from aiscale.lesson.exercises import card, entry_of, tried
from aiscale.lesson.grading import Graded
from aiscale.lesson.progress import save, shell, show
from simulated.machine import SimulationError
from simulated.problems import PUZZLES, Case, Puzzle
from simulated.trial import UNITS, figures_of, measured, missed, run, sizes_of
from simulated.world import World

SOLUTIONS = Path(__file__).parents[2] / "solutions" / "puzzles.ipynb"
_recorded: dict[str, Callable] | None = None  #: while the solutions are read, `check` only notes their answers


def check(name: str, program: Callable) -> Graded | None:
    """Run a program on every case of a puzzle."""
    if _recorded is not None:
        _recorded[name] = program
        return None
    if name not in PUZZLES:
        raise SimulationError(f"there is no puzzle {name!r}: it may be one of {', '.join(PUZZLES)}")
    puzzle = PUZZLES[name]
    lines, problem = [], ""
    for case in puzzle.cases:
        world, problem = run(puzzle, case, program)
        if world is None:
            break
        figures = measured(world)
        right = not problem
        problem = problem or missed(puzzle, case, figures)
        if case.shown or problem:
            _draw(world, case)
            lines += [figures_of(case, figures)] if right else []
        if problem:
            break
    text = "\n".join([f"{puzzle.title}: {problem or 'solved'}", *lines])
    best = None if problem else best_answers().get(name)
    text += _beside(puzzle, best)
    show(text, "off" if problem else "exact", page="" if problem else _page(text, best))
    if world is None:
        return Graded("empty", text)
    entry = entry_of("puzzles", f"puzzle.{name}", puzzle.title)
    tried(entry, "wrong" if problem else "right")
    save("exercises", f"puzzle.{name}", entry, "puzzles")
    return Graded("wrong" if problem else "right", text)


check.card = card


def _draw(world: World, case: Case) -> None:
    if shell():
        import matplotlib.pyplot as plt

        from simulated.drawing import draw

        draw(world, case.targets)
        plt.show()


# the best answer that we know -----------------------------------------------------------------------------------------


@functools.cache
def best_answers() -> dict[str, tuple[Callable, str]]:
    """(program, its source) of each puzzle, from the solutions; none where they are not installed."""
    global _recorded
    if not SOLUTIONS.exists():
        return {}
    cells = json.loads(SOLUTIONS.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    programs: dict[str, tuple[Callable, str]] = {}
    names: dict = {"__name__": "solutions"}
    _recorded = {}
    try:
        for source in sources:
            code = "\n".join(line for line in source.splitlines() if not line.startswith(("%", "check.card")))
            exec(compile(code, "solutions", "exec"), names)
            programs |= {name: (program, code) for name, program in _recorded.items()}  # the last one counts
            _recorded.clear()
    finally:
        _recorded = None
    return programs


def _beside(puzzle: Puzzle, best: tuple[Callable, str] | None) -> str:
    if best is None:
        return ""
    case = next(case for case in reversed(puzzle.cases) if case.shown)
    figures = measured(run(puzzle, case, best[0])[0])
    said = ", ".join(f"{what} {figures[what]:g} {UNITS[what]}" for what in case.targets)
    return f"\n  our answer, {sizes_of(case)}: {said}"


def _page(text: str, best: tuple[Callable, str] | None) -> str:
    head, _, rest = text.partition("\n")
    source = ""
    if best:
        code = "\n".join(line for line in best[1].splitlines() if not line.startswith(("    ### ", "check(")))
        source = f"<details><summary>its code</summary><pre>{html.escape(code.strip())}</pre></details>"
    band = "border-left: 4px solid #1b7a41; padding: 0.1em 0.8em; white-space: pre-line"
    return f'<div style="{band}"><b>✓ {html.escape(head)}</b>\n{html.escape(rest)}{source}</div>'
