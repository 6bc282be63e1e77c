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

import json
import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import correlation, fmean, median
from types import SimpleNamespace

from aiscale.config import ConfigError
from aiscale.plan.constants import CONSTANTS, FILE, FITTED, TABLE, constants
from aiscale.plan.memory import capacity_bytes, fits, needed_bytes, peak_bytes
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


def _errors(chosen: Iterable[Run], c: SimpleNamespace) -> dict[str, list]:
    """What these runs add to a score: errors, whether each was said to run, (rank correlation, layouts) of models."""
    found: dict[str, list] = {name: [] for name in ("ran", "crashed", "step", "all steps", "memory", "ranks")}
    layouts: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for run in chosen:
        found["ran" if run.ran else "crashed"].append(said_to_run(run, c))
        if run.memory_bytes:
            predicted = peak_bytes(run.shape, run.layout, c, 0 if run.first_stage else None)
            found["memory"].append(abs(predicted / run.memory_bytes - 1))
        if run.step_s:
            predicted = step_seconds(run.shape, run.layout, run.platform, c).total_s
            found["all steps"].append(abs(predicted / run.step_s - 1))
            if not is_stall(run):
                found["step"].append(found["all steps"][-1])
                layouts[run.model].append((predicted, run.step_s))
    found["ranks"] = [(spearman(pairs), len(pairs)) for pairs in layouts.values() if len(pairs) >= LEAST_RANKED]
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


def _score(source: str, parts: list[dict[str, list]]) -> Score:
    def joined(name: str) -> list:
        return [value for part in parts for value in part[name]]

    def percent(values: list, middle) -> float | None:
        return round(100 * middle(values), 1) if values else None

    step, every, memory, ranks = (joined(name) for name in ("step", "all steps", "memory", "ranks"))
    ran, crashed = joined("ran"), joined("crashed")
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
        ran_said_to_fit_pct=percent(ran, fmean),
        crashed_said_not_to_pct=None if not crashed else round(100 - 100 * fmean(crashed), 1),
        rank_correlation=round(sum(r * n for r, n in ranks) / sum(n for _, n in ranks), 3) if ranks else None,
    )


def spearman(pairs: list[tuple[float, float]]) -> float:
    """Correlation of ranks; equal values share their mean rank."""
    first, second = (_ranks([pair[i] for pair in pairs]) for i in (0, 1))
    return correlation(first, second) if min(len(set(first)), len(set(second))) > 1 else 0.0


def _ranks(values: list[float]) -> list[float]:
    order = sorted(values)
    return [(bisect_left(order, value) + 1 + bisect_right(order, value)) / 2 for value in values]


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


NOTE = (
    "step, memory: median and mean |predicted / measured - 1| in %; stalls: runs over 2.5 times what the shipped\n"
    "constants predict, left out of step and mean, counted in `stalls in`; ran fit, crash not: share of runs that ran\n"
    "and were said to fit, of crashed ones said not to; rank: Spearman's correlation of layouts of one model."
)


# Fitting the constants ------------------------------------------------------------------------------------------------
# A coordinate search over those with a range, the same on every machine and at every run. A source counts as the root
# of its rows, 100 at most, so the large sweep does not drown the others; of a long table a fixed part of the rows is
# used. A charge for the distance from the prior holds what the rows hardly tell, but for the host's launches, which
# one source alone shows. A stall does not pull: an error beyond CAP counts as CAP.


STALL = 2.5
CAP = math.log(STALL)
MOST_ROWS = 100
CHARGE = 0.03
ROUNDS = 4
MEMORY = (
    "stream_bytes", "gated_bytes", "gelu_bytes", "undivided_bytes", "gathered_bytes", "ends_kept", "logit_bytes_held",
    "allocator", "base_bytes", "smi_cache",
)  # fmt: skip
TIME = tuple(name for name in FITTED if name not in MEMORY)
#: The two models of the large sweep, to leave out one and keep the other: no other source has a host-bound pipeline.
HALVES = {"nanotron_sweep 1B": "16 layers", "nanotron_sweep 8B": "32 layers"}

Rows = dict[str, list[list[Run]]]


