"""One try of a puzzle's case: it runs, its result is judged and its figures are held to the targets."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from simulated.chunks import Case, Puzzle
from simulated.machine import SimulationError
from simulated.world import World

UNITS = {"time": "s", "memory": "GB", "sent": "GB"}


def run(puzzle: Puzzle, case: Case, program: Callable) -> tuple[World | None, str]:
    """Run one case with new numbers: the world, and what is wrong with the result."""
    rng = random.Random() if puzzle.plain else np.random.default_rng()
    world, verify = puzzle.prepare(rng, case.ranks, **case.sizes)
    try:
        returned = world.run(program, *(case.sizes[size] for size in puzzle.arguments))
    except NotImplementedError:
        return None, "not solved yet"
    except SimulationError as error:
        return world, f"{error}{with_case(case)}"
    lost = [(source, to, len(left)) for (source, to), left in world.channels.items() if left]
    if lost:
        source, to, count = lost[0]
        many = f"{count} messages" if count > 1 else "a message"
        return world, f"rank {source} sent rank {to} {many} that it never received{with_case(case)}"
    problem = verify(returned)
    return world, f"{problem}{with_case(case)}" if problem else ""


def measured(world: World) -> dict[str, float]:
    return {"time": round(world.time_s, 6), "memory": round(world.memory_gb, 6), "sent": round(world.sent_gb, 6)}


def missed(puzzle: Puzzle, case: Case, figures: dict[str, float]) -> str:
    """The targets that a right answer misses, each with its hint."""
    over = [(what, figures[what]) for what, target in case.targets.items() if figures[what] > target]
    if not over:
        return ""
    said = [f"{what} {value:g} {UNITS[what]} instead of {case.targets[what]:g} {UNITS[what]}" for what, value in over]
    hints = [puzzle.hints.get(miss, puzzle.hints.get((miss[0], None), "")) for miss in over]
    where = "" if case is puzzle.cases[0] else with_case(case, always=True)
    return f"the result is right, but {' and '.join(said)}{where}. {' '.join(filter(None, hints))}".rstrip()


def figures_of(case: Case, figures: dict[str, float]) -> str:
    parts = [f"{what} {figures[what]:g} {UNITS[what]} (target {target:g})" for what, target in case.targets.items()]
    return f"  {sizes_of(case)}: {', '.join(parts) or 'right'}"


def sizes_of(case: Case) -> str:
    words = {"ranks": case.ranks, **{"micro-batches" if k == "micro" else k: n for k, n in case.sizes.items()}}
    return ", ".join(f"{n} {word.removesuffix('s') if n == 1 else word}" for word, n in words.items())


def with_case(case: Case, always: bool = False) -> str:
    """Where it happened, if not in the case that the participant knows."""
    return f" (with {sizes_of(case)})" if always or not case.shown else ""
