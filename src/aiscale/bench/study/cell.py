"""One cell of a study, measured on its ranks: `python -m aiscale.bench.study.cell SPEC.json OUT.json`, once a rank.

As in Turing Technical Report 3: two epochs, the second is timed, and the time is the mean over ranks. An epoch is one
pass over the first data_kib KiB of the corpus, projected to 8-bit ASCII, one token a byte. Two more steps measure what
a step allocates at its peak (torch's profiler on a CPU, the allocator on a GPU) and sends.

A rank that fails writes why beside OUT, so that the study can record it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from aiscale.bench.study.grid import FACTS, Cell, run_of
from aiscale.config import HFModelConfig, Run
from aiscale.data import Batches
from aiscale.distributed import World, connect
from aiscale.meter import held_bytes, step_peak_bytes, wire_bytes
from aiscale.model import build_model
from aiscale.parallel import Engine, build
from aiscale.parallel.ddp import DDPEngine
from aiscale.train.records import machine, versions

INTERRUPTED = 130  #: exit status of a rank after Ctrl-C


def measure(world: World, cell: Cell, data: str, limit_bytes: float | None, probe: bool) -> dict:
    """The figures of this cell, the same on all ranks. probe: only its peak memory."""
    if limit_bytes and world.device.type == "cuda":
        whole = torch.cuda.get_device_properties(world.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / whole), world.device)
    run, started = run_of(cell), time.perf_counter()
    tokens, stage_s = open_tokens(data, str(cell["place"]))
    engine = _engine(run, world, cell)
    batches = Batches(tokens, seq_len=run.loop.seq_len, global_batch=run.loop.global_batch, seed=run.data.seed)
    n_micro, _ = run.loop.micro_batches(engine.data_world)
    trains = cell["phase"] != "inference"

    def work(micro_batches: list[tuple[Tensor, Tensor]]) -> float:
        return engine.step(micro_batches, run.optimizer.lr).loss if trains else engine.evaluate(micro_batches)[0]

    def share(step: int) -> list[tuple[Tensor, Tensor]]:
        return batches.share(step, engine.data_rank, engine.data_world, n_micro)

    work(share(0))
    _synchronize(world)
    ready_s = time.perf_counter() - started
    found = {"stage_s": stage_s, "ready_s": ready_s, "steps": batches.steps_per_epoch}
    if not probe:
        found |= _epochs(world, work, share, batches.steps_per_epoch)
        tokens_read = batches.steps_per_epoch * run.loop.global_batch * run.loop.seq_len
        found |= {"tokens_per_s": tokens_read / found["epoch_s"]}
    before = world.traffic.snapshot()
    loss = work(share(1))
    sent = wire_bytes(world.traffic.since(before), world.backend)  # an evaluation is not counted
    batch = share(2)
    with _quiet():
        peak = step_peak_bytes(lambda: work(batch), engine.held, world.device)
    every = world.gather((sum(peak.values()), sent, sum(held_bytes(engine.held()).values())))
    peaks, sents, helds = zip(*every, strict=True)
    found |= {"peak_bytes": max(peaks), "held_bytes": max(helds)}
    if trains:
        found["wire_bytes_per_step"] = statistics.fmean(sents)
    engine.close()
    if limit_bytes and found["peak_bytes"] > limit_bytes and not probe:
        raise MemoryError(f"a step needs {max(peaks):.0f} bytes, the limit is {limit_bytes:.0f}")
    return {**found, "loss": loss}


def _epochs(world: World, work, share, steps: int) -> dict:
    """The first epoch, with what it takes to get going, and the second, step by step."""
    seconds: list[list[float]] = []
    for epoch in range(2):
        world.barrier()
        marks = [time.perf_counter()]
        for step in range(steps):
            work(share(epoch * steps + step))
            _synchronize(world)
            marks.append(time.perf_counter())
        seconds.append(marks)
    first, second = ([marks[-1] - marks[0] for marks in every] for every in zip(*world.gather(seconds), strict=True))
    steps_s = [after - before for before, after in zip(seconds[1], seconds[1][1:], strict=False)]
    return {
        "first_epoch_s": statistics.fmean(first),
        "epoch_s": statistics.fmean(second),
        "slowest_rank_s": max(second),
        "step_s": statistics.median(steps_s),
    }


# Engines that the kit does not have otherwise ------------------------------------------------------------------------


def _engine(run: Run, world: World, cell: Cell) -> Engine:
    """The strategy's engine. bert puts transformers' masked model into it; fine-tuning trains the last block only,
    and leaves out gradients and moments of the rest."""
    if cell["model"] == "gpt" and cell["phase"] != "fine-tuning":
        return build(run, world)

    class Changed(DDPEngine if world.size > 1 else Engine):
        def _place(self, model: nn.Module) -> nn.Module:
            if cell["model"] == "bert":
                model = build_model(HFModelConfig.like(run.model, "bert"))
            if cell["phase"] == "fine-tuning":
                model.requires_grad_(False)
                model.blocks[-1].requires_grad_(True)
            return super()._place(model)

    engine = Changed(run, world)
    if run.loop.compile:
        engine.model.compile()
    return engine


# Data ----------------------------------------------------------------------------------------------------------------


class Spooled:
    """Tokens that stay on the disk: each window is read when it is needed."""

    def __init__(self, path: str) -> None:
        self.file, self.dtype, self.name = os.open(path, os.O_RDONLY), np.dtype(np.uint8), path
        self._length = os.fstat(self.file).st_size

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, window: slice) -> np.ndarray:
        start, stop, _ = window.indices(self._length)
        return np.frombuffer(os.pread(self.file, stop - start, start), np.uint8)


def open_tokens(path: str, place: str) -> tuple[object, float]:
    """(the tokens, seconds of copying): in memory, memory-mapped, spooled from the file, or staged: copied to the
    node's scratch ($TMPDIR) and mapped there."""
    if place == "memory":
        return np.fromfile(path, np.uint8), 0.0
    if place == "spooled":
        return Spooled(path), 0.0
    if place == "mapped":
        return np.memmap(path, np.uint8, mode="r"), 0.0
    start = time.perf_counter()
    with tempfile.NamedTemporaryFile(prefix="aiscale-staged-") as copy:  # the mapping outlives its name
        shutil.copyfile(path, copy.name)
        return np.memmap(copy.name, np.uint8, mode="r"), time.perf_counter() - start


@contextmanager
def _quiet() -> Iterator[None]:
    """Nothing on stderr, where torch's profiler tells about memory that it has not seen allocated."""
    before = os.dup(2)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def _synchronize(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


# A rank --------------------------------------------------------------------------------------------------------------


def main(spec_file: str, out: str) -> None:
    spec = json.loads(Path(spec_file).read_text())
    signal.setitimer(signal.ITIMER_REAL, spec["limit_s"])  # ends the rank, whatever it waits for
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))  # Ctrl-C is no result of this cell
    cell = spec["cell"]
    try:
        world = connect(run_of(cell).loop.device)
        found = measure(world, cell, spec["data"], spec["limit_bytes"], spec["probe"])
    except Exception as error:
        no_room = isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate" in str(error)
        why = {"status": "out of memory" if no_room else "failed", "error": f"{type(error).__name__}: {error}"}
        Path(f"{out}.failed").write_text(json.dumps(why))
        raise SystemExit(1) from None
    if world.is_main:
        here = machine(world.device)
        device = here["processor"] if here["device"] == "cpu" else here["device"]
        facts = {**here, **versions(), "device": device}
        found |= {name: facts.get(name, "") for name in FACTS}
        Path(out).write_text(json.dumps(found))
    world.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
