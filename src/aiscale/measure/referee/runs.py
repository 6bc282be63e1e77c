"""Starts a script as N watched ranks, waits for them, and ends them: nothing is left behind.

Each run has a folder of its own in one that only this user can read or write. The ranks meet on the
loopback interface or, as tasks of `srun`, on task 0's node."""

from __future__ import annotations

import json
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from aiscale import processes
from aiscale.measure.referee import placeholders, start, tasks, trace
from aiscale.measure.referee.modules import PLACE

#: Seconds that the other ranks have to fail by themselves after one has failed, and to write their
#: traces.
_PATIENCE_S = 15.0
#: What gloo says of a rank that another one has left.
_FOLLOWS = "Connection closed by peer"


@dataclass(frozen=True)
class Job:
    """A script and how it is started."""

    script: Path
    arguments: tuple[str, ...]
    ranks: int
    steps: int
    module: str = ""  #: what `python -m` would start, if the script is started so
    bare: bool = False  #: watch nothing but losses and weights
    noise: bool = False  #: errors as large as rounding, in activations and gradients
    weights: Path | None = None  #: to begin with
    batches: Path | None = None  #: the folder of a run whose ranks' batches are to be read


class Run:
    """The ranks of a job, from their start to their traces."""

    def __init__(self, job: Job, folder: Path, work: Path | None = None):
        self.job, self.folder = job, folder
        self.work = work or folder / "work"
        folder.mkdir()
        self.work.mkdir(exist_ok=True)
        self.ranks: list[BaseProcess | tasks.OtherTask] = []
        self.late = False  #: stopped because its time was up
        self._start()

    def _start(self) -> None:
        job = self.job
        settings = {"folder": str(self.folder), "steps": job.steps, "bare": job.bare}
        settings |= {"noise": job.noise, "module": job.module, "started_in": os.getcwd()}
        settings |= {"weights": str(job.weights or ""), "batches": str(job.batches or "")}
        path = self.folder / "settings.json"
        path.write_text(json.dumps(settings))
        known = {"N": job.ranks, "TMP": str(self.work), "PWD": os.getcwd()}
        arguments = placeholders.fill(job.arguments, known)
        words = [str(job.script.resolve()), *arguments]
        if 1 < job.ranks == tasks.count():
            self.ranks += tasks.start_ranks(self.folder, self.work, words, job.ranks)
            return
        meet = start.meeting_place(job.ranks)
        for rank in range(job.ranks):
            self.ranks.append(start.start_rank(self.folder, self.work, words, rank, meet))

    def running(self) -> bool:
        return any(rank.exitcode is None for rank in self.ranks)

    def failed(self) -> bool:
        return any(rank.exitcode for rank in self.ranks)

    def waits_for_ranks(self) -> bool:
        """Whether some ranks have taken all steps and wait for the others."""
        return any(path.exists() for path in self._done())

    def stop(self) -> None:
        """Ask the ranks for their traces; end those that do not answer."""
        (self.folder / "stop").touch()
        _wait_until(self._all_have_answered)
        for path in self._done():
            path.touch()  # now they leave: each waits for the others
        _wait_until(lambda: not self.running())
        self.kill()

    def _done(self) -> list[Path]:
        """The files that ranks write when they have saved their traces."""
        return [self.folder / f"done{rank}" for rank in range(self.job.ranks)]

    def _all_have_answered(self) -> bool:
        for rank, done in zip(self.ranks, self._done(), strict=True):
            if rank.exitcode is None and not done.exists():
                return False
        return True

    def kill(self) -> None:
        """End the ranks, with all that they have started."""
        for rank in self.ranks:
            rank.kill()
            rank.join()
        processes.kill_marked(start.MARK, str(self.folder))

    def complaints(self) -> list[str]:
        """Why ranks have failed, or where they stood when they were stopped.

        First what the fewest say: it is the odd rank for which the others wait."""
        ranks_that_say: dict[str, list[int]] = defaultdict(list)
        for number, rank in enumerate(self.ranks):
            if rank.exitcode:
                words = _last_words(
                    self.folder / f"err{number}", rank.exitcode, self.job.script.parent
                )
                ranks_that_say[words].append(number)

        def order(words: str) -> tuple[bool, int]:
            return _FOLLOWS in words, len(ranks_that_say[words])

        slow = "its time was up: a rank hangs, or the script is slow (--limit gives it more)"
        found = [slow] if self.late else []
        for words in sorted(ranks_that_say, key=order):
            ranks = ranks_that_say[words]
            who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks}"
            found.append(f"{who}: {words}")
        return found

    def traces(self) -> list[dict]:
        return read_traces(self.folder, self.job.ranks)


def read_traces(folder: Path, ranks: int) -> list[dict]:
    """Of all ranks of a run; one that left none has taken no step."""
    found = []
    for rank in range(ranks):
        path, log = folder / f"rank{rank}.pt", folder / f"sent{rank}.jsonl"
        read = trace.load(path) if path.exists() else dict(trace.EMPTY, rank=rank)
        lines = log.read_text().splitlines(keepends=True) if log.exists() else []
        found.append(read | {"sent": [json.loads(line) for line in lines if line.endswith("\n")]})
    return found


def wait(runs: Sequence[Run], limit_s: float) -> None:
    """Until all ranks of these runs have ended. After `limit_s`, or if one has failed or is done
    and the others do not follow, these are stopped."""
    began, failed_at, done_at = time.monotonic(), {}, {}
    try:
        while any(run.running() for run in runs):
            now = time.monotonic()
            for run in runs:
                if run.failed():
                    failed_at.setdefault(id(run), now)
                if run.waits_for_ranks():
                    done_at.setdefault(id(run), now)
                late = now - began > limit_s
                failed = now - failed_at.get(id(run), now) > _PATIENCE_S
                # A rank that never comes: the others get as much time again as the first one took.
                first_s = done_at.get(id(run), now) - began
                alone = now - began > 2 * first_s + _PATIENCE_S
                if run.running() and (late or failed or alone):
                    run.late = late
                    run.stop()
            time.sleep(0.05)
    finally:
        for run in runs:
            run.kill()


def _wait_until(condition: Callable[[], bool]) -> None:
    """Or until ranks have had the time that they get to save and end."""
    deadline = time.monotonic() + _PATIENCE_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


def _last_words(path: Path, status: int, scripts: Path) -> str:
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    for line in lines:
        if line.startswith("STUCK "):
            return f"stopped at {line.removeprefix('STUCK ')}"
    return _error_in(lines, scripts)[:300] if lines else f"exit status {status}"


def _error_in(lines: list[str], scripts: Path) -> str:
    """The first line of an exception, whose message may have more, and where it came up: of one
    inside a module, or of the last one; else the last line."""
    begins = [number for number, line in enumerate(lines) if line.startswith("Traceback (")]
    in_module = [number for number, line in enumerate(lines) if line.startswith(PLACE)]
    if in_module:
        begins = [number for number in begins if number < in_module[0]]
    if not begins:
        return lines[-1].strip()
    where = ""
    for number, line in enumerate(lines[begins[-1] + 1 :], begins[-1] + 1):
        if not line.startswith(" "):
            where = f", {lines[in_module[0]].strip()}" if in_module else where
            return line.strip().rstrip(".") + where
        place = re.match(r' +File "(.+)", line (\d+), in ', line)
        if place and Path(place[1]).parent == scripts.resolve():
            code = lines[number + 1].strip()
            where = f", at {Path(place[1]).name}:{place[2]}: {code}"
    return lines[-1].strip()
