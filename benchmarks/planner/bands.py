"""The ranges of an answer: between which 8 of 10 published runs were measured, each table alike.

bands()        # {seen, unseen, doubts}: measured over predicted, by constants that left it out
witnesses()    # accelerators of which published runs were read
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from types import SimpleNamespace

from runs import MEGATRON, SOURCES, Run, runs
from scores import (
    HALVES,
    NEWER,
    NEWER_CHIPS,
    blind,
    is_stall,
    memory_bytes,
    step_s,
    without_program,
)

from aiscale.plan import published
from aiscale.plan.machines import find_machine
from aiscale.plan.search import search

Parts = Iterable[tuple[Iterable[Run], SimpleNamespace]]
#: Names of newer chips begin so.
NEW = ("b200", "gb200", "gb300", "mi3")


def bands() -> dict[str, dict[str, list[float]]]:
    """Measured over predicted: 8 of 10 runs lie between, each table weighing the same.

    Stalls are left out. Seen: others of the program were fitted, and none of the table. Doubts:
    ranges that an answer holds as well where it has experts, a chip without a published run, or
    AMD's RCCL between nodes.
    """
    seen = [(runs(source), blind(source)) for source in MEGATRON]
    seen += [
        ([run for run in runs("nanotron_sweep") if run.model.startswith(m)], blind(h))
        for h, m in HALVES.items()
    ]
    unseen = [(runs(source), without_program(source)) for source in SOURCES]
    # an unseen program is not known better
    known, new = _bands(seen, _is_plain), _bands(unseen, _is_plain)
    return {"seen": known, "unseen": _union(known, new), "doubts": _doubts(known)}


def _doubts(known: dict[str, list[float]]) -> dict[str, list[float]]:
    """By doubt and kind: of experts and of RCCL without the table, of newer chips without any."""
    parts = [(runs(source), blind(source)) for source in SOURCES]
    experts = _bands(parts, lambda run: bool(run.shape.experts))
    newer = _bands([(runs(source), blind(NEWER_CHIPS)) for source in NEWER], _is_dense_and_new)
    # only one run with experts has its memory: twice as wide, assumed
    experts["memory"] = [round(end**2, 3) for end in known["memory"]]
    found = {f"experts_{name}": ends for name, ends in experts.items()}
    found |= {f"newer_{name}": ends for name, ends in newer.items()}
    found["rccl_many_nodes"] = [_share(_rccl(), 0.1), _share(_rccl(), 0.9)]
    return found


def _rccl() -> list[list[float]]:
    """Measured over predicted of runs on AMD's GPUs over several nodes, by table.

    Dash et al. do not print their layouts: the planner's best stands for them, as in lesson 11.
    """
    forge = [
        run.step_s / step_s(run, blind("forge_frontier_throughput"))
        for run in runs("forge_frontier_throughput")
        if run.layout.gpus > run.platform.gpus_per_node
    ]
    dash, frontier = [], find_machine("frontier")
    for row in published.table("frontier_dash2023"):
        batch = 1600 if row["model"] == "1T" else 1024
        best = search(row["model"].lower(), frontier, row["gcds"] or 1024, batch).best
        dash.append(100 * best.mfu / row["pct_peak"])
    return [forge, dash]


def _is_plain(run: Run) -> bool:
    """Without experts, on a chip that many tables have: what every answer's range begins with."""
    return not run.shape.experts and not run.platform.name.startswith(NEW)


def _is_dense_and_new(run: Run) -> bool:
    return not run.shape.experts and run.platform.name.startswith(NEW)


def _union(one: dict[str, list[float]], other: dict[str, list[float]]) -> dict[str, list[float]]:
    return {
        name: [min(one[name][0], other[name][0]), max(one[name][1], other[name][1])] for name in one
    }


def _bands(parts: Parts, wanted: Callable[[Run], bool]) -> dict[str, list[float]]:
    ratios: dict[str, list[list[float]]] = defaultdict(list)
    for chosen, c in parts:
        mine: dict[str, list[float]] = {"one_node": [], "many_nodes": [], "memory": []}
        for run in filter(wanted, chosen):
            if run.step_s and not is_stall(run):
                inside = run.layout.gpus <= run.platform.gpus_per_node
                nodes = "one_node" if inside else "many_nodes"
                mine[nodes].append(run.step_s / step_s(run, c))
            if run.memory_bytes:
                mine["memory"].append(run.memory_bytes / memory_bytes(run, c))
        for name in filter(mine.get, mine):
            ratios[name].append(mine[name])
    return {name: [_share(tables, 0.1), _share(tables, 0.9)] for name, tables in ratios.items()}


def _share(tables: list[list[float]], share: float) -> float:
    """The value below which this share of the entries lies, each table weighing the same."""
    weighed = sorted((value, 1 / len(table) / len(tables)) for table in tables for value in table)
    passed = 0.0
    for value, weight in weighed:
        passed += weight
        if passed >= share:
            return round(value, 3)
    return round(weighed[-1][0], 3)


def witnesses() -> list[str]:
    """Names of the accelerators that published runs with a step time were on."""
    timed = (run for source in SOURCES for run in runs(source) if run.step_s)
    return sorted({run.platform.name for run in timed})
