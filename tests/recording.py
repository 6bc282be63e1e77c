"""Records the order in which ranks flush files: `python tests/recording.py -m aiscale train ...`, as `python -m`.

Every job appends lines [rank, what, path] to runs/NAME/flushed.jsonl. `what` is "flushed", "named" when a file or a
checkpoint gets its final name, or "watched" if a blocking write contained an operation that the watchdog watches. A
background write starts only after the next step has started.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import threading
from pathlib import Path

import torch.distributed as dist

from aiscale import checkpoint
from aiscale.meter import Meter
from aiscale.train import saving

begun = threading.Event()  #: set when the step after a checkpoint starts


def note(what: str, path: Path) -> None:
    if "checkpoints" in path.parts:
        run = Path(*path.parts[: path.parts.index("checkpoints")])
        line = json.dumps([dist.get_rank(), what, str(path)]) + "\n"
        with (run / "flushed.jsonl").open("a") as file:
            file.write(line)


def fsync(handle, real=os.fsync) -> None:
    real(handle)
    number = handle if isinstance(handle, int) else handle.fileno()
    note("flushed", Path(os.readlink(f"/proc/self/fd/{number}")))


def rename(self, target, real=Path.rename):
    note("named", Path(target).absolute())
    return real(self, target)


def step(self, real=Meter.step):
    begun.set()
    return real(self)


def save(self, *args, real=saving.Saver.save, **keywords):
    begun.clear()
    real(self, *args, **keywords)


def prepare(engine, *args, real=checkpoint.prepare, **keywords):
    write = real(engine, *args, **keywords)

    def collectives() -> dict:
        return {group: number for group, (number, *_) in engine.world.traffic.progress.table().items()}

    def watched(world) -> Path:
        background = threading.current_thread() is not threading.main_thread()
        assert not background or begun.wait(60), "training waits for a checkpoint in the background"
        before = collectives()
        path = write(world)
        if not background and collectives() != before:
            note("watched", path)
        return path

    return watched


if __name__ == "__main__":
    os.fsync, Path.rename = fsync, rename
    Meter.step, saving.Saver.save, checkpoint.prepare = step, save, prepare
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
