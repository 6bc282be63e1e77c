"""The puzzles of chunks, broadcast and ring: without NumPy, so they also run in a web page (`page`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import isclose
from random import Random

from simulated.machine import Costs
from simulated.ranks import Rank
from simulated.world import World

Prepared = tuple[World, Callable[[list], str]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One size of a puzzle. Without targets, only the answer's correctness is asked."""

    ranks: int
    sizes: dict[str, int] = field(default_factory=dict)
    targets: dict[str, float] = field(default_factory=dict)  #: time, memory, sent: at most
    shown: bool = True


@dataclass(frozen=True, kw_only=True)
class Puzzle:
    title: str
    prepare: Callable[..., Prepared]
    cases: tuple[Case, ...]
    minutes: int = 15
    plain: bool = False  #: draws its numbers without NumPy
    arguments: tuple[str, ...] = ()  #: sizes that the program is called with
    hints: dict[tuple[str, float | None], str] = field(default_factory=dict)  #: by figure and value; None: any other


class Numbers(tuple):
    """A chunk's numbers, which ranks copy, add and scale."""

    def copy(self) -> Numbers:
        return self

    def __add__(self, other: Numbers) -> Numbers:
        return Numbers(a + b for a, b in zip(self, other, strict=True))

    def __radd__(self, zero: int) -> Numbers:
        return self

    def __mul__(self, factor: float) -> Numbers:
        return Numbers(a * factor for a in self)


near = partial(isclose, rel_tol=1e-5, abs_tol=1e-8)


def broadcast(rng: Random, ranks: int, chunks: int) -> Prepared:
    world = World(ranks, Costs(link_s_per_gb=1))
    data = [Numbers([rng.uniform(1, 2)]) for _ in range(chunks)]
    world.ranks[0].inputs = [world.ranks[0].give(f"chunk {i}", "other", 1.0, d) for i, d in enumerate(data)]

    def verify(returned: list) -> str:
        for rank, values in zip(world.ranks, returned, strict=True):
            problem = _list_problem(rank, values, chunks)
            if problem:
                return problem
            if [value.data for value in values] != data:
                return f"rank {rank.index} returns the chunks in another order, or one twice"
        return ""

    return world, verify


def ring(rng: Random, ranks: int) -> Prepared:
    """Chunk c of rank r is a vector with one number, at place r: a sum shows which ranks are in it, and how often."""
    world = World(ranks, Costs(link_s_per_gb=1))
    parts = [[rng.uniform(1, 2) for _ in range(ranks)] for _ in range(ranks)]
    for rank, row in zip(world.ranks, parts, strict=True):
        vectors = [Numbers(part * (r == rank.index) for r in range(ranks)) for part in row]
        rank.inputs = [rank.give(f"chunk {c}", "other", 1.0, v) for c, v in enumerate(vectors)]

    def verify(returned: list) -> str:
        for rank, values in zip(world.ranks, returned, strict=True):
            problem = _list_problem(rank, values, ranks)
            if problem:
                return problem
            for c, value in enumerate(values):
                times = [number / parts[r][c] for r, number in enumerate(value.data)]
                if times[0] and all(near(t, times[0]) for t in times) and not near(times[0], 1):
                    return f"chunk {c} on rank {rank.index} is {times[0]:.3g} times the sum"
                if not all(near(t, round(t)) for t in times):
                    return f"chunk {c} on rank {rank.index} is made of other chunks: is an index off by one?"
                lacks = [str(r) for r in range(ranks) if times[r] < 0.5]
                twice = [str(r) for r in range(ranks) if times[r] > 1.5]
                if lacks or twice:
                    said = [f"lacks rank {', '.join(lacks)}"] if lacks else []
                    said += [f"holds rank {', '.join(twice)} more than once"] if twice else []
                    return f"chunk {c} on rank {rank.index} {' and '.join(said)}"
        return ""

    return world, verify


def _list_problem(rank: Rank, values: object, n: int) -> str:
    if not isinstance(values, list | tuple) or len(values) != n or any(v is None for v in values):
        return f"rank {rank.index} returns {values!r}: it must be a list of {n} chunks"
    for c, value in enumerate(values):
        if value.rank is not rank or value.gone:
            return f"rank {rank.index} returns a chunk {c} that it does not hold: {value.name}, {value.gone or 'sent?'}"
    return ""


CHUNKS = {
    "broadcast": Puzzle(
        title="Broadcast",
        plain=True,
        prepare=broadcast,
        arguments=("chunks",),
        cases=(
            Case(ranks=8, sizes={"chunks": 1}, targets={"time": 3}),
            Case(ranks=8, sizes={"chunks": 8}, targets={"time": 14}),
            Case(ranks=5, sizes={"chunks": 6}, shown=False),
        ),
        hints={
            ("time", 7): "Rank 0 sends all messages, or each rank waits for the one before: who could send at 1 s?",
            ("time", 24): "All chunks go down a tree, round by round. What does a rank do while it waits?",
            ("time", None): "Which ranks have something to send, and do not?",
        },
    ),
    "ring": Puzzle(
        title="Ring all-reduce",
        plain=True,
        prepare=ring,
        cases=(
            Case(ranks=4, targets={"time": 6, "memory": 5, "sent": 6}),
            Case(ranks=3, targets={"time": 4, "memory": 4, "sent": 4}, shown=False),
            Case(ranks=5, targets={"time": 8, "memory": 6, "sent": 8}, shown=False),
        ),
        hints={
            ("time", 12): "Each rank sends every chunk to every other: need each of them make every sum?",
            ("time", 24): "One rank receives everything: messages arrive there one after another.",
            ("time", None): "In each second every rank can send a chunk and receive one.",
            ("memory", None): "Chunks that have been added or replaced are still held.",
            ("sent", None): "Some chunks are sent more often than they need be.",
        },
    ),
}
