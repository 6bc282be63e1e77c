"""Fitting the constants: a coordinate search over those with a range, the same on every machine and at every run.

    fitted = fit(rows_of(["internevo_7b", ...]))     # {name: value}
    fit_all()                                        # fitted on all, and with each source left out

A source counts as the root of its rows, 100 at most, so the large sweep does not drown the others; of a long table a
fixed part of the rows is used. A charge for the distance from the prior holds what the rows hardly tell, but for the
host's launches, which one source alone shows. A run measured at over STALL times the prediction does not pull
(`validate` says why): an error beyond CAP counts as CAP.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from types import SimpleNamespace

from aiscale.plan.constants import FILE, FITTED, TABLE, constants
from aiscale.plan.memory import capacity_bytes, needed_bytes, peak_bytes
from aiscale.plan.runs import SOURCES, Run, runs
from aiscale.plan.step import step_seconds

STALL = 2.5
CAP = math.log(STALL)
MOST_ROWS = 100
CHARGE = 0.03
ROUNDS = 4
MEMORY = (
    "stream_bytes", "gated_bytes", "gelu_bytes", "undivided_bytes", "logit_bytes_held", "allocator", "base_bytes",
    "smi_cache",
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
    weights = [min(len(part), 100) ** 0.5 for part in rows]
    means = [sum(error(run, c) for run in part) / len(part) for part in rows]
    charged = MEMORY if what == "memory" else (name for name in TIME if not name.startswith("launch"))
    charge = sum(_distance(name, getattr(c, name)) ** 2 for name in charged)
    return sum(map(float.__mul__, weights, means)) / max(1.0, sum(weights)) + CHARGE * charge


def _time_error(run: Run, c: SimpleNamespace) -> float:
    predicted = step_seconds(run.shape, run.layout, run.platform, c).total_s
    return min(CAP, abs(math.log(predicted / run.step_s)))


def _memory_error(run: Run, c: SimpleNamespace) -> float:
    if run.memory_bytes:
        predicted = peak_bytes(run.shape, run.layout, run.platform, c, 0 if run.first_stage else None)
        return min(CAP, abs(math.log(predicted / run.memory_bytes)))
    needed = needed_bytes(run.shape, run.layout, run.platform, c)  # all that is known is that it fitted
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
    for line in FILE.read_text(encoding="utf-8").partition("\n[left_out.")[0].splitlines():
        name = line[11:-1] if line.startswith("[constants.") else None if line.startswith("[") else name
        lines.append(f"value = {whole[name]!r}" if line.startswith("value = ") and name in whole else line)
    for source, values in parts.items():
        lines += ["", f'[left_out."{source}"]', *(f"{key} = {value!r}" for key, value in values.items())]
    return "\n".join(lines).rstrip() + "\n"
