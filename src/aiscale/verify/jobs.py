"""Runs the jobs of rungs: with `Starter`, or with the launcher that the rung tests.

with Jobs() as jobs:
    error = jobs.run(rung, folder)      # "" if the job succeeded; may be called from several threads
"""

from __future__ import annotations

import os
import re
import subprocess
import threading
from pathlib import Path

from aiscale.distributed.starter import Starter, StarterError
from aiscale.verify import rungs
from aiscale.verify.rungs import Rung

TIMEOUT_S = 180
#: Strategies whose library changes torch when it is imported: each gets its own process.
_APART = ("zero", "megatron")
_TOGETHER = ("serial", "ddp", "fsdp", "pipeline")
_WARM_UP = "import aiscale.train, aiscale.parallel as p; [p.preload(strategy) for strategy in {}]"
#: Lines of a launcher about an error that the rank itself has explained better.
_SECOND_HAND = re.compile(r"aiscale: rank \d+ of \d+(: lost its connection| failed with exit status| died: signal 15)")


class Jobs:
    def __init__(self) -> None:
        self._starters: dict[tuple[str, ...], tuple[Starter, Path]] = {}  #: strategies -> starter, its log
        self._lock = threading.Lock()

    def __enter__(self) -> Jobs:
        return self

    def __exit__(self, *_) -> None:
        for starter, _log in self._starters.values():
            starter.close()

    def run(self, rung: Rung, folder: Path) -> str:
        """Run the rung's job, with results below `folder`; returns its error in one line, or ""."""
        log = folder / f"{rung.name}.log"
        try:
            if rung.launcher:
                status = self._by_its_launcher(rung, log)
            else:
                status = self.start(rung.strategy, rung.arguments(folder), log)
        except subprocess.TimeoutExpired:
            return f"no end after {TIMEOUT_S} s"
        return _explain(log, status) if status else ""

    def _by_its_launcher(self, rung: Rung, log: Path) -> int:
        with log.open("ab") as file:
            files = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
            return subprocess.call(rung.command(log.parent), env=_environment(), timeout=TIMEOUT_S, **files)

    def start(self, strategy: str, arguments: list[str], log: Path) -> int:
        """The exit status of `aiscale ARGUMENTS`, which trains with `strategy` and writes its output to `log`."""
        starter, its_log = self._starter((strategy,) if strategy in _APART else _TOGETHER, log.parent)
        with log.open("ab") as file:
            try:
                return starter.call(["-m", "aiscale", *arguments], stdout=file, stderr=file, timeout=TIMEOUT_S)
            except StarterError as error:
                file.write(its_log.read_bytes() + f"{error}\n".encode())
                return 1

    def _starter(self, strategies: tuple[str, ...], folder: Path) -> tuple[Starter, Path]:
        with self._lock:
            if strategies not in self._starters:
                log = folder / f"starter-{strategies[0]}.log"
                with log.open("ab") as file:
                    starter = Starter(_WARM_UP.format(strategies), env=_environment(), python=rungs.PYTHON, stderr=file)
                self._starters[strategies] = starter, log
            return self._starters[strategies]


def _environment() -> dict[str, str]:
    """One thread per rank: the same order of summation on every machine."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def _explain(log: Path, status: int) -> str:
    """The line of a failed job's log that says why."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    first_hand = [line for line in lines if not _SECOND_HAND.match(line)] or lines
    ours = [line for line in first_hand if line.startswith("aiscale: ")]
    return (ours or first_hand or [f"exit status {status}"])[-1]
