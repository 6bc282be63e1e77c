"""What compression costs in perplexity: the runs behind lesson 08's measurement, and their table.

    # a day on two cores; call it again to resume
    python benchmarks/radius_sweep.py runs.jsonl
    # the table, for src/aiscale/plan/published/measured
    python benchmarks/radius_sweep.py runs.jsonl --store SPEED.json > radius_cpu.json

SPEED.json is the output of `python benchmarks/radius.py --json`. A finished run is a line of
runs.jsonl; an interrupted one is repeated. Model, optimizer and Radius are the trainers', the other
ways to send gradients lie in ways.py. Every case trains with the same learning rates and seed 0,
then with the other seeds at the two best rates; the rate with the better mean counts. Runs longer
than `tuned` use the rate found there, with every seed.

One process simulates all ranks. Radius and PowerSGD are linear in the gradients: all ranks share
the mask (or the factor), so n ranks update the weights as one rank with the whole batch does, up to
rounding. Top-k is not, since each rank selects by its own gradients, and bf16 rounds each rank's:
there it computes them in turn. At n ranks an all-gather of values and indices sends n times as much
as an all-reduce of as many values, so top-k's density is divided by n; PowerSGD has the largest
rank that fits.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from common import machine_facts
from ways import SimulatedRanks, make

from aiscale.measure.distributed import connect
from aiscale.plan import cost
from aiscale.processes import die_with, usable_cores
from aiscale.train.data import Windows, batches
from aiscale.train.model import GPT, build, draw
from aiscale.train.optimizer import make_optimizer, rate
from aiscale.train.options import options
from aiscale.train.prepare import find_text
from aiscale.train.presets import shape_of

RANKS = 4  #: simulated
RATES, SEEDS, LENGTHS = (1.5e-3, 3e-3, 6e-3, 1.2e-2), (0, 1, 2), (500, 1000, 2000, 4000)
FINALISTS = 2  #: learning rates tried with every seed: one seed can hardly tell the best two apart
VAL_BATCHES, POINTS = 16, 40


MODEL, LENGTH, BATCH = "2x64", 64, 16  #: 1024 tokens a step


@dataclass(frozen=True, kw_only=True)
class Case:
    """A way to send gradients; `switch` is the share of the steps that are dense at first."""

    method: str = "dense"
    density: float = 1.0
    interval: int = 200
    residual: str = "sum"
    rank: int = 0
    bf16: bool = False
    switch: float = 0.0
    tuned: int = 500  #: the longest runs for which learning rates are tried
    longest: int = 2000
    rate_warmup: float = 0.02  #: share of the steps in which the learning rate rises

    @property
    def n_simulated(self) -> int:
        """Ranks whose gradients are computed in turn; 1: that of the whole batch stands for all."""
        return RANKS if self.method == "top-k" or self.bf16 else 1

    def ways(self, model: torch.nn.Module, steps: int) -> list:
        """One for each simulated rank."""
        names = ("density", "interval", "residual", "rank", "bf16")
        about = {name: getattr(self, name) for name in names}
        about["dense_until"] = int(self.switch * steps)
        return [make(self.method, model, **about) for _ in range(self.n_simulated)]

    def args(self, steps: int, lr: float, seed: int) -> argparse.Namespace:
        """The options of a trainer."""
        words = [
            f"--model={MODEL}",
            f"--length={LENGTH}",
            f"--batch={BATCH}",
            f"--steps={steps}",
            f"--seed={seed}",
        ]
        words += [
            f"--lr={lr}",
            f"--min-lr={lr / 10}",
            f"--warm-up={int(self.rate_warmup * steps) + 1}",
        ]
        return options().parse_args(words)


def _cases() -> dict[str, Case]:
    main = {"tuned": 4000, "longest": 4000}
    found = {"dense": Case(**main), "dense bf16": Case(bf16=True, longest=500)}
    # is a gain only the effect of a slow start?
    found["dense, rate rises for 0.2"] = Case(rate_warmup=0.2)
    for switch in (0.2, 0.0):
        for density in (0.9, 0.5, 0.4, 0.1):
            for interval in (50, 200):
                for residual in ("sum", "mean"):
                    # stands beside the artifact's
                    published = (switch, interval, residual) == (0.2, 200, "sum")
                    lengths = {} if not published else main if density == 0.4 else {"tuned": 2000}
                    about = {
                        "density": density,
                        "interval": interval,
                        "residual": residual,
                        "switch": switch,
                    }
                    name = f"radius d {density:g} T {interval} {residual} switch {switch:g}"
                    found[name] = Case(method="radius", **about, **lengths)
    found["top-k d 0.1 switch 0.2"] = Case(
        method="top-k", density=0.4 / RANKS, switch=0.2, tuned=2000
    )
    found["powersgd rank 17 switch 0.2"] = Case(method="powersgd", rank=17, switch=0.2, tuned=2000)
    return found


CASES = _cases()


@dataclass(frozen=True)
class Job:
    case: str
    steps: int
    lr: float
    seed: int


@cache
def _windows() -> tuple[Windows, Windows]:
    """Of a text long enough for 8,000 steps without repetition, and of its end, held out."""
    text = np.frombuffer("".join(find_text("stdlib")).encode(), np.uint8)
    parts = np.split(text, [len(text) * 9 // 10])
    return Windows(parts[0], LENGTH), Windows(parts[1], LENGTH)


def wire_share(case: Case) -> float:
    """Bytes that a rank sends, over those of a dense fp32 step; average after the switch."""
    with torch.device("meta"):
        model = GPT(shape_of(MODEL))
    sizes = [(p.numel(), tuple(p.shape)) for p in model.parameters()]
    numbers = sum(numel for numel, _ in sizes)
    dense = cost.wire_bytes("all_reduce", 4 * numbers, RANKS)
    if case.method == "top-k":
        return _top_k_bytes(case, sizes) / dense
    sent = 0.0
    for numel, shape in sizes:
        if len(shape) < 2 or case.method == "dense":
            sent += numel
        elif case.method == "powersgd":
            rows, columns = shape
            sent += min(numel, case.rank * (rows + columns))
        else:
            chosen = max(int(case.density * numel), 1)
            sent += ((case.interval - 1) * chosen + numel) / case.interval
    return cost.wire_bytes("all_reduce", (2 if case.bf16 else 4) * sent, RANKS) / dense


def _top_k_bytes(case: Case, sizes: list) -> float:
    """Values, and places in int32, of every rank; vectors go whole, but by the same message."""
    sent = sum(
        max(1, int(case.density * numel)) if len(shape) > 1 else numel for numel, shape in sizes
    )
    return cost.wire_bytes("all_gather", (4 + 4) * RANKS * sent, RANKS)


# The runs ----------------------------------------------------------------------------------------


def train(job: Job) -> dict:
    """Train it: training losses in nats a token, and the final validation loss.

    A training loss is averaged between two recorded points. If the run diverged, both are None.
    """
    case, start, world = CASES[job.case], time.perf_counter(), connect("cpu")
    args = case.args(job.steps, job.lr, job.seed)
    windows, held_out = _windows()
    every = max(1, job.steps // POINTS)
    model = draw(build(args), args, torch.device("cpu"))
    optimizer = make_optimizer(model, args)
    ranks = SimulatedRanks(model, optimizer, case.ways(model, job.steps))
    # spread over the whole held-out text
    spread = torch.linspace(0, len(held_out) - 1, VAL_BATCHES * BATCH).long()
    unseen = held_out[spread].split(BATCH)
    losses, val_curve = [], []
    for step, batch in batches(windows, 0, args, 0, 1):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, args)
        n = case.n_simulated
        losses.append(ranks.step([batch[rank::n] for rank in range(n)]))
        if not math.isfinite(losses[-1]):
            break
        if (step + 1) % (4 * every) == 0:
            val_curve.append((step + 1, round(ranks.evaluate(unseen), 5)))
    tail, val_loss = losses[-max(1, job.steps // 20) :], ranks.evaluate(unseen)
    converged = len(losses) == job.steps and math.isfinite(val_loss)
    world.close()
    means = [sum(losses[i : i + every]) / every for i in range(0, len(losses) - every + 1, every)]
    return {
        **asdict(job),
        "train_loss": sum(tail) / len(tail) if converged else None,
        "val_loss": val_loss if converged else None,
        "train_curve": [(every * (i + 1), round(mean, 5)) for i, mean in enumerate(means)],
        "val_curve": val_curve,
        "seconds": round(time.perf_counter() - start, 1),
    }


def sweep(path: Path, quick: bool = False) -> None:
    """Make the runs that the file lacks, as many at a time as there are cores.
    quick: two cases, one rate and seed, 8 steps."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows, names = load(path), list(CASES)[:4:3] if quick else CASES
    lengths, rates, seeds = ((8,), RATES[2:3], SEEDS[:1]) if quick else (LENGTHS, RATES, SEEDS)
    append(path, {"machine": machine_facts()})
    workers = 1 if quick else len(usable_cores())
    with ProcessPoolExecutor(
        workers, get_context("spawn"), initializer=_begin, initargs=(os.getpid(),)
    ) as pool:

        def make(jobs: list[Job]) -> None:
            missing = [job for job in jobs if job not in {_job(row) for row in rows}]
            for job, row in zip(missing, pool.map(train, missing), strict=True):
                rows.append(row)
                append(path, row)
                print(
                    f"{job}: validation loss {row['val_loss']}, {row['seconds']:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )

        for steps in lengths:
            for name in (name for name in names if steps <= CASES[name].longest):
                tuned = min(steps, CASES[name].tuned)
                tried = rates if steps == tuned else (_best(_of(rows, name, tuned))[0]["lr"],)
                make([Job(name, steps, rate, seeds[0]) for rate in tried])
                first = [
                    row
                    for row in _of(rows, name, steps)
                    if row["seed"] == seeds[0] and row["lr"] in tried
                ]
                best = sorted(first, key=_loss)[:FINALISTS]
                make([Job(name, steps, row["lr"], seed) for row in best for seed in seeds[1:]])


def _begin(parent: int) -> None:
    die_with(parent)
    os.nice(19)
    torch.set_num_threads(1)


# The file ----------------------------------------------------------------------------------------


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


# The table ---------------------------------------------------------------------------------------


def table_of(rows: list[dict]) -> list[dict]:
    """One row for each case and number of steps.
    It has the perplexity at its best rate, the difference to dense seed by seed, and curves as
    [(step, mean, low, high)] over seeds, of losses and of dense minus the case (error_curve)."""
    best = {
        key: _best(_of(rows, *key))
        for key in dict.fromkeys((row["case"], row["steps"]) for row in rows)
    }
    converged = {
        key: {row["seed"]: row for row in runs if row["val_loss"] is not None}
        for key, runs in best.items()
    }
    found = []
    for (case, steps), runs in converged.items():
        if case in CASES and runs:
            tried = {row["lr"] for row in _of(rows, case, steps)}
            cell = _cell(case, steps, runs, converged.get(("dense", steps), {}))
            edge = len(tried) > 1 and cell["lr"] in (min(tried), max(tried))
            found.append({**cell, "rates_tried": len(tried), "best_at_edge": edge})
    return sorted(found, key=lambda cell: (cell["steps"], list(CASES).index(cell["case"])))


def _of(rows: list[dict], case: str, steps: int) -> list[dict]:
    return [row for row in rows if (row["case"], row["steps"]) == (case, steps)]


def _best(rows: list[dict]) -> list[dict]:
    """The runs of a case and length at its best rate: of those with most seeds, the best mean."""
    by_rate: dict[float, list[dict]] = {}
    for row in rows:
        by_rate.setdefault(row["lr"], []).append(row)
    return min(by_rate.values(), key=lambda runs: (-len(runs), statistics.fmean(map(_loss, runs))))


def _loss(row: dict) -> float:
    return math.inf if row["val_loss"] is None else row["val_loss"]


def _cell(name: str, steps: int, runs: dict[int, dict], dense: dict[int, dict]) -> dict:
    """The row of one case at one length; `runs` and `dense` are at their best rates, by seed."""
    both = sorted(runs.keys() & dense.keys())
    over = [100 * math.expm1(runs[seed]["val_loss"] - dense[seed]["val_loss"]) for seed in both]
    pairs = [
        zip(dense[seed]["train_curve"], runs[seed]["train_curve"], strict=True) for seed in both
    ]
    errors = [[(step, a - b) for (step, a), (_, b) in pair] for pair in pairs]
    return {
        "case": name,
        "switch": CASES[name].switch,
        "steps": steps,
        "lr": next(iter(runs.values()))["lr"],
        "seeds": sorted(runs),
        "wire_share": round(wire_share(CASES[name]), 4),
        "train_ppl": _spread([math.exp(run["train_loss"]) for run in runs.values()]),
        "val_ppl": _spread([math.exp(run["val_loss"]) for run in runs.values()]),
        "val_over_dense_pct": _spread(over) if both else None,
        "train_curve": _curve([run["train_curve"] for run in runs.values()]),
        "val_curve": _curve([run["val_curve"] for run in runs.values()]),
        "error_curve": _curve(errors),
    }


def _spread(values: list[float]) -> dict[str, float]:
    found = {"mean": statistics.fmean(values), "low": min(values), "high": max(values)}
    return {key: round(value, 4) for key, value in found.items()}


def _curve(curves: list[list]) -> list[tuple[float, ...]]:
    points = [
        (seeds[0][0], _spread([loss for _, loss in seeds])) for seeds in zip(*curves, strict=True)
    ]
    return [(step, *spread.values()) for step, spread in points]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "runs", type=Path, metavar="RUNS", help="the file of finished runs, such as runs.jsonl"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a test of the script: two cases of 8 steps"
    )
    parser.add_argument(
        "--store",
        type=Path,
        metavar="SPEED",
        help="train nothing: print both measurements as one JSON",
    )
    args = parser.parse_args()
    if args.store:
        found = load(args.runs)
        done = {"rows": table_of(found), "runs": len(found), "machines": read_machines(args.runs)}
        print(json.dumps({"speed": json.loads(args.store.read_text()), "sweep": done}, indent=1))
    else:
        sweep(args.runs, args.quick)
