"""What compression costs in perplexity: the queue of training runs of `aiscale bench radius --sweep`, and its table.

    aiscale bench radius --sweep --out runs.jsonl --budget 60      # works for an hour; again, and it goes on
    table(load("runs.jsonl"))                                      # one row for each case and number of steps

Every case (`radius_runs.cases`) is trained for 500 steps with the same four learning rates and seed 0, and with the
other seeds at the two rates that did best there; of these two, that with the better mean counts. The contenders, which
stand for the rest, are tuned like that up to 4,000 steps. Longer runs have every seed at the rate that was found so.

A run that is finished is a line of FILE at once; one that was broken off is made anew. At the lowest priority, as many
at a time as there are cores, one thread each. On two cores the whole grid takes more than a day.
"""

from __future__ import annotations

import functools
import json
import math
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

from aiscale.bench.ddp import BenchError
from aiscale.bench.radius.runs import MARK, Case, Job, cases, wire_share
from aiscale.bench.timing import machine_facts
from aiscale.distributed.forking import die_with

RATES, SEEDS, LENGTHS = (1.5e-3, 3e-3, 6e-3, 1.2e-2), (0, 1, 2), (500, 1000, 2000, 4000, 8000)
TUNED, CONTENDERS_TUNED = 500, 4000  #: the longest runs for which rates are tried
LONGEST = 2000  #: of those that are no contenders
FINALISTS = 2  #: rates of which every seed is tried: by one seed alone, the best two can hardly be told apart
WORKERS = min(2, os.cpu_count() or 1)
DEFAULT_OUT = "runs/radius_sweep.jsonl"


def bench_sweep(
    *, out: str | None, budget_min: float | None, quick: bool, report: Callable[[str], None] = lambda message: None
) -> dict:
    """Make the runs that FILE lacks until all are there or the budget is used up; returns the table so far.

    quick: two cases, one rate and seed, 8 steps.
    """
    path = Path(out or DEFAULT_OUT)
    path.parent.mkdir(parents=True, exist_ok=True)
    grid = Grid(quick)
    rows, machines = load(path), read_machines(path)
    todo = [job for job in grid.pending(rows) if _key(asdict(job)) not in {_key(row) for row in rows}]
    if todo:
        machines.append(machine_facts())
        append(path, {"machine": machines[-1]})
        _Workers(path, grid, rows, budget_min, report).run(1 if quick else WORKERS)
    return {
        "rows": table(rows, grid.known),
        "runs": len(rows),
        "runs_left": grid.left(rows),
        "checks": [],
        "machines": machines,
    }


class Grid:
    """Which runs there are to make, in which order."""

    def __init__(self, quick: bool = False) -> None:
        self.known = cases()
        self.rates, self.seeds, self.lengths = ((RATES[2],), (0,), (8,)) if quick else (RATES, SEEDS, LENGTHS)
        if quick:
            names = ("dense", "radius d 0.4 T 200 sum switch 0.2")
            self.known = {name: self.known[name] for name in names}

    def pending(self, rows: list[dict]) -> list[Job]:
        """The runs that `rows` lack and that can be made now, the most telling ones first."""
        done, jobs = {_key(row) for row in rows}, []
        for case, steps in self._order():
            tuned = self._tuned_at(case, steps)
            rates = self.rates if steps == tuned else self._found(rows, case, tuned)
            candidates = [Job(case.name, steps, rate, self.seeds[0]) for rate in rates]
            best = rates if len(rates) == 1 else finalists(rows, case.name, steps, rates, self.seeds[0])
            for rate in best:
                candidates += [Job(case.name, steps, rate, seed) for seed in self.seeds[1:]]
            jobs += [job for job in candidates if _key(asdict(job)) not in done]
        return jobs

    def left(self, rows: list[dict]) -> int:
        """How many runs are still to be made altogether."""
        missing = 0
        for case, steps in self._order():
            rates = len(self.rates) if steps == self._tuned_at(case, steps) else 1
            needed = rates + min(FINALISTS, rates) * (len(self.seeds) - 1)
            missing += max(0, needed - len(_of(rows, case.name, steps)))
        return missing

    def _tuned_at(self, case: Case, steps: int) -> int:
        """At which number of steps the rate is found for runs of this length."""
        return max(self.lengths[0], min(steps, CONTENDERS_TUNED if case.contender else TUNED))

    def _found(self, rows: list[dict], case: Case, steps: int) -> tuple[float, ...]:
        """(the best rate at this number of steps,) once all of its runs are there, () before."""
        best = finalists(rows, case.name, steps, self.rates, self.seeds[0])
        done = {_key(row) for row in rows}
        whole = best and all((case.name, steps, rate, seed) in done for rate in best for seed in self.seeds)
        return (_best(_of(rows, case.name, steps))[0]["lr"],) if whole else ()

    def _order(self) -> Iterable[tuple[Case, int]]:
        """What tells most comes first: the contenders, then all; short runs before long ones."""
        cells = [(case, place) for place in range(len(self.lengths)) for case in self.known.values()]
        cells = [(case, place) for case, place in cells if case.contender or self.lengths[place] <= LONGEST]
        cells.sort(key=lambda cell: cell[1] + (0 if cell[0].contender else 1.5))
        return [(case, self.lengths[place]) for case, place in cells]


