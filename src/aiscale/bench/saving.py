"""What a checkpoint costs training: `aiscale bench saving`, on two new ranks for each strategy.

Three actions take turns in the same processes: plain steps, a blocking checkpoint (training waits for the disk), and a
background checkpoint that is written while steps go on. With the latter, training waits only while the states are
copied; the target is less than one step. The writing thread also takes processor time from the steps; that is reported
separately, as steps lost.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from aiscale.bench.ranks import Report, on_ranks, random_batch, silent
from aiscale.bench.tables import check, checks_table, heading, table
from aiscale.bench.timing import machine_facts

RANKS, ROUNDS, PLAIN_STEPS = 2, 5, 6
TARGET = 1.0  #: steps that training may wait for a background checkpoint
STRATEGIES = {
    "ddp": (),
    "zero": ("parallel.zero_stage=2",),
    "fsdp": (),
    "pipeline": ("parallel.pp=2", "loop.micro_batch=4"),
    "megatron": ("parallel.tp=2",),
}


def bench_saving(*, quick: bool = False, report: Report = silent) -> dict:
    """Median seconds of a step and of both ways to save, and the steps lost. quick: ddp with a tiny model."""
    rows = {}
    for strategy in ["ddp"] if quick else STRATEGIES:
        report(f"{strategy}: {RANKS} ranks, {1 if quick else ROUNDS} rounds")
        folder = tempfile.mkdtemp(prefix="aiscale-bench-")
        try:
            rows[strategy] = on_ranks(RANKS, "aiscale.bench.saving:measure", strategy, quick, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    checks = [
        check(f"{strategy}: steps that training waits", row["background_s"] / row["step_s"], TARGET)
        for strategy, row in rows.items()
    ]
    return {"ranks": RANKS, "strategies": rows, "checks": [] if quick else checks, "machine": machine_facts()}


def show_saving(result: dict) -> None:
    heading(result)
    heads = ("", "MB", "step", "waits at once", "steps", "waits in background", "steps", "written in", "steps lost")
    rows = []
    for strategy, row in result["strategies"].items():
        ms = {key: f"{row[key] * 1e3:.0f} ms" for key in ("step_s", "at_once_s", "background_s", "written_s")}
        at_once, background = (f"{row[key] / row['step_s']:.2f}" for key in ("at_once_s", "background_s"))
        waits = (ms["at_once_s"], at_once, ms["background_s"], background)
        size = f"{row['checkpoint_bytes'] / 1e6:.1f}"
        rows.append((strategy, size, ms["step_s"], *waits, ms["written_s"], f"{row['lost_steps']:.2f}"))
    table(f"{result['ranks']} ranks; how long training waits for a checkpoint, also in steps", heads, rows)
    checks_table(result["checks"])


def measure(world, strategy: str, quick: bool, folder: str) -> dict:
    """Runs on each rank; checkpoints are written to `folder`."""
    from aiscale.parallel import build
    from aiscale.recipes import recipe
    from aiscale.train.saving import Saver

    shape = ("model.n_layer=2",) if quick else ("model.n_layer=6", "model.n_head=6", "model.d_model=384")
    settings = (f"parallel.strategy={strategy}", *STRATEGIES[strategy], "loop.device=cpu", *shape)
    run = recipe("laptop").override(*settings)
    engine = build(run, world)
    batch = random_batch(run, engine.data_world)

    def step() -> float:
        return _timed(lambda: (engine.step(batch, 1e-4), world.barrier()))  # as long as the slowest rank takes

    rounds = []
    with Saver(engine, Path(folder), keep=1, background=True) as saver:
        for number in range(0 if quick else -1, 1 if quick else ROUNDS):
            found = _round(world, saver, step, 10 * number + 20)
            rounds += [found] if number >= 0 else []  # the first round creates process groups and allocates memory
    world.barrier()
    checkpoint_bytes = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    engine.close()
    row = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
    return {**row, "checkpoint_bytes": checkpoint_bytes}


def _round(world, saver, step: Callable[[], float], number: int) -> dict:
    step_s = statistics.median(step() for _ in range(PLAIN_STEPS))
    at_once_s = _timed(lambda: (saver.save(number, None, wait=True), world.barrier()))
    step()
    start_s = time.perf_counter()
    background_s = _timed(lambda: (saver.save(number + 1, None), world.barrier()))
    beside = []
    while not world.any(saver.done):
        beside.append(step())
    saver.finish()
    return {
        "step_s": step_s,
        "at_once_s": at_once_s,
        "background_s": background_s,
        "written_s": time.perf_counter() - start_s,
        "lost_steps": sum(beside) / step_s - len(beside),
    }


def _timed(action: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    action()
    return time.perf_counter() - start_s
