"""Errors of the planner on published runs: one row a table, by constants that left it out.

    scoreboard(blind)                # constants fitted without the table that they predict
    scoreboard(without_program)      # without any run of its program
    halves()                         # each model of the large sweep, without that model

A *stall* is a run measured at over 2.5 times what the package's constants predict, when no stalled
neighbour is counted. Stalls are never fitted. Each score stands twice, without them and with them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from statistics import fmean, median
from types import SimpleNamespace

from runs import MEGATRON, SOURCES, Run, runs
from scipy.stats import spearmanr

from aiscale.errors import ConfigError
from aiscale.plan.constants import constants
from aiscale.plan.memory import fits, peak_bytes
from aiscale.plan.step import step_seconds

#: {what was left out: the constants fitted without it}
LEFT_OUT = Path(__file__).parent / "left_out.json"
#: The two models of the large sweep, to leave out one and keep the other: no other source has a
#: host-bound pipeline.
HALVES = {"nanotron_sweep 1B": "16 layers", "nanotron_sweep 8B": "32 layers"}
#: the name in left_out.json of the fit without any of them
FAMILY = "Megatron-LM and its descendants"
#: Tables of B200, GB200, GB300, MI325X and MI355X, and the name of the fit without any of them.
NEWER = ("megatron_bridge", "nemo_2025", "primus_mi300")
NEWER_CHIPS = "newer chips"
OVERALL = "median over sources"
STALL = 2.5
WITHOUT_WAITS = constants(neighbour_wait_s=0.0)
COUNTS = ("runs", "timed", "stalls", "memory_runs")
LEAST_RANKED = 5  #: layouts of one model that are worth ranking


@dataclass(frozen=True, kw_only=True)
class Score:
    """Errors are |predicted / measured - 1| in percent; None without such runs."""

    source: str
    runs: int
    timed: int
    stalls: int
    step_median_pct: float | None
    step_mean_pct: float | None
    step_with_stalls_pct: float | None  #: median
    memory_runs: int
    memory_median_pct: float | None
    memory_mean_pct: float | None
    ran_predicted_to_fit_pct: float | None
    crashed_predicted_not_to_pct: float | None
    rank_correlation: float | None  #: Spearman's, of the layouts of one model, mean over models


@lru_cache
def blind(part: str) -> SimpleNamespace:
    """Constants fitted without this source, Megatron's family, or half of the sweep."""
    return constants(**json.loads(LEFT_OUT.read_text())[part])


def without_program(source: str) -> SimpleNamespace:
    """The constants fitted without any run of the program that ran this source."""
    return blind(FAMILY if source in MEGATRON else source)


def scoreboard(fitted: Callable[[str], SimpleNamespace]) -> list[Score]:
    """One row a source, predicted by the constants that `fitted` returns, and their medians."""
    rows = [_score(source, _errors(runs(source), fitted(source))) for source in SOURCES]
    whole = {"source": OVERALL} | {name: sum(getattr(row, name) for row in rows) for name in COUNTS}
    for name in (f.name for f in fields(Score) if f.name not in whole):
        whole[name] = round(
            median(value for row in rows if (value := getattr(row, name)) is not None), 3
        )
    return [*rows, Score(**whole)]


def halves() -> list[Score]:
    """Each model of the large sweep, by constants that saw the other one and all other sources."""
    sweep = runs("nanotron_sweep")
    chosen = {
        half: [run for run in sweep if run.model.startswith(model)]
        for half, model in HALVES.items()
    }
    return [_score(half, _errors(rows, blind(half))) for half, rows in chosen.items()]


def _errors(chosen: Iterable[Run], c: SimpleNamespace) -> dict[str, list]:
    """What these runs add to a score: errors, which would run, (rank correlation, layouts)."""
    errors: dict[str, list] = {
        name: [] for name in ("ran", "crashed", "step", "all steps", "memory", "ranks")
    }
    layouts: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for run in chosen:
        errors["ran" if run.ran else "crashed"].append(would_run(run, c))
        if run.memory_bytes:
            errors["memory"].append(abs(memory_bytes(run, c) / run.memory_bytes - 1))
        if run.step_s:
            predicted = step_s(run, c)
            errors["all steps"].append(abs(predicted / run.step_s - 1))
            if not is_stall(run):
                errors["step"].append(errors["all steps"][-1])
                layouts[run.model].append((predicted, run.step_s))
    ranked = [pairs for pairs in layouts.values() if len(pairs) >= LEAST_RANKED]
    errors["ranks"] = [
        (spearmanr(*zip(*pairs, strict=True)).statistic, len(pairs)) for pairs in ranked
    ]
    return errors


def would_run(run: Run, c: SimpleNamespace) -> bool:
    """Whether the planner takes the layout, and predicts that it fits."""
    try:
        run.layout.check(run.shape)
    except ConfigError:
        return False
    return fits(run.shape, run.layout, run.platform, c)


def step_s(run: Run, c: SimpleNamespace) -> float:
    return step_seconds(run.shape, run.layout, run.platform, c).total_s


def memory_bytes(run: Run, c: SimpleNamespace) -> float:
    return peak_bytes(run.shape, run.layout, c, 0 if run.first_stage else None)


@lru_cache(maxsize=8192)
def is_stall(run: Run) -> bool:
    """Whether it took over 2.5 times what the package's constants say, without such waits."""
    return bool(run.step_s) and run.step_s > STALL * step_s(run, WITHOUT_WAITS)


def _score(source: str, errors: dict[str, list]) -> Score:
    def percent(values: list, middle) -> float | None:
        return round(100 * middle(values), 1) if values else None

    step, every, memory, ranks = (errors[name] for name in ("step", "all steps", "memory", "ranks"))
    ran, crashed = errors["ran"], errors["crashed"]
    return Score(
        source=source,
        runs=len(ran) + len(crashed),
        timed=len(every),
        stalls=len(every) - len(step),
        step_median_pct=percent(step, median),
        step_mean_pct=percent(step, fmean),
        step_with_stalls_pct=percent(every, median),
        memory_runs=len(memory),
        memory_median_pct=percent(memory, median),
        memory_mean_pct=percent(memory, fmean),
        ran_predicted_to_fit_pct=percent(ran, fmean),
        crashed_predicted_not_to_pct=None if not crashed else round(100 - 100 * fmean(crashed), 1),
        rank_correlation=round(float(sum(r * n for r, n in ranks) / sum(n for _, n in ranks)), 3)
        if ranks
        else None,
    )