def finalists(rows: list[dict], case: str, steps: int, rates: tuple[float, ...], seed: int) -> list[float]:
    """The rates with the lowest validation losses at `seed`, once all have been tried, none before."""
    found = {row["lr"]: _loss(row) for row in _of(rows, case, steps) if row["seed"] == seed}
    return sorted(rates, key=found.__getitem__)[:FINALISTS] if set(rates) <= set(found) else []


def _of(rows: list[dict], case: str, steps: int) -> list[dict]:
    return [row for row in rows if (row["case"], row["steps"]) == (case, steps)]


def _best(rows: list[dict]) -> list[dict]:
    """Of one case and length, the runs at its best rate: of those with the most seeds, that with the best mean."""
    by_rate: dict[float, list[dict]] = {}
    for row in rows:
        by_rate.setdefault(row["lr"], []).append(row)
    most = max(map(len, by_rate.values()))
    return min(
        (runs for runs in by_rate.values() if len(runs) == most),
        key=lambda runs: statistics.fmean(map(_loss, runs)),
    )


def _loss(row: dict) -> float:
    """Of a run's validation; one that diverged is worst."""
    return math.inf if row["val_loss"] is None else row["val_loss"]


def table(rows: list[dict], known: dict[str, Case] | None = None) -> list[dict]:
    """One row for each case and number of steps: perplexities at its best rate, and against dense seed by seed; curves
    as [(step, mean, low, high)] over seeds, of losses and of dense minus the case (error_curve)."""
    known = known or cases()
    best, diverged = {}, {}
    for case, steps in dict.fromkeys((row["case"], row["steps"]) for row in rows):
        here = _best(_of(rows, case, steps))
        best[case, steps] = {row["seed"]: row for row in here if row["val_loss"] is not None}
        diverged[case, steps] = len(here) - len(best[case, steps])
    found = []
    for (case, steps), runs in best.items():
        if case in known and runs:
            tried = {row["lr"] for row in _of(rows, case, steps)}
            cell = _cell(known[case], steps, runs, best.get(("dense", steps), {}))
            edge = len(tried) > 1 and cell["lr"] in (min(tried), max(tried))
            found.append({**cell, "rates_tried": len(tried), "best_at_edge": edge, "diverged": diverged[case, steps]})
    return sorted(found, key=lambda cell: (cell["steps"], list(known).index(cell["case"])))


def _cell(case: Case, steps: int, runs: dict[int, dict], dense: dict[int, dict]) -> dict:
    """Of one case at one length; `runs` and `dense` are at their best rates, by seed."""
    both = sorted(runs.keys() & dense.keys())
    gaps = [100 * math.expm1(runs[seed]["val_loss"] - dense[seed]["val_loss"]) for seed in both]
    train_gaps = [100 * math.expm1(runs[seed]["train_loss"] - dense[seed]["train_loss"]) for seed in both]
    apart = [_difference(dense[seed]["train_curve"], runs[seed]["train_curve"]) for seed in both]
    curves = {
        "train_curve": _curve([run["train_curve"] for run in runs.values()]),
        "val_curve": _curve([run["val_curve"] for run in runs.values()]),
        "error_curve": _curve(apart),
    }
    return {
        "case": case.name,
        "settings": list(case.settings),
        "switch": case.switch,
        "steps": steps,
        "lr": next(iter(runs.values()))["lr"],
        "seeds": sorted(runs),
        "wire_share": round(wire_share(case), 4),
        "train_ppl": _spread([math.exp(run["train_loss"]) for run in runs.values()]),
        "val_ppl": _spread([math.exp(run["val_loss"]) for run in runs.values()]),
        "val_over_dense_pct": _spread(gaps) if gaps else None,
        "train_over_dense_pct": _spread(train_gaps) if train_gaps else None,
        **curves,
    }


