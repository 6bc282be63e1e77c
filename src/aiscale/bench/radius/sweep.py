"""What compression costs in perplexity: the training runs of `aiscale bench radius --sweep`, and their table.

    aiscale bench radius --sweep --out runs.jsonl --budget 60      # works for an hour; call it again to resume
    table_of(load("runs.jsonl"))                                   # one row for each case and number of steps
    python -m aiscale.bench.radius.sweep SPEED.json runs.jsonl > src/aiscale/published/measured/radius_cpu.json

SPEED.json is the output of `aiscale bench radius --json`; `-` leaves it out.

Every case (`runs.cases`) trains for 500 steps with the same four learning rates and seed 0, then with the other seeds
at the two best rates; the rate with the better mean counts. The contenders (main cases) are tuned this way up to 4,000
steps. Longer runs use the rate found there, with every seed.

A finished run is appended to FILE at once; an interrupted one is repeated. Runs have the lowest priority, one thread
each, and as many run at a time as there are cores. On two cores the whole grid takes more than a day.
"""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from pathlib import Path

import torch

from aiscale.bench.radius.runs import Case, Job, cases, train, wire_share
from aiscale.bench.ranks import BenchError, Report, silent
from aiscale.bench.tables import table
from aiscale.bench.timing import machine_facts
from aiscale.processes import die_with, usable_cores

RATES, SEEDS, LENGTHS = (1.5e-3, 3e-3, 6e-3, 1.2e-2), (0, 1, 2), (500, 1000, 2000, 4000, 8000)
TUNED, CONTENDERS_TUNED = 500, 4000  #: the longest runs for which learning rates are tuned
LONGEST = 2000  #: for cases that are not contenders
FINALISTS = 2  #: learning rates tried with every seed: one seed can hardly tell the best two apart
WORKERS = min(2, len(usable_cores()))
DEFAULT_OUT = "runs/radius_sweep.jsonl"


def bench_sweep(*, out: str | None, budget_min: float | None, quick: bool, report: Report = silent) -> dict:
    """Make the runs that FILE lacks until all are there or the budget is used up; returns the table so far.

    quick: two cases, one rate and seed, 8 steps.
    """
    path = Path(out or DEFAULT_OUT)
    path.parent.mkdir(parents=True, exist_ok=True)
    grid = Grid(quick)
    rows, machines = load(path), read_machines(path)
    if grid.pending(rows):
        machines.append(machine_facts())
        append(path, {"machine": machines[-1]})
        deadline = time.monotonic() + 60 * budget_min if budget_min else math.inf
        _make_runs(path, grid, rows, deadline, 1 if quick else WORKERS, report)
    done = {"rows": table_of(rows, grid.known), "runs": len(rows), "runs_left": grid.left(rows)}
    return {**done, "checks": [], "machines": machines}


def show_sweep(result: dict) -> None:
    heads = ("", "sent / dense", "rate", "seeds", "train ppl", "validation ppl", "over dense, range")
    for steps in dict.fromkeys(row["steps"] for row in result["rows"]):
        rows = []
        for row in (row for row in result["rows"] if row["steps"] == steps):
            over, edge = row["val_over_dense_pct"], ", at the edge" * row["best_at_edge"]
            rate, seeds = f"{row['lr']:g} of {row['rates_tried']}{edge}", str(len(row["seeds"]))
            perplexities = (f"{row[key]['mean']:.3f}" for key in ("train_ppl", "val_ppl"))
            gap = f"{over['mean']:+.1f} %, {over['low']:+.1f} to {over['high']:+.1f}" if over else ""
            rows.append((row["case"], f"{row['wire_share']:.3f}", rate, seeds, *perplexities, gap))
        table(f"{steps} steps, each at the best of its learning rates", heads, rows)
    print(f"{result['runs']} runs made, {result['runs_left']} left of the whole grid")


# The queue -----------------------------------------------------------------------------------------------------------


