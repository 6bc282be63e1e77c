"""Under `srun`, each task of the allocation is one of the ranks that a run needs.

    srun aiscale verify train.py --steps 2 -- --batch 512 && srun python train.py --batch 512

Task 0 judges, and runs the reference where it is. For each run on all tasks it writes an order into
a folder that all nodes see; each other task then starts its rank, and writes how it has ended."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from aiscale.measure.referee.start import free_port, start_rank


def count() -> int:
    """The tasks of the `srun` that has started this process; 1 without one.

    A batch script has SLURM_PROCID too; only what srun starts has SLURM_STEP_NUM_TASKS."""
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", 1))


def number() -> int:
    return int(os.environ.get("SLURM_PROCID", 0))


def meeting_place(ranks: int) -> dict[str, str]:
    """At task 0's node. Each task adds its own LOCAL_RANK."""
    return {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": socket.gethostname(),
        "MASTER_PORT": str(free_port()),
    }


def _of_this_task() -> dict[str, str]:
    on_node = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "1").partition("(")[0].partition(",")[0]
    return {"LOCAL_RANK": os.environ.get("SLURM_LOCALID", "0"), "LOCAL_WORLD_SIZE": on_node}


def _folder() -> Path:
    job, step = os.environ.get("SLURM_JOB_ID", "0"), os.environ.get("SLURM_STEP_ID", "0")
    return Path(f".aiscale-referee-{job}.{step}").resolve()


@contextmanager
def shared_folder() -> Iterator[Path]:
    """Of task 0: below the folder from which all tasks were started, for this user only. When it
    has a file `over`, the other tasks leave."""
    top = _folder()
    top.mkdir(mode=0o700)
    try:
        yield top
    finally:
        (top / "over").touch()
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and len(list(top.glob("left*"))) < count() - 1:
            time.sleep(0.1)
        shutil.rmtree(top, ignore_errors=True)


class OtherTask:
    """The rank of another task, as if this process had started it."""

    def __init__(self, folder: Path, rank: int):
        self._ended, self._stop = folder / f"ended{rank}", folder / "stop"

    @property
    def exitcode(self) -> int | None:
        return int(self._ended.read_text()) if self._ended.exists() else None

    def kill(self) -> None:
        self._stop.touch()  # its own task then ends it

    def join(self) -> None:
        deadline = time.monotonic() + 60
        while self.exitcode is None and time.monotonic() < deadline:
            time.sleep(0.05)


def start_ranks(folder: Path, work: Path, words: list[str], ranks: int) -> list:
    """Task 0's rank, and an order for the others."""
    meet = meeting_place(ranks)
    order = {"folder": str(folder), "work": str(work), "words": words, "meet": meet}
    _write(folder / "order.json", json.dumps(order))
    mine = start_rank(folder, work, words, 0, meet | _of_this_task())
    return [mine, *(OtherTask(folder, rank) for rank in range(1, ranks))]


def follow(patience_s: float = 300.0) -> None:
    """Of the tasks after 0: start a rank for each order, until it is over."""
    top, done = _folder(), set()
    deadline = time.monotonic() + patience_s
    while not top.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    while top.exists() and not (top / "over").exists():
        for path in sorted(top.glob("*/order.json")):
            if path not in done:
                done.add(path)
                _obey(json.loads(path.read_text()), top)
        time.sleep(0.1)
    if top.exists():
        (top / f"left{number()}").touch()


def _obey(order: Mapping, top: Path) -> None:
    folder, rank = Path(order["folder"]), number()
    meet = order["meet"] | _of_this_task()
    process = start_rank(folder, Path(order["work"]), order["words"], rank, meet)
    stop = folder / "stop"
    while process.exitcode is None and not stop.exists() and not (top / "over").exists():
        time.sleep(0.05)
    process.join(15)  # a stopped rank writes where it stands, and leaves
    process.kill()
    process.join()
    _write(folder / f"ended{rank}", str(process.exitcode))


def _write(path: Path, words: str) -> None:
    """Whole or not at all: others wait for this file."""
    part = path.with_suffix(".part")
    part.write_text(words)
    part.replace(path)
