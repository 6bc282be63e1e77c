"""The scoreboard: predictions against every published run, overall and per source, each source left out of the fit.

    board = scoreboard()                 # rows of Score, the last one overall; fitted without each row's source
    scoreboard(left_out=False)           # the constants as shipped, fitted on all
    print(page(board))

A *stall* is a run measured at over 2.5 times what the shipped constants predict: in nanotron's sweep a fifth of the
runs, mostly pipelines, waits about a second a micro-batch whatever the work, and exact repeats differ by up to 400 %.
Stalls are chosen by the shipped constants in both scoreboards, counted, never fitted and left out of the errors; the
column beside gives the error with them. A run fits if the predicted peak is at most what its device holds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from statistics import fmean, median
from types import SimpleNamespace

from aiscale.config import ConfigError
from aiscale.plan.constants import CONSTANTS, constants
from aiscale.plan.fit import HALVES, STALL
from aiscale.plan.memory import fits, peak_bytes
from aiscale.plan.runs import SOURCES, Run, runs
from aiscale.plan.step import step_seconds

LEAST_RANKED = 5


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
    ran_said_to_fit_pct: float | None
    crashed_said_not_to_pct: float | None
    rank_correlation: float | None  #: Spearman's, of the layouts of one model, mean over models


@dataclass
class _Errors:
    """What one source adds to the overall figures."""

    runs: int
    step: list[float]
    all_steps: list[float]
    memory: list[float]
    ran: list[bool]
    crashed: list[bool]
    ranks: list[tuple[float, int]]


def scoreboard(left_out: bool = True) -> list[Score]:
    """One row a source, then those pooled over the runs of all sources but the large sweep, and of all."""
    parts = {source: _errors(runs(source), constants(source) if left_out else CONSTANTS) for source in SOURCES}
    rows = [_score(source, [errors]) for source, errors in parts.items()]
    others = [errors for source, errors in parts.items() if source != "nanotron_sweep"]
    return [*rows, _score("all but nanotron's sweep", others), _score("overall", list(parts.values()))]


def halves() -> list[Score]:
    """Each model of the large sweep, predicted by constants that saw the other model and all other sources."""
    scores = []
    for half, model in HALVES.items():
        chosen = [run for run in runs(half.split()[0]) if run.model.startswith(model)]
        scores.append(_score(half, [_errors(chosen, constants(half))]))
    return scores


def _errors(chosen: Iterable[Run], c: SimpleNamespace) -> _Errors:
    chosen = list(chosen)
    found = _Errors(len(chosen), [], [], [], [], [], [])
    layouts: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for run in chosen:
        peak = peak_bytes(run.shape, run.layout, run.platform, c)
        (found.ran if run.ran else found.crashed).append(said_to_run(run, c))
        if run.memory_bytes:
            first = peak_bytes(run.shape, run.layout, run.platform, c, 0) if run.first_stage else peak
            found.memory.append(abs(first / run.memory_bytes - 1))
        if run.step_s:
            predicted = step_seconds(run.shape, run.layout, run.platform, c).total_s
            found.all_steps.append(abs(predicted / run.step_s - 1))
            if not is_stall(run):
                found.step.append(found.all_steps[-1])
                layouts[run.model].append((predicted, run.step_s))
    found.ranks = [(spearman(pairs), len(pairs)) for pairs in layouts.values() if len(pairs) >= LEAST_RANKED]
    return found


def said_to_run(run: Run, c: SimpleNamespace) -> bool:
    """Whether the planner takes the layout, and finds room for it."""
    try:
        run.layout.check(run.shape)
    except ConfigError:
        return False
    return fits(run.shape, run.layout, run.platform, c)


def is_stall(run: Run) -> bool:
    predicted = step_seconds(run.shape, run.layout, run.platform, CONSTANTS).total_s
    return bool(run.step_s) and run.step_s > STALL * predicted


def _score(source: str, parts: list[_Errors]) -> Score:
    def joined(name: str) -> list:
        return [value for part in parts for value in getattr(part, name)]

    def percent(values: list, middle) -> float | None:
        return round(100 * middle(values), 1) if values else None

    step, every, memory, ranks = (joined(name) for name in ("step", "all_steps", "memory", "ranks"))
    crashed = joined("crashed")
    return Score(
        source=source,
        runs=sum(part.runs for part in parts),
        timed=len(every),
        stalls=len(every) - len(step),
        step_median_pct=percent(step, median),
        step_mean_pct=percent(step, fmean),
        step_with_stalls_pct=percent(every, median),
        memory_runs=len(memory),
        memory_median_pct=percent(memory, median),
        memory_mean_pct=percent(memory, fmean),
        ran_said_to_fit_pct=percent(joined("ran"), fmean),
        crashed_said_not_to_pct=None if not crashed else round(100 - 100 * fmean(crashed), 1),
        rank_correlation=round(sum(r * n for r, n in ranks) / sum(n for _, n in ranks), 3) if ranks else None,
    )


def spearman(pairs: list[tuple[float, float]]) -> float:
    """Correlation of ranks; equal values share their mean rank."""
    first, second = (_ranks([pair[i] for pair in pairs]) for i in (0, 1))
    middle = (len(pairs) + 1) / 2
    over = sum((a - middle) * (b - middle) for a, b in zip(first, second, strict=True))
    spread = [sum((a - middle) ** 2 for a in ranks) for ranks in (first, second)]
    return over / (spread[0] * spread[1]) ** 0.5 if min(spread) else 0.0


def _ranks(values: list[float]) -> list[float]:
    order = sorted(values)
    first = {}
    last = {}
    for rank, value in enumerate(order, 1):
        first.setdefault(value, rank)
        last[value] = rank
    return [(first[value] + last[value]) / 2 for value in values]


def page(rows: list[Score]) -> str:
    """The scoreboard as a table for a terminal."""
    titles = ("runs", "stalls", "step", "mean", "stalls in", "memory", "mean", "ran fit", "crash not", "rank")
    lines = [f"{'median |error| in %':34}" + "".join(f"{title:>10}" for title in titles)]
    for row in rows:
        cells = (
            row.runs, row.stalls, row.step_median_pct, row.step_mean_pct, row.step_with_stalls_pct,
            row.memory_median_pct, row.memory_mean_pct, row.ran_said_to_fit_pct, row.crashed_said_not_to_pct,
            row.rank_correlation,
        )  # fmt: skip
        lines.append(f"{row.source:34}" + "".join(f"{'-' if cell is None else cell:>10}" for cell in cells))
    return "\n".join(lines)


def as_json(rows: list[Score]) -> list[dict]:
    return [asdict(row) for row in rows]


NOTE = (
    "step, memory: median and mean |predicted / measured - 1| in %; stalls: runs over 2.5 times what the shipped\n"
    "constants predict, left out of step and mean, counted in `stalls in`; ran fit, crash not: share of runs that ran\n"
    "and were said to fit, of crashed ones said not to; rank: Spearman's correlation of layouts of one model."
)