def _spread(values: list[float]) -> dict[str, float]:
    found = {"mean": statistics.fmean(values), "low": min(values), "high": max(values)}
    return {key: round(value, 4) for key, value in found.items()}


def _difference(one: list, other: list) -> list[tuple[int, float]]:
    return [(step, a - b) for (step, a), (_, b) in zip(one, other, strict=True)]


def _curve(curves: list[list]) -> list[tuple[float, ...]]:
    """[(step, loss)] of several seeds -> [(step, mean, low, high)]."""
    found = []
    for points in zip(*curves, strict=True):
        losses = [loss for _, loss in points]
        found.append((points[0][0], *(round(v, 4) for v in (statistics.fmean(losses), min(losses), max(losses)))))
    return found


def _key(row: dict) -> tuple:
    return row["case"], row["steps"], row["lr"], row["seed"]


def load(path: Path) -> list[dict]:
    """The finished runs in a file; one that was being written when its writer was killed is not finished."""
    rows = {_key(row): row for row in _lines(path) if "case" in row}
    return list(rows.values())


def read_machines(path: Path) -> list[dict]:
    """Where they were made: what each start of the sweep noted."""
    return [line["machine"] for line in _lines(path) if "machine" in line]


def append(path: Path, row: dict) -> None:
    """Add a line, and see it on the disk."""
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":  # the torn end of an earlier line stays a line of its own, which nobody reads
                file.write(b"\n")
        file.write(json.dumps(row).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _lines(path: Path) -> Iterable[dict]:
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


class _Workers:
    """Processes that make runs, fed one job at a time; this process alone writes the file."""

    def __init__(self, path: Path, grid: Grid, rows: list[dict], budget_min: float | None, report: Callable) -> None:
        self.path, self.grid, self.rows, self.report = path, grid, rows, report
        self.deadline = time.monotonic() + 60 * budget_min if budget_min else math.inf
        self.lock, self.taken, self.failures = threading.Lock(), set(), queue.Queue()

    def run(self, n: int) -> None:
        command = [sys.executable, "-m", "aiscale.bench.radius.runs"]
        start = functools.partial(
            subprocess.Popen,
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            preexec_fn=functools.partial(_be_nice, os.getpid()),
        )
        processes = [start() for _ in range(n)]
        try:
            threads = [threading.Thread(target=self._feed, args=(process,), daemon=True) for process in processes]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if not self.failures.empty():
            raise BenchError(self.failures.get())

    def _next(self) -> Job | None:
        with self.lock:
            for job in self.grid.pending(self.rows):
                if job not in self.taken and time.monotonic() + self._estimate_s(job) < self.deadline:
                    self.taken.add(job)
                    return job
        return None

    def _estimate_s(self, job: Job) -> float:
        """From the slowest run of this case, or of any, so far; a run is not begun that will not end in time."""
        same = [row for row in self.rows if row["case"] == job.case] or self.rows
        return job.steps * max((row["seconds"] / row["steps"] for row in same), default=0.0)

    def _feed(self, process: subprocess.Popen) -> None:
        while job := self._next():
            try:
                process.stdin.write(json.dumps(asdict(job)) + "\n")
                process.stdin.flush()
            except BrokenPipeError:
                pass  # its output ends, too
            row = next((json.loads(line[1:]) for line in process.stdout if line.startswith(MARK)), None)
            if row is None:
                self.failures.put(f"a run ended without a result: {job}; what went wrong stands above")
                return
            with self.lock:
                self.rows.append(row)
                append(self.path, row)
                loss = "diverged" if row["val_loss"] is None else f"validation {math.exp(row['val_loss']):.3f}"
                left = self.grid.left(self.rows)
                name = f"{job.case}, {job.steps} steps, rate {job.lr:g}, seed {job.seed}"
            self.report(f"{name}: {loss}, {row['seconds']:.0f} s; {left} runs left")


def _be_nice(parent: int) -> None:
    die_with(parent)
    os.nice(19)
