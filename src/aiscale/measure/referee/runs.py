"""Starts a script as N watched ranks, waits for them, and ends them: nothing is left behind.

Each run has a folder of its own in one that `tempfile.mkdtemp` has made, which only this user can
read or write. The ranks meet on the loopback interface."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from aiscale import processes
from aiscale.measure.referee import placeholders, trace

#: Seconds that the other ranks have to fail by themselves after one has failed, and to write their
#: traces.
_PATIENCE_S = 15.0
#: What each rank needs is imported once, by the process from which ranks are forked.
_PRELOAD = ("torch._dynamo", "torch.distributed.tensor", "aiscale.traffic")
_MARK = "AISCALE_REFEREE"  #: in the environment of all that a run starts


@dataclass(frozen=True)
class Job:
    """A script and how it is started."""

    script: Path
    arguments: tuple[str, ...]
    ranks: int
    steps: int
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
        self.ranks: list[BaseProcess] = []
        self.late = False  #: stopped because its time was up
        self._start()

    def _start(self) -> None:
        job = self.job
        settings = {"folder": str(self.folder), "steps": job.steps, "bare": job.bare}
        settings |= {"noise": job.noise}
        settings |= {"weights": str(job.weights or ""), "batches": str(job.batches or "")}
        path = self.folder / "settings.json"
        path.write_text(json.dumps(settings))
        known = {"N": job.ranks, "TMP": str(self.work), "PWD": os.getcwd()}
        arguments = placeholders.fill(job.arguments, known)
        environment = _environment(job.ranks)
        processes.warm_up(_PRELOAD, environment)  # without the mark: it outlives this run
        environment |= {_MARK: str(self.folder)}
        command = ["-m", "aiscale.measure.referee.probe", str(path)]
        for rank in range(job.ranks):
            its_own = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            words = [*command, str(rank), str(job.script.resolve()), *arguments]
            self.ranks.append(self._start_rank(rank, words, its_own))

    def _start_rank(self, rank: int, words: list[str], environment: dict) -> BaseProcess:
        out, err = self.folder / f"out{rank}", self.folder / f"err{rank}"
        with out.open("wb") as said, err.open("wb") as complained:
            return processes.start_python(
                words,
                environment,
                preload=_PRELOAD,
                name=f"rank {rank}",
                cwd=self.work,
                stdout=said.fileno(),
                stderr=complained.fileno(),
            )

    def running(self) -> bool:
        return any(rank.exitcode is None for rank in self.ranks)

    def failed(self) -> bool:
        return any(rank.exitcode for rank in self.ranks)

    def stop(self) -> None:
        """Ask the ranks for their traces; end those that do not answer."""
        (self.folder / "stop").touch()
        deadline = time.monotonic() + _PATIENCE_S
        while self.running() and time.monotonic() < deadline:
            time.sleep(0.05)
        self.kill()

    def kill(self) -> None:
        """End the ranks, with all that they have started."""
        for rank in self.ranks:
            rank.kill()
            rank.join()
        processes.kill_marked(_MARK, str(self.folder))

    def complaints(self) -> list[str]:
        """Why ranks have failed, or where they stood when they were stopped."""
        found = ["its time was up (--limit gives it more)"] if self.late else []
        for number, rank in enumerate(self.ranks):
            if rank.exitcode:
                found.append(
                    f"rank {number}: {_last_words(self.folder / f'err{number}', rank.exitcode)}"
                )
        return found

    def traces(self) -> list[dict]:
        """Of all ranks; one that left none has taken no step."""
        found = []
        for rank in range(self.job.ranks):
            path, log = self.folder / f"rank{rank}.pt", self.folder / f"sent{rank}.jsonl"
            read = trace.load(path) if path.exists() else dict(trace.EMPTY, rank=rank)
            lines = log.read_text().splitlines(keepends=True) if log.exists() else []
            found.append(
                read | {"sent": [json.loads(line) for line in lines if line.endswith("\n")]}
            )
        return found


def wait(runs: Sequence[Run], limit_s: float) -> None:
    """Until all ranks of these runs have ended. After `limit_s`, or after one has failed, the
    others are stopped."""
    began, failed_at = time.monotonic(), {}
    try:
        while any(run.running() for run in runs):
            now = time.monotonic()
            for run in runs:
                if run.failed():
                    failed_at.setdefault(id(run), now)
                late = now - began > limit_s
                if run.running() and (late or now - failed_at.get(id(run), now) > _PATIENCE_S):
                    run.late = late
                    run.stop()
            time.sleep(0.05)
    finally:
        for run in runs:
            run.kill()


def _environment(ranks: int) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TORCHELASTIC_", "SLURM_"))
    }
    path = [os.path.abspath(each) for each in kept.get("PYTHONPATH", "").split(os.pathsep) if each]
    return kept | {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "OMP_NUM_THREADS": "1",  # sums in the same order, however busy the machine is
        "PYTHONPATH": os.pathsep.join(path),  # the ranks run in another folder
    }


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _last_words(path: Path, status: int) -> str:
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    for line in lines:
        if line.startswith("STUCK "):
            return f"stopped at {line.removeprefix('STUCK ')}"
    return lines[-1].strip()[:300] if lines else f"exit status {status}"