class Grid:
    """All runs to make, in order."""

    def __init__(self, quick: bool = False) -> None:
        self.known = cases()
        self.rates, self.seeds, self.lengths = ((RATES[2],), (0,), (8,)) if quick else (RATES, SEEDS, LENGTHS)
        if quick:
            names = ("dense", "radius d 0.4 T 200 sum switch 0.2")
            self.known = {name: self.known[name] for name in names}

    def pending(self, rows: list[dict]) -> list[Job]:
        """The runs missing from `rows` that can start now, most informative first."""
        done = {_job(row) for row in rows}
        return [job for cell in self._cells() for job in self._wanted(*cell, rows) if job not in done]

    def left(self, rows: list[dict]) -> int:
        """How many runs are still missing altogether."""
        return sum(max(0, self._needed(*cell) - len(_of(rows, cell[0].name, cell[1]))) for cell in self._cells())

    def _cells(self) -> Iterable[tuple[Case, int]]:
        """Contenders first, then all; short runs before long ones."""
        cells = [(case, place) for place in range(len(self.lengths)) for case in self.known.values()]
        cells = [(case, place) for case, place in cells if case.contender or self.lengths[place] <= LONGEST]
        cells.sort(key=lambda cell: cell[1] + (0 if cell[0].contender else 1.5))
        return [(case, self.lengths[place]) for case, place in cells]

    def _tuned_at(self, case: Case, steps: int) -> int:
        """The number of steps at which the learning rate for runs of this length is tuned."""
        return max(self.lengths[0], min(steps, CONTENDERS_TUNED if case.contender else TUNED))

    def _needed(self, case: Case, steps: int) -> int:
        rates = len(self.rates) if steps == self._tuned_at(case, steps) else 1
        return rates + min(FINALISTS, rates) * (len(self.seeds) - 1)

    def _wanted(self, case: Case, steps: int, rows: list[dict]) -> list[Job]:
        """The runs of a case that can be listed so far: other seeds once every rate has been tried, and runs too
        long to be tuned once the best rate is known."""
        rates, tuned = self.rates, self._tuned_at(case, steps)
        if steps != tuned:
            shorter, found = self._wanted(case, tuned, rows), _of(rows, case.name, tuned)
            if len(shorter) < self._needed(case, tuned) or not set(shorter) <= set(map(_job, found)):
                return []
            rates = (_best(found)[0]["lr"],)
        best = rates
        if len(rates) > 1:
            first = {row["lr"]: _loss(row) for row in _of(rows, case.name, steps) if row["seed"] == self.seeds[0]}
            best = sorted(rates, key=first.__getitem__)[:FINALISTS] if first.keys() >= set(rates) else ()
        jobs = [Job(case.name, steps, rate, self.seeds[0]) for rate in rates]
        return jobs + [Job(case.name, steps, rate, seed) for rate in best for seed in self.seeds[1:]]


def _make_runs(path: Path, grid: Grid, rows: list[dict], deadline: float, workers: int, report: Report) -> None:
    """Run the pending jobs in worker processes and append each result to `rows` and the file. Starts none that would
    end after the deadline, judged by the slowest run so far of its case, or of any case."""

    def in_time(job: Job) -> bool:
        same = [row for row in rows if row["case"] == job.case] or rows
        slowest_s = job.steps * max((row["seconds"] / row["steps"] for row in same), default=0.0)
        return time.monotonic() + slowest_s < deadline

    spawn, running = multiprocessing.get_context("spawn"), {}
    with ProcessPoolExecutor(workers, mp_context=spawn, initializer=_begin, initargs=(os.getpid(),)) as pool:
        while True:
            waiting = (job for job in grid.pending(rows) if job not in running.values() and in_time(job))
            for job in list(itertools.islice(waiting, workers - len(running))):
                running[pool.submit(train, job)] = job
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job = running.pop(future)
                if error := future.exception():
                    for process in multiprocessing.active_children():
                        process.kill()  # or it would wait for the other runs, which may take an hour
                    raise BenchError(f"a run ended without a result: {job}: {error!r}") from error
                rows.append(row := future.result())
                append(path, row)
                loss = "diverged" if row["val_loss"] is None else f"validation {math.exp(row['val_loss']):.3f}"
                name = f"{job.case}, {job.steps} steps, rate {job.lr:g}, seed {job.seed}"
                report(f"{name}: {loss}, {row['seconds']:.0f} s; {grid.left(rows)} runs left")


def _begin(parent: int) -> None:
    die_with(parent)
    os.nice(19)
    torch.set_num_threads(1)


# The file ------------------------------------------------------------------------------------------------------------


def load(path: Path) -> list[dict]:
    """The finished runs in a file; skips a line cut off when its writer was killed."""
    return list({_job(row): row for row in _lines(path) if "case" in row}.values())


def read_machines(path: Path) -> list[dict]:
    """The machines of a file, noted at each start of the sweep."""
    return [line["machine"] for line in _lines(path) if "machine" in line]