def rows_of(sources: Iterable[str], without: str = "") -> Rows:
    """The rows that are fitted, of each source, for time and for memory; `without` the models whose name begins so."""
    chosen: Rows = {"time": [], "memory": []}
    for source in sources:
        ran = [run for run in runs(source) if run.ran and not (without and run.model.startswith(without))]
        for what, rows in (("time", [run for run in ran if run.step_s]), ("memory", ran)):
            if rows:
                chosen[what].append(rows[:: -(-len(rows) // MOST_ROWS)])
    return chosen


def fit(rows: Rows) -> dict[str, float]:
    """Start at each constant's prior, a count or another's benchmark, and walk along one constant after another, with a
    shorter stride each round. What no run depends on stays at its prior."""
    values = {name: TABLE["constants"][name]["prior"] for name in FITTED}
    for what, names in (("time", TIME), ("memory", MEMORY)):
        best = loss(rows[what], constants(**values), what)
        for round_ in range(ROUNDS):
            for name in names:
                best = _walk(rows[what], values, name, 0.16 / 2**round_, best, what)
    return {name: float(f"{value:.4g}") for name, value in values.items()}


def _walk(rows: list[list[Run]], values: dict[str, float], name: str, stride: float, best: float, what: str) -> float:
    """Move one constant by strides of its range as long as the loss falls; returns the loss."""
    low, high = TABLE["constants"][name]["range"]
    for way in (1, -1):
        while True:
            moved = min(high, max(low, values[name] + way * stride * (high - low)))
            tried = loss(rows, constants(**values | {name: moved}), what) if moved != values[name] else best
            if tried >= best - 1e-6:
                break
            values[name], best = moved, tried
    return best


def loss(rows: list[list[Run]], c: SimpleNamespace, what: str) -> float:
    """Weighted mean over sources of the mean capped |log(predicted / measured)|, and the charge."""
    error = _time_error if what == "time" else _memory_error
    weights = [len(part) ** 0.5 for part in rows]
    means = [sum(error(run, c) for run in part) / len(part) for part in rows]
    charged = MEMORY if what == "memory" else (name for name in TIME if not name.startswith("launch"))
    charge = sum(_distance(name, getattr(c, name)) ** 2 for name in charged)
    return sum(map(float.__mul__, weights, means)) / max(1.0, sum(weights)) + CHARGE * charge


def _time_error(run: Run, c: SimpleNamespace) -> float:
    predicted = step_seconds(run.shape, run.layout, run.platform, c).total_s
    return min(CAP, abs(math.log(predicted / run.step_s)))


def _memory_error(run: Run, c: SimpleNamespace) -> float:
    if run.memory_bytes:
        predicted = peak_bytes(run.shape, run.layout, c, 0 if run.first_stage else None)
        return min(CAP, abs(math.log(predicted / run.memory_bytes)))
    needed = needed_bytes(run.shape, run.layout, c)  # all that is known is that it fitted
    return min(CAP, max(0.0, math.log(needed / capacity_bytes(run.platform, run.layout, c))))


def _distance(name: str, value: float) -> float:
    row = TABLE["constants"][name]
    return (value - row["prior"]) / (row["range"][1] - row["range"][0])


def fit_all() -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """The constants fitted on all sources, and on all but each source or half of the large one."""
    parts = {source: fit(rows_of(other for other in SOURCES if other != source)) for source in SOURCES}
    parts |= {half: fit(rows_of(SOURCES, without=model)) for half, model in HALVES.items()}
    return fit(rows_of(SOURCES)), parts


def written(whole: dict[str, float], parts: dict[str, dict[str, float]]) -> str:
    """constants.toml with these values."""
    lines, name = [], None
    for line in FILE.read_text(encoding="utf-8").splitlines():
        name = line[11:-1] if line.startswith("[constants.") else None if line.startswith("[") else name
        if line.startswith("left_out = "):
            lines.append(f"left_out = {json.dumps(list(parts))}")
        elif name in whole and line.startswith("value = "):
            lines.append(f"value = {whole[name]!r}")
            lines.append(f"without = {[values[name] for values in parts.values()]}")
        elif not line.startswith("without = "):
            lines.append(line)
    return "\n".join(lines) + "\n"
