"""Regret: seconds of the layout that the planner chooses over those of the best measured one.

    groups("nanotron_sweep", blind("nanotron_sweep"))    # layouts of one model, devices and batch
    regret(blind)                                        # {table: groups, right choices, worst}

A group has at least five runs. Chosen is the fastest predicted one of those that were measured,
stalled or not: whoever follows the planner gets the run that its layout got.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace

from runs import Run, runs
from scores import LEAST_RANKED, is_stall, step_s

from aiscale.plan.regret import RIGHT, Group, of_choice, summary

TABLES = ("nanotron_sweep", "bloom_176b_topology_sweep", "vtrain_dgx_a100")


def groups(source: str, c: SimpleNamespace) -> list[Group]:
    found = []
    for name, chosen in _by_group(source).items():
        found.append(
            Group(
                name=name,
                layouts=tuple(run.layout.name() for run in chosen),
                measured_s=tuple(_digits(run.step_s) for run in chosen),
                predicted_s=tuple(_digits(step_s(run, c)) for run in chosen),
            )
        )
    return found


def _by_group(source: str) -> dict[str, list[Run]]:
    layouts: dict[str, list[Run]] = defaultdict(list)
    for run in runs(source):
        if run.step_s:
            where = f"{run.layout.gpus} GPUs, batch {run.layout.global_batch}"
            layouts[f"{run.model.partition(',')[0]}, {where}"].append(run)
    return {name: chosen for name, chosen in layouts.items() if len(chosen) >= LEAST_RANKED}


def regret(fitted: Callable[[str], SimpleNamespace]) -> dict[str, dict[str, float]]:
    """By table; `stalled`: wrong choices whose run stalled."""
    found = {}
    for source in TABLES:
        mine = groups(source, fitted(source))
        regrets = [of_choice(group, group.planned) for group in mine]
        found[source] = {
            **{name: round(value, 3) for name, value in summary(regrets).items()},
            "stalled": sum(
                _chose_a_stall(source, group)
                for group, value in zip(mine, regrets, strict=True)
                if value > RIGHT
            ),
        }
    return found


def _chose_a_stall(source: str, group: Group) -> bool:
    runs_of_it = [
        run for run in _by_group(source)[group.name] if run.layout.name() == group.planned
    ]
    return all(is_stall(run) for run in runs_of_it)


def _digits(value: float) -> float:
    return float(f"{value:.4g}")