def append(path: Path, row: dict) -> None:
    """Append a line and fsync. Terminates a line cut off by a killed writer; readers skip it."""
    torn = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
    with path.open("a") as file:
        file.write("\n" * torn + json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _lines(path: Path) -> Iterable[dict]:
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


def _job(row: dict) -> Job:
    return Job(row["case"], row["steps"], row["lr"], row["seed"])


# The table -----------------------------------------------------------------------------------------------------------


def table_of(rows: list[dict], known: dict[str, Case] | None = None) -> list[dict]:
    """One row for each case and number of steps: perplexity at its best rate, and difference to dense seed by seed;
    curves as [(step, mean, low, high)] over seeds, of losses and of dense minus the case (error_curve)."""
    known = known or cases()
    best = {key: _best(_of(rows, *key)) for key in dict.fromkeys((row["case"], row["steps"]) for row in rows)}
    converged = {key: {row["seed"]: row for row in runs if row["val_loss"] is not None} for key, runs in best.items()}
    found = []
    for (case, steps), runs in converged.items():
        if case in known and runs:
            tried = {row["lr"] for row in _of(rows, case, steps)}
            cell = _cell(known[case], steps, runs, converged.get(("dense", steps), {}))
            edge = len(tried) > 1 and cell["lr"] in (min(tried), max(tried))
            diverged = len(best[case, steps]) - len(runs)
            found.append({**cell, "rates_tried": len(tried), "best_at_edge": edge, "diverged": diverged})
    return sorted(found, key=lambda cell: (cell["steps"], list(known).index(cell["case"])))


def _of(rows: list[dict], case: str, steps: int) -> list[dict]:
    return [row for row in rows if (row["case"], row["steps"]) == (case, steps)]


def _best(rows: list[dict]) -> list[dict]:
    """The runs of one case and length at its best rate: among the rates with most seeds, the one with the best mean."""
    by_rate: dict[float, list[dict]] = {}
    for row in rows:
        by_rate.setdefault(row["lr"], []).append(row)
    return min(by_rate.values(), key=lambda runs: (-len(runs), statistics.fmean(map(_loss, runs))))


def _loss(row: dict) -> float:
    return math.inf if row["val_loss"] is None else row["val_loss"]


def _cell(case: Case, steps: int, runs: dict[int, dict], dense: dict[int, dict]) -> dict:
    """The row of one case at one length; `runs` and `dense` are at their best rates, by seed."""
    both = sorted(runs.keys() & dense.keys())

    def over_dense_pct(key: str) -> dict[str, float] | None:
        return _spread([100 * math.expm1(runs[seed][key] - dense[seed][key]) for seed in both]) if both else None

    def perplexity(key: str) -> dict[str, float]:
        return _spread([math.exp(run[key]) for run in runs.values()])

    pairs = [zip(dense[seed]["train_curve"], runs[seed]["train_curve"], strict=True) for seed in both]
    errors = [[(step, a - b) for (step, a), (_, b) in pair] for pair in pairs]
    return {
        "case": case.name,
        "settings": list(case.settings),
        "switch": case.switch,
        "steps": steps,
        "lr": next(iter(runs.values()))["lr"],
        "seeds": sorted(runs),
        "wire_share": round(wire_share(case), 4),
        "train_ppl": perplexity("train_loss"),
        "val_ppl": perplexity("val_loss"),
        "val_over_dense_pct": over_dense_pct("val_loss"),
        "train_over_dense_pct": over_dense_pct("train_loss"),
        "train_curve": _curve([run["train_curve"] for run in runs.values()]),
        "val_curve": _curve([run["val_curve"] for run in runs.values()]),
        "error_curve": _curve(errors),
    }


def _spread(values: list[float]) -> dict[str, float]:
    found = {"mean": statistics.fmean(values), "low": min(values), "high": max(values)}
    return {key: round(value, 4) for key, value in found.items()}


def _curve(curves: list[list]) -> list[tuple[float, ...]]:
    points = [(seeds[0][0], _spread([loss for _, loss in seeds])) for seeds in zip(*curves, strict=True)]
    return [(step, *spread.values()) for step, spread in points]


def _collect(speed: Path | None, runs: Path) -> dict:
    """The content of `published.measured("radius_cpu")`, with curves of the main cases only."""
    rows = load(runs)
    cells = table_of(rows)
    for cell in cells:
        if not cases()[cell["case"]].contender:
            del cell["train_curve"], cell["val_curve"], cell["error_curve"]
    sweep = {"rows": cells, "runs": len(rows), "runs_left": Grid().left(rows), "machines": read_machines(runs)}
    return {"speed": json.loads(speed.read_text()) if speed else None, "sweep": sweep}


if __name__ == "__main__":
    speed_file, runs_file = sys.argv[1:]
    print(json.dumps(_collect(Path(speed_file) if speed_file != "-" else None, Path(runs_file)), indent=1))
