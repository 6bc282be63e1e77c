"""Running the rungs' jobs: those of aiscale's own launcher by `starter`, the others by the launcher they are about.

with Jobs() as jobs:
    error = jobs.run(rung, folder)      # "" where the job ended well; may be called from several threads
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as JobTimeoutError
from pathlib import Path

from aiscale.verify import rungs
from aiscale.verify.rungs import Rung

TIMEOUT_S = 180
#: What else is imported stays away from a strategy whose library changes torch as it is imported.
_APART = ("zero", "megatron")
_TOGETHER = ("serial", "ddp", "fsdp", "pipeline")
#: Lines in which a launcher reports what the rank itself has said better.
_SECOND_HAND = re.compile(r"aiscale: rank \d+ of \d+(: lost its connection| failed with exit status| died: signal 15)")


class Jobs:
    """The starters that are running, and how to ask them."""

    def __init__(self) -> None:
        self._starters: dict[tuple[str, ...], _Starter] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Jobs:
        return self

    def __exit__(self, *_) -> None:
        for starter in self._starters.values():
            starter.close()

    def run(self, rung: Rung, folder: Path) -> str:
        """Run the rung's job, whose results go below `folder`; returns in one line what went wrong, or nothing."""
        log = folder / f"{rung.name}.log"
        try:
            if rung.launcher:
                status = self._by_its_launcher(rung, log)
            else:
                status = self.start(rung.strategy, rung.arguments(folder), log)
        except (JobTimeoutError, subprocess.TimeoutExpired):
            return f"no end after {TIMEOUT_S} s"
        return _explain(log, status) if status else ""

    def _by_its_launcher(self, rung: Rung, log: Path) -> int:
        with log.open("ab") as file:
            job = subprocess.run(
                rung.command(log.parent),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=_environment(),
                timeout=TIMEOUT_S,
            )
        return job.returncode

    def start(self, strategy: str, arguments: list[str], log: Path) -> int:
        """The exit status of `aiscale ARGUMENTS`, which trains by `strategy` and writes to `log` what it says."""
        strategies = (strategy,) if strategy in _APART else _TOGETHER
        with self._lock:
            if strategies not in self._starters:
                self._starters[strategies] = _Starter(strategies, log.parent)
        return self._starters[strategies].run(arguments, log)


class _Starter:
    """The parent's side of `starter`."""

    def __init__(self, strategies: tuple[str, ...], folder: Path) -> None:
        self.log = folder / f"starter-{strategies[0]}.log"
        with self.log.open("ab") as file:
            self.process = subprocess.Popen(
                [*rungs.PYTHON, "-m", "aiscale.verify.starter", *strategies],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env=_environment(),
            )
        self._ends: dict[int, Future[int]] = {}
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def run(self, arguments: list[str], log: Path) -> int:
        """The exit status of `aiscale ARGUMENTS`."""
        end: Future[int] = Future()
        with self._lock:
            number = len(self._ends)
            self._ends[number] = end
        try:
            self._send({"job": number, "arguments": arguments, "log": str(log)})
        except OSError:  # the starter has ended; its words are in its own log
            log.write_bytes(self.log.read_bytes())
            return 1
        try:
            return end.result(TIMEOUT_S)
        except JobTimeoutError:
            self._send({"kill": number})
            raise

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()
        self._reader.join()
        self.process.stdout.close()

    def _send(self, order: dict) -> None:
        with self._lock:
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()

    def _read(self) -> None:
        for line in self.process.stdout:
            answer = json.loads(line)
            self._ends[answer["job"]].set_result(answer["status"])
        for end in list(self._ends.values()):
            if not end.done():
                end.set_result(self.process.wait() or 1)


def _environment() -> dict[str, str]:
    """One thread a rank: the same order of summation whatever the machine, and no more threads than work."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def _explain(log: Path, status: int) -> str:
    """The line of a failed job's log that says why."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    told = [line for line in lines if not _SECOND_HAND.match(line)] or lines
    ours = [line for line in told if line.startswith("aiscale: ")]
    return (ours or told or [f"exit status {status}"])[-1]
