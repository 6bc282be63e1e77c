"""Which rank trains which layers, before and after a rank has died.

    before = first_plan("oobleck", ranks=4, layers=6, micro_batches=6)     # two pipelines of two ranks
    after = next_plan("oobleck", before, alive=[0, 1, 3], layers=6, micro_batches=6)

Bamboo    one pipeline; each stage has a second copy, its shadow, on the rank before it (Thorpe et al., NSDI 2023)
Oobleck   several pipelines; one that has lost a rank takes the template for those left (Jang et al., SOSP 2023)
Varuna    as many equal pipelines of as many stages as make the shortest step (Athlur et al., EuroSys 2022)

Ranks keep the numbers that they had at the start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

MOST_LAYERS = 3  #: that a rank's memory holds, for Varuna's choice


class Stage(NamedTuple):
    rank: int
    layers: tuple[int, ...]
    shadow: int | None = None  #: the rank with a second copy


@dataclass(frozen=True)
class Plan:
    pipelines: tuple[tuple[Stage, ...], ...]
    shares: tuple[tuple[int, ...], ...]  #: each pipeline's micro-batches

    def work(self) -> Iterator[tuple[int, str, int, int]]:
        """(pipeline, "forward" or "backward", micro-batch, stage) in an order that all ranks follow."""
        for p, (stages, share) in enumerate(zip(self.pipelines, self.shares, strict=True)):
            yield from ((p, "forward", m, s) for m in share for s in range(len(stages)))
            yield from ((p, "backward", m, s) for m in share for s in reversed(range(len(stages))))


def first_plan(idea: str, *, ranks: int, layers: int, micro_batches: int) -> Plan:
    alive = list(range(ranks))
    if idea == "bamboo":
        stages = list(map(Stage, alive, template(layers, ranks)))
        return Plan((_shadowed(stages),), (tuple(range(micro_batches)),))
    if idea == "oobleck":
        return _pipelines([alive[: ranks // 2], alive[ranks // 2 :]], layers, micro_batches)
    return _varuna(alive, layers, micro_batches)


def next_plan(idea: str, plan: Plan, alive: Sequence[int], *, layers: int, micro_batches: int) -> Plan:
    """The plan of the ranks that are alive; raises ValueError if a stage and its shadow are gone."""
    if idea == "bamboo":
        heirs = [stage if stage.rank in alive else stage._replace(rank=stage.shadow) for stage in plan.pipelines[0]]
        if lost := [stage.layers for stage in heirs if stage.rank not in alive]:
            raise ValueError(f"layers {lost[0]} and their shadow are gone: resume from a checkpoint")
        return Plan((_shadowed(heirs),), plan.shares)
    if idea == "oobleck":
        survivors = [[stage.rank for stage in stages if stage.rank in alive] for stages in plan.pipelines]
        return _pipelines(list(filter(None, survivors)), layers, micro_batches)
    return _varuna(list(alive), layers, micro_batches)


def template(layers: int, ranks: int) -> list[tuple[int, ...]]:
    """The cut of `layers` into `ranks` stages as equal as possible, longer ones first."""
    size, longer = divmod(layers, ranks)
    starts = [s * size + min(s, longer) for s in range(ranks + 1)]
    return [tuple(range(a, b)) for a, b in zip(starts, starts[1:], strict=False)]


def _shadowed(stages: list[Stage]) -> tuple[Stage, ...]:
    """Each stage's shadow is on the nearest other rank before it, in a circle."""
    ranks = [stage.rank for stage in stages]
    before = [next((r for r in ranks[s::-1] + ranks[:s:-1] if r != ranks[s]), None) for s in range(len(ranks))]
    return tuple(stage._replace(shadow=shadow) for stage, shadow in zip(stages, before, strict=True))


def _pipelines(groups: list[list[int]], layers: int, micro_batches: int) -> Plan:
    """A pipeline on each group of ranks, with micro-batches in proportion to its ranks."""
    stages = tuple(tuple(map(Stage, ranks, template(layers, len(ranks)))) for ranks in groups)
    counts = [sum(map(len, groups[:i])) for i in range(len(groups) + 1)]
    ends = [round(count * micro_batches / counts[-1]) for count in counts]
    return Plan(stages, tuple(tuple(range(a, b)) for a, b in zip(ends, ends[1:], strict=False)))


def _varuna(alive: list[int], layers: int, micro_batches: int) -> Plan:
    """The best of all d equal pipelines of p stages on at most these ranks; one left over idles."""
    shapes = [(d, p) for d in range(1, len(alive) + 1) for p in range(1, len(alive) // d + 1)]
    fitting = [(d, p) for d, p in shapes if -(-layers // p) <= MOST_LAYERS and d <= micro_batches and p <= layers]
    if not fitting:
        raise ValueError(f"{len(alive)} ranks hold {MOST_LAYERS} layers each, but the model has {layers}")
    # GPipe's step takes (micro-batches of a pipeline + p - 1) times a stage's layers.
    d, p = min(fitting, key=lambda it: (-(-micro_batches // it[0]) + it[1] - 1) * -(-layers // it[1]))
    return _pipelines([alive[i * p : (i + 1) * p] for i in range(d)], layers, micro_batches)
