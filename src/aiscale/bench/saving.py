"""What a checkpoint costs training: `aiscale bench saving`, on two new ranks for each strategy.

Three things take turns in the same processes: steps with nothing else, a checkpoint that is written at once (training
waits for the disk), and one that is written in the background while steps go on. Training waits for the copy of its
states only, which is asked to take less than one step. The thread that writes also takes a share of the processor from
the steps beside it; that is counted apart, in steps that were lost.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from aiscale.bench.ddp import BenchError
from aiscale.bench.timing import machine_facts

RANKS, ROUNDS, PLAIN_STEPS = 2, 5, 6
TARGET = 1.0  #: steps that training may wait for a checkpoint of the background
STRATEGIES = {
    "ddp": (),
    "zero": ("parallel.zero_stage=2",),
    "fsdp": (),
    "pipeline": ("parallel.pp=2", "loop.micro_batch=4"),
    "megatron": ("parallel.tp=2",),
}


def bench_saving(*, quick: bool = False, report: Callable[[str], None] = lambda message: None) -> dict:
    """Median seconds of a step, of both ways to save, and the steps lost. quick: ddp with a tiny model."""
    from aiscale.distributed import launch

    rows = {}
    with tempfile.TemporaryDirectory(prefix="aiscale-bench-") as folder:
        for strategy in ["ddp"] if quick else STRATEGIES:
            report(f"{strategy}: {RANKS} ranks, {1 if quick else ROUNDS} rounds")
            status = launch(RANKS, ["-m", "aiscale.bench.saving", strategy, "quick" if quick else "full", folder])
            if status:
                raise BenchError(f"the ranks of bench saving ended with status {status}; what went wrong stands above")
            rows[strategy] = json.loads((Path(folder) / f"{strategy}.json").read_text())
    checks = [
        {
            "name": f"{strategy}: steps that training waits",
            "value": row["background_s"] / row["step_s"],
            "target": TARGET,
            "at_most": True,
            "met": row["background_s"] / row["step_s"] <= TARGET,
        }
        for strategy, row in rows.items()
    ]
    return {"ranks": RANKS, "strategies": rows, "checks": [] if quick else checks, "machine": machine_facts()}


def show_saving(result: dict) -> None:
    """Print what bench_saving returned."""
    machine = result["machine"]
    print(f"{machine['date']}  {machine['processor']}, {machine['cores']} cores, torch {machine['torch']}")
    print(
        f"{result['ranks']} ranks; training waits for a checkpoint, and what the one in the background costs beside it"
    )
    print(f"  {'':10} {'MB':>6} {'step':>9} {'at once':>16} {'background':>18} {'written in':>11} {'lost beside':>12}")
    for strategy, row in result["strategies"].items():
        step_s = row["step_s"]
        print(
            f"  {strategy:10} {row['checkpoint_bytes'] / 1e6:6.1f} {step_s * 1e3:6.0f} ms"
            f" {row['at_once_s'] * 1e3:6.0f} ms {row['at_once_s'] / step_s:4.1f} st"
            f" {row['background_s'] * 1e3:6.0f} ms {row['background_s'] / step_s:6.2f} st"
            f" {row['written_s'] * 1e3:8.0f} ms {row['lost_steps']:9.2f} st"
        )
    print(f"  st: steps without a checkpoint; at most {TARGET:g} is asked for in the background")


def _rank(strategy: str, quick: bool, folder: Path) -> None:
    """What each rank does."""
    import torch

    from aiscale.distributed import connect
    from aiscale.parallel import build
    from aiscale.recipes import recipe
    from aiscale.train.saving import Saver

    world = connect("cpu")
    shape = ("model.n_layer=2",) if quick else ("model.n_layer=6", "model.n_head=6", "model.d_model=384")
    settings = (f"parallel.strategy={strategy}", *STRATEGIES[strategy], "loop.device=cpu", *shape)
    run = recipe("laptop").override(*settings)
    engine = build(run, world)
    n_micro, micro_batch = run.loop.micro_batches(engine.data_world)
    tokens = torch.randint(0, 256, (n_micro, micro_batch, run.loop.seq_len + 1))
    batches = [(each[:, :-1], each[:, 1:]) for each in tokens]

    def step() -> float:
        return _timed(lambda: (engine.step(batches, 1e-4), world.barrier()))  # as long as its slowest rank

    checkpoints, rounds = folder / strategy, []
    with Saver(engine, checkpoints, keep=1, background=True) as saver:
        for number in range(0 if quick else -1, 1 if quick else ROUNDS):
            found = _round(world, saver, step, 10 * number + 20)
            rounds += [found] if number >= 0 else []  # the first one makes groups and memory
    if world.is_main:
        row = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
        files = [path.stat().st_size for path in checkpoints.rglob("*") if path.is_file()]
        (folder / f"{strategy}.json").write_text(json.dumps({**row, "checkpoint_bytes": sum(files)}))
    engine.close()
    world.close()


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


if __name__ == "__main__":
    _rank(sys.argv[1], sys.argv[2] == "quick", Path(sys.argv[3]))
