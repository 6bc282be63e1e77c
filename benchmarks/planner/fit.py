"""Fits the planner's constants to the published runs, on all sources and without each of them.

    python benchmarks/planner/fit.py     # twenty-four fits in four minutes

It writes constants.toml and left_out.json. Then `scoreboard.py --store` says what it changed. A
coordinate search over the constants that have a range, each from its prior: the same values on
every machine and at every run, which `tests/test_plan.py` checks. scipy's Powell ends within 1 % of
the same loss, in eight times the time.

A source counts as the root of its rows, of at most `MOST_ROWS`, so the large sweep does not drown
the others; of a long table a fixed part of the rows is used. A charge for the distance from the
prior keeps a constant there if few rows depend on it, but for those that one source alone shows. An
error beyond CAP counts as CAP: a stall does not pull.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from multiprocessing import Pool
from types import SimpleNamespace

from runs import MEGATRON, SOURCES, Run, runs
from scores import FAMILY, HALVES, LEFT_OUT, NEWER, NEWER_CHIPS, STALL, step_s

from aiscale.plan.constants import FILE, TABLE, constants
from aiscale.plan.memory import capacity_bytes, needed_bytes, peak_bytes

CAP = math.log(STALL)
MOST_ROWS = {"time": 60, "memory": 100}
CHARGE = 0.03
ROUNDS = 4
FITTED = tuple(name for name, row in TABLE["constants"].items() if "range" in row)
MEMORY = (
    "stream_bytes",
    "gated_bytes",
    "gelu_bytes",
    "undivided_bytes",
    "gathered_bytes",
    "ends_kept",
    "logit_bytes_held",
    "allocator",
    "base_bytes",
    "smi_cache",
)
TIME = tuple(name for name in FITTED if name not in MEMORY)
#: without a charge: one source alone shows them
FREE = ("further_node_s", "launch_peer_s", "neighbour_wait_s")


def rows_of(sources: Iterable[str], without: str = "") -> dict[str, list[list[Run]]]:
    """The rows of each source that are fitted, for time and for memory.
    `without` leaves out models whose name begins so."""
    chosen: dict[str, list[list[Run]]] = {"time": [], "memory": []}
    for source in sources:
        ran = [
            run
            for run in runs(source)
            if run.ran and not (without and run.model.startswith(without))
        ]
        timed = [run for run in ran if run.step_s]
        held = [run for run in ran if run.memory_bytes or run.memory_known]
        for what, rows in (("time", timed), ("memory", held)):
            if rows:
                chosen[what].append(rows[:: -(-len(rows) // MOST_ROWS[what])])
    return chosen


def fit(rows: dict[str, list[list[Run]]]) -> dict[str, float]:
    """Start at each constant's prior, and move one constant after another.

    A prior is a count or another's benchmark. Strides get shorter each round. What no run depends
    on stays at its prior.
    """
    values = {name: TABLE["constants"][name]["prior"] for name in FITTED}
    for what, names in (("time", TIME), ("memory", MEMORY)):
        errors = Errors(rows[what], what, values)
        for round_ in range(ROUNDS):
            for name in names:
                errors.walk(values, name, 0.16 / 2**round_)
    return {name: float(f"{value:.4g}") for name, value in values.items()}


class Errors:
    """The error of each run by the values so far; a move computes only those that it touches."""

    def __init__(self, rows: list[list[Run]], what: str, values: dict[str, float]) -> None:
        self.rows, self.what = rows, what
        self.weights = [len(part) ** 0.5 for part in rows]
        self.touched = touches([run for part in rows for run in part], what)
        c = constants(**values)
        self.errors = [[error_of(run, c, what) for run in part] for part in rows]
        self.best = self.loss(self.errors, values)

    def loss(self, errors: list[list[float]], values: dict[str, float]) -> float:
        """Weighted mean over sources of the mean capped |log(predicted / measured)|, and charge."""
        means = [sum(part) / len(part) for part in errors]
        charged = MEMORY if self.what == "memory" else (name for name in TIME if name not in FREE)
        charge = sum(_distance(name, values[name]) ** 2 for name in charged)
        whole = sum(map(float.__mul__, self.weights, means)) / max(1.0, sum(self.weights))
        return whole + CHARGE * charge

    def walk(self, values: dict[str, float], name: str, stride: float) -> None:
        """Move one constant by strides of its range as long as the loss falls."""
        low, high = TABLE["constants"][name]["range"]
        for way in (1, -1):
            while True:
                moved = min(high, max(low, values[name] + way * stride * (high - low)))
                if moved == values[name]:
                    break
                tried = values | {name: moved}
                errors = self.after(tried, name)
                if (found := self.loss(errors, tried)) >= self.best - 1e-6:
                    break
                values[name], self.errors, self.best = moved, errors, found

    def after(self, values: dict[str, float], name: str) -> list[list[float]]:
        c, touched = constants(**values), self.touched[name]
        return [
            [
                error_of(run, c, self.what) if id(run) in touched else error
                for run, error in zip(part, errors, strict=True)
            ]
            for part, errors in zip(self.rows, self.errors, strict=True)
        ]


def touches(runs_of_it: list[Run], what: str) -> dict[str, set[int]]:
    """{constant: ids of the runs whose prediction it can change}.

    Most constants concern few runs: experts, fp8, or one program. It is asked at the priors, and
    without the host. A run that only the fitted host binds is missed for the host's constants.
    """
    priors = {name: TABLE["constants"][name]["prior"] for name in FITTED}
    no_host = dict.fromkeys((name for name in FITTED if name.startswith("launch")), 0.0)
    found: dict[str, set[int]] = {}
    for name in TIME if what == "time" else MEMORY:
        low, high = TABLE["constants"][name]["range"]
        found[name] = set()
        for base in (priors, priors | no_host):
            ends = [constants(**base | {name: value}) for value in (low, high)]
            for run in runs_of_it:
                if _predicted(run, ends[0], what) != _predicted(run, ends[1], what):
                    found[name].add(id(run))
    return found


def _predicted(run: Run, c: SimpleNamespace, what: str) -> float:
    if what == "time":
        return step_s(run, c)
    return needed_bytes(run.shape, run.layout, c) + _peak(run, c)


def _peak(run: Run, c: SimpleNamespace) -> float:
    return peak_bytes(run.shape, run.layout, c, 0 if run.first_stage else None)


def error_of(run: Run, c: SimpleNamespace, what: str) -> float:
    return _time_error(run, c) if what == "time" else _memory_error(run, c)


def _time_error(run: Run, c: SimpleNamespace) -> float:
    return min(CAP, abs(math.log(step_s(run, c) / run.step_s)))


def _memory_error(run: Run, c: SimpleNamespace) -> float:
    if run.memory_bytes:
        return min(CAP, abs(math.log(_peak(run, c) / run.memory_bytes)))
    # its memory was not published, only that it fitted
    needed = needed_bytes(run.shape, run.layout, c)
    return min(CAP, max(0.0, math.log(needed / capacity_bytes(run.platform, run.layout, c))))


def _distance(name: str, value: float) -> float:
    row = TABLE["constants"][name]
    return (value - row["prior"]) / (row["range"][1] - row["range"][0])


def fit_without(part: str) -> dict[str, float]:
    """Without a source, Megatron's family, newer chips or half of the sweep; "": with all."""
    if part in HALVES:
        return fit(rows_of(SOURCES, without=HALVES[part]))
    out = {FAMILY: MEGATRON, NEWER_CHIPS: NEWER}.get(part, (part,))
    return fit(rows_of(source for source in SOURCES if source not in out))


def written(values: dict[str, float]) -> str:
    """constants.toml with these values."""
    lines, name = [], None
    for line in FILE.read_text(encoding="utf-8").splitlines():
        name = (
            line[11:-1]
            if line.startswith("[constants.")
            else None
            if line.startswith("[")
            else name
        )
        lines.append(
            f"value = {values[name]!r}" if name in values and line.startswith("value = ") else line
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parts = ["", *SOURCES, FAMILY, NEWER_CHIPS, *HALVES]
    with Pool() as pool:
        whole, *others = pool.map(fit_without, parts, chunksize=1)
    FILE.write_text(written(whole), encoding="utf-8")
    rows = [
        f"{json.dumps(part)}: {json.dumps(values)}"
        for part, values in zip(parts[1:], others, strict=True)
    ]
    LEFT_OUT.write_text("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    main()
