"""Ranks in a Slurm job: started with srun if this kernel is in a job, else in a job that is submitted for them.

    cluster.start(16, engines="slurm", account="abc123", time="30:00")

Nothing listens on a login node: rank 0's task runs the controller and the rendezvous store, and the kernel connects to
it with a key from a folder that only its owner can read. The job ends with the ranks, with the kernel, or when waiting
for it is interrupted.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from aiscale.cluster import guard
from aiscale.cluster.errors import ClusterError, RanksInterrupted
from aiscale.cluster.job import Job, Line, State, ask
from aiscale.cluster.local import Exit, LocalLauncher

_PAUSE_S = 30.0  #: between two questions to Slurm, at first less: slurmctld serves all users
_LOG_S = 0.3  #: between looks at a log, which may be on a shared file system
_NEW_RANKS = "new ranks\n"  #: engines.sbatch writes this when it starts ranks again
_NO_RANKS = "srun has ended\n"  #: engines.sbatch writes this when no ranks are left
_END_S = 5.0  #: for a cancelled job to end before its files are removed
_PATIENCE_S = 60.0  #: if Slurm does not answer, before giving up a job in which ranks could start again


class SlurmLauncher(LocalLauncher):
    remote = True

    def __init__(self, size: int, folder: Path, job: Job) -> None:
        super().__init__(size, folder, job)
        self.job = ""  #: the job's id, once there is one
        self._is_ours = job.is_own or "SLURM_JOB_ID" not in os.environ
        self._state: State | None = None
        self._asking: threading.Thread | None = None
        self._ask_at, self._pause_s = 0.0, 5.0
        self._looked = 0.0
        self._replaced = 0  # how often the ranks were replaced
        self._tmp = ""
        self._ends: list[Exit] = []

    @staticmethod
    def folder_for(cluster_id: str) -> Path:
        runs = Path(os.environ.get("AISCALE_RUNS") or "runs").absolute()
        try:
            runs.mkdir(parents=True, exist_ok=True)
            return Path(tempfile.mkdtemp(prefix=f"engines-{cluster_id}-", dir=runs))
        except OSError as error:
            raise ClusterError(
                f"{runs}: {(error.strerror or str(error)).lower()}: set AISCALE_RUNS to a folder that you may write "
                "to and all nodes see"
            ) from None

    def start(self, env: Mapping[str, str]) -> None:
        if self.job and self._is_ours:
            self._start_again()
            return
        # Where ranks see this kernel's temporary files: each node has its own /tmp.
        self._tmp = tempfile.tempdir = tempfile.mkdtemp(prefix="tmp-", dir=self.folder)
        if self._is_ours:
            self.job = self.options.submit(self.size, self.folder, env)
            (self.folder / "job").write_text(self.job)
            return
        self.job = os.environ["SLURM_JOB_ID"]
        self.processes = [self._spawn([*self._srun(), sys.executable, "-u"], env, "slurm")]

    def _start_again(self) -> None:
        shutil.rmtree(self.folder / "profile")
        for log in (*self.folder.glob("rank*.log"), self.folder / "controller.log"):
            log.unlink(missing_ok=True)
        self._replaced, self._ends = self._replaced + 1, []
        (self.folder / "again").touch()

    def keeps_job(self) -> bool:
        """End the ranks and keep their job, if it was submitted for them and still runs; False if there is none."""
        lost_job = any(end.rank is None for end in self._ends)
        if not self._is_ours or lost_job or not self.job:
            return False
        state = ask(self.job) or self._state
        runs = bool(state and state.name in ("RUNNING", "SIGNALING"))
        return runs and guard.cancel(str(self.folder), "step", patience_s=_PATIENCE_S)

    def _srun(self) -> list[str]:
        """The srun command for a step in the job that this kernel is in."""
        place, have = self.options.place, int(os.environ.get("SLURM_NNODES", 1))
        nodes = self.options.nodes_for(self.size)
        if nodes > have:
            raise ClusterError(
                f"cluster.start: {self.size} ranks need {nodes} nodes{f' of {place.title}' if place else ''}, and job "
                f"{self.job} has {have}: start fewer, or engines='local' for ranks that share this node"
            )
        # --overlap: this kernel may itself be in a step that holds all of the job's resources.
        words = ["srun", "--overlap", "--kill-on-bad-exit=1", f"--nodes={nodes}", f"--ntasks={self.size}"]
        words += [f"--ntasks-per-node={-(-self.size // nodes)}", *(shlex.split(place.srun) if place else [])]
        words += place.step_prefix(nodes) if place else []
        if not shutil.which("srun"):
            raise ClusterError(
                f"job {self.job} has no srun on PATH: set PATH as your site says, and start the kernel again"
            )
        return words

    def await_start(self) -> None:
        """Return when the job runs; until then show what it waits for."""
        if not self._is_ours or self._replaced:
            return
        line, pause_s, began = Line(), 0.5, time.monotonic()
        try:
            while True:
                if state := ask(self.job):
                    self._state = state
                    if not state.is_waiting:
                        break
                    if state.hopeless:
                        raise ClusterError(
                            f"job {self.job} would never start, and has been cancelled: {state.hopeless}"
                        )
                    line.show(f"job {self.job} {state.waiting(time.monotonic() - began)}")
                time.sleep(pause_s)
                pause_s = min(_PAUSE_S, 1.5 * pause_s)
            if not state.is_over:
                until = state.ends.partition("T")[2]
                line.show(f"job {self.job} runs on {state.nodes}" + f" until {until[:5]}" * bool(until))
        except KeyboardInterrupt:
            raise RanksInterrupted(f"job {self.job} had not started, and has been cancelled") from None

    def exits(self, pids: Mapping[int, int]) -> list[Exit]:
        if not self._ends and time.monotonic() - self._looked > _LOG_S:
            self._looked = time.monotonic()
            self._ends = self._look()
        return self._ends

    def _look(self) -> list[Exit]:
        log = self.folder / "launcher.log"
        parts = log.read_text(errors="replace").split(_NEW_RANKS) if log.exists() else []
        if len(parts) > self._replaced:
            if first := first_end(parts[-1], self.job, self._state):
                return [first]
            if _NO_RANKS in parts[-1]:
                return [Exit(None, "srun has ended", "launcher")]
        if self.processes and (code := self.processes[0].poll()) is not None:
            return [Exit.of("srun", code, "launcher")]
        if self._is_ours:
            # In a thread: Slurm may take seconds to answer, and output must go on.
            if time.monotonic() >= self._ask_at and not (self._asking and self._asking.is_alive()):
                self._ask_at = time.monotonic() + self._pause_s
                self._pause_s = min(_PAUSE_S, 1.5 * self._pause_s)
                self._asking = threading.Thread(target=self._ask, daemon=True)
                self._asking.start()
            if self._state and self._state.is_over:
                return [Exit(None, f"job {self.job} {self._state.end()}", "launcher")]
        return []

    def _ask(self) -> None:
        self._state = ask(self.job) or self._state

    def stop(self) -> None:
        """End the step, and the job if we submitted it."""
        if self._tmp:
            tempfile.tempdir = None  # tempfile then chooses a folder again
            shutil.rmtree(self._tmp, ignore_errors=True)
        for srun in self.processes:  # ends a step that has not started
            srun.terminate()
        if not guard.cancel(str(self.folder)):
            return
        until = time.monotonic() + _END_S
        while time.monotonic() < until and not self._has_ended():
            time.sleep(0.1)

    def _has_ended(self) -> bool:
        if not self._is_ours:
            return all(process.poll() is not None for process in self.processes)
        state = ask(self.job)
        return state is None or state.is_over


_TASK = re.compile(r"^srun: error: \S+: tasks? (\d+)\S*: (.*)$", re.MULTILINE)
_CANCELLED = re.compile(r"\*\*\* (?:JOB|STEP) \S+ ON \S+ CANCELLED AT \S+(?: DUE TO ([A-Z ]+))? \*\*\*")
_DUE_TO = {"TIME LIMIT": "TIMEOUT", "NODE FAILURE": "NODE_FAIL", "PREEMPTION": "PREEMPTED"}
_SIGNALS = {signal.strsignal(number): number for number in signal.valid_signals()}


def first_end(log: str, job: str, state: State | None = None) -> Exit | None:
    """What ended a step, from the output of srun and slurmd: the first to end, not those that Slurm then killed."""
    task, cancelled = _TASK.search(log), _CANCELLED.search(log)
    if cancelled and not (task and task.start() < cancelled.start()):
        how = _DUE_TO.get((cancelled[1] or "").strip(), "CANCELLED")
        limit = state.limit if state else "time"
        return Exit(None, f"job {job} {State(how, '', '', '', '', '', '', limit).end()}", "launcher")
    if task is None:
        return None
    what = task[2].removesuffix(" (core dumped)")
    code = re.search(r"exit code (\d+)", what)
    if code or what in _SIGNALS:
        return Exit.of_rank(int(task[1]), int(code[1]) if code else -_SIGNALS[what])
    return Exit(int(task[1]), f"rank {task[1]} ended: {what}", f"rank{task[1]}")
