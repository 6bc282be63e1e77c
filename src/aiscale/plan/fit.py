"""Fitting the constants: a coordinate search over those with a range, the same on every machine and at every run.

    fitted = fit(["internevo_7b", ...])         # {name: value}
    fit_all()                                   # with every source, and with each left out: what constants.toml stores

A source counts as the root of its rows, 100 at most, so the large sweep does not drown the others; of a long table a
fixed part of the rows is used. A small charge for the distance from the prior keeps what the rows hardly tell. A run measured at over STALL times the prediction does not pull (`validate` says why), and an error beyond CAP
counts as CAP: a fault in a row cannot bend a constant.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from aiscale.plan.constants import FILE, FITTED, TABLE, constants
from aiscale.plan.memory import capacity_bytes, needed_bytes, peak_bytes
from aiscale.plan.sources import SOURCES, runs
from aiscale.plan.step import step_seconds

STALL = 2.5
CAP = math.log(STALL)
MOST_ROWS = 100
CHARGE = 0.003
MEMORY = (
    "stream_bytes",
    "gated_bytes",
    "gelu_bytes",
    "undivided_bytes",
    "logit_bytes_held",
    "allocator",
    "base_bytes",
    "smi_cache",
)
TIME = tuple(name for name in FITTED if name not in MEMORY)


def _chosen(source: str, what: str) -> list:
    rows = [run for run in runs(source) if run.ran and (run.step_s or what == "memory_bytes")]
    return rows[:: -(-len(rows) // MOST_ROWS)] if rows else []


def loss(sources: Iterable[str], c, what: str) -> float:
    """Weighted mean over sources of the mean capped |log(predicted / measured)|, and the charge."""
    errors = weights = 0.0
    for source in sources:
        rows = _CHOSEN[what][source]
        if rows:
            weight = min(len(rows), 100) ** 0.5
            weights += weight
            errors += weight * sum(_error(run, c, what) for run in rows) / len(rows)
    names = MEMORY if what == "memory_bytes" else TIME
    charge = sum(_distance(name, getattr(c, name)) ** 2 for name in names)
    return errors / max(weights, 1e-9) + CHARGE * charge


def _distance(name: str, value: float) -> float:
    row = TABLE["constants"][name]
    return (value - row["prior"]) / (row["range"][1] - row["range"][0])


def _error(run, c, what: str) -> float:
    if what == "step_s":
        predicted = step_seconds(run.shape, run.layout, run.platform, c).total_s
        return min(CAP, abs(math.log(predicted / run.step_s)))
    if not run.memory_bytes:  # all that is known is that it fitted
        needed = needed_bytes(run.shape, run.layout, run.platform, c)
        return min(CAP, max(0.0, math.log(needed / capacity_bytes(run.platform, run.layout, c))))
    predicted = peak_bytes(run.shape, run.layout, run.platform, c, 0 if run.first_stage else None)
    return min(CAP, abs(math.log(predicted / run.memory_bytes)))


_CHOSEN = {what: {source: _chosen(source, what) for source in SOURCES} for what in ("step_s", "memory_bytes")}


def fit(sources: Iterable[str], rounds: int = 4) -> dict[str, float]:
    """Start at each constant's prior, which no run of the tables has seen, and walk along one constant after another,
    with a shorter stride each round. What no run of the sources depends on stays at its prior."""
    sources = list(sources)
    values = {name: TABLE["constants"][name]["prior"] for name in FITTED}
    for what, names in (("step_s", TIME), ("memory_bytes", MEMORY)):
        best = loss(sources, constants(**values), what)
        stride = 0.16
        for _ in range(rounds):
            for name in names:
                low, high = TABLE["constants"][name]["range"]
                for way in (1, -1):
                    while True:
                        moved = min(high, max(low, values[name] + way * stride * (high - low)))
                        if moved == values[name]:
                            break
                        tried = loss(sources, constants(**values | {name: moved}), what)
                        if tried >= best - 1e-6:
                            break
                        values[name], best = moved, tried
            stride /= 2
    return {name: float(f"{value:.4g}") for name, value in values.items()}


def fit_all() -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """The constants fitted on all sources, and on all but each: only the values that differ."""
    whole = fit(SOURCES)
    parts = {source: fit([other for other in SOURCES if other != source]) for source in SOURCES}
    return whole, parts


def written(whole: dict[str, float], parts: dict[str, dict[str, float]]) -> str:
    """constants.toml with these values."""
    lines, name = [], None
    for line in FILE.read_text(encoding="utf-8").partition("\n[left_out.")[0].splitlines():
        name = line[11:-1] if line.startswith("[constants.") else None if line.startswith("[") else name
        lines.append(f"value = {whole[name]!r}" if line.startswith("value = ") and name in whole else line)
    for source, values in parts.items():
        lines += ["", f"[left_out.{source}]", *(f"{key} = {value!r}" for key, value in values.items())]
    return "\n".join(lines).rstrip() + "\n"
