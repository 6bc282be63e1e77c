"""One cell of a study, measured on its ranks: `python -m aiscale.study.cell SPEC.json OUT.json`, once a rank.

As in Turing Technical Report 3: two epochs, the second is timed, and the time is the mean over ranks. An epoch is one
pass over the first data_kib KiB of the corpus, projected to 8-bit ASCII, one token a byte. One more step measures what
a step allocates at its peak (torch's profiler on a CPU, the allocator on a GPU). A rank that fails writes why to OUT.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

from aiscale.data import Batches
from aiscale.distributed import World, connect
from aiscale.meter import step_peak_bytes
from aiscale.parallel import build
from aiscale.study.grid import Cell, run_of
from aiscale.train.records import machine, versions


def measure(world: World, cell: Cell, data: str) -> dict:
    """The figures of this cell, the same on all ranks."""
    run, started = run_of(cell), time.perf_counter()
    loop, engine, tokens = run.loop, build(run, world), np.memmap(data, np.uint8, mode="r")
    if cell["place"] == "memory":  # spooled: each window is read from the file when it is needed
        tokens = np.array(tokens)
    batches = Batches(tokens, seq_len=loop.seq_len, global_batch=loop.global_batch, seed=run.data.seed)
    steps, (n_micro, _) = batches.steps_per_epoch, loop.micro_batches(engine.data_world)

    def share(step: int) -> list:
        return batches.share(step, engine.data_rank, engine.data_world, n_micro)

    def work(micro_batches: list) -> float:
        if cell["phase"] == "inference":
            loss, _ = engine.evaluate(micro_batches)
        else:
            loss = engine.step(micro_batches, run.optimizer.lr).loss
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        return loss

    work(share(0))
    figures = {"ready_s": time.perf_counter() - started, "steps": steps}
    marks: list[list[float]] = []
    for epoch in range(2):
        world.barrier()
        marks.append([time.perf_counter()])
        for step in range(steps):
            work(share(epoch * steps + step))
            marks[-1].append(time.perf_counter())
    first, second = (statistics.fmean(world.gather(each[-1] - each[0])) for each in marks)
    figures |= {"first_epoch_s": first, "epoch_s": second, "step_s": statistics.median(np.diff(marks[1]).tolist())}
    figures["tokens_per_s"] = steps * loop.global_batch * loop.seq_len / second
    batch = share(0)
    peak = step_peak_bytes(lambda: work(batch), engine.tensors, world.device)
    figures["peak_bytes"] = max(world.gather(sum(peak.values())))
    engine.close()
    return figures


def main(spec_file: str, out: str) -> None:
    spec = json.loads(Path(spec_file).read_text())
    signal.setitimer(signal.ITIMER_REAL, spec["limit_s"])  # ends the rank, whatever it waits for
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # Ctrl-C is no result of this cell
    try:
        world = connect(run_of(spec["cell"]).loop.device)
        figures = measure(world, spec["cell"], spec["data"])
    except Exception as error:
        no_room = isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate" in str(error)
        why = {"status": "out of memory" if no_room else "failed", "error": f"{type(error).__name__}: {error}"}
        Path(out).write_text(json.dumps(why))
        raise SystemExit(1) from None
    if world.is_main:
        here = machine(world.device) | versions()
        here["device"] = here["processor"] if here["device"] == "cpu" else here["device"]
        facts = {name: here.get(name) for name in ("device", "cores", "python", "torch", "commit")}
        Path(out).write_text(json.dumps(figures | facts))
    world.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
