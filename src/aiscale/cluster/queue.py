"""Asks Slurm about a job: does it wait and why, where does it run, how did it end.

state = ask("1234")          # State(name="PENDING", reason="Priority", ...); None if Slurm does not answer
state.waiting(35)            # "waits in partition gpu for 0:35: jobs with a higher priority go first"
"""

from __future__ import annotations

import datetime
import re
import subprocess
import sys
import time
from dataclasses import dataclass

from aiscale.cluster.cells import InPlace, in_kernel

WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")
RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED")
_FIELDS = ("%T", "%r", "%P", "%q", "%N", "%e", "%S", "%l")
_CLOCK = re.compile(r" for [\d:]+")
_LIMIT_S = 30  #: slurmctld of a busy site may answer slowly

#: Slurm's common reasons in plain words; for any other, Slurm's own word is shown.
_REASONS = {
    "None": "was just submitted",
    "Priority": "jobs with a higher priority go first",
    "Resources": "nodes must become free",
    "ReqNodeNotAvail": "nodes are down or reserved, perhaps for maintenance",
    "Dependency": "another job must end first",
    "JobHeldUser": "it is held: scontrol release lets it go on",
    "QOSMaxJobsPerUserLimit": "as many of your jobs run in this QOS as it allows",
    "AssocMaxJobsLimit": "as many jobs of your account run as it may have",
}

#: Reasons for which a job would wait forever.
_HOPELESS = {
    "InvalidAccount": "there is no such account",
    "AccountNotAllowed": "the account may not use this partition",
    "InvalidQOS": "there is no such QOS for this account",
    "QOSNotAllowed": "the QOS is not allowed in this partition",
    "PartitionTimeLimit": "the partition does not allow so much time",
    "QOSMaxWallDurationPerJobLimit": "the QOS does not allow so much time",
    "QOSMaxNodePerJobLimit": "the QOS does not allow so many nodes",
    "BadConstraints": "no node has what it asks for",
    "ReservationDeleted": "its reservation is gone",
    "DependencyNeverSatisfied": "the job that it waits for has failed",
}

#: How a job may end, in words that follow "job 12".
_ENDS = {
    "TIMEOUT": "was ended because its {limit} were up: cluster.start(..., time=...) asks for more",
    "CANCELLED": "was cancelled",
    "NODE_FAIL": "was ended because a node failed",
    "PREEMPTED": "had to make room for another job",
    "OUT_OF_MEMORY": "ran out of memory",
}


@dataclass(frozen=True)
class State:
    """A job as squeue shows it."""

    name: str  #: PENDING, RUNNING, COMPLETED, ...
    reason: str
    partition: str
    qos: str
    nodes: str
    ends: str  #: latest end time
    starts: str  #: Slurm's estimate of the start time
    limit: str  #: time limit

    @property
    def is_waiting(self) -> bool:
        return self.name in WAITING

    @property
    def is_over(self) -> bool:
        return self.name not in WAITING + RUNNING

    @property
    def hopeless(self) -> str:
        """Why a waiting job will never start; empty if it may."""
        return _HOPELESS.get(self.reason, "") if self.is_waiting else ""

    def waiting(self, seconds: float, position: int | None = None) -> str:
        """Why and how long the job has been waiting, in one line."""
        where = f"partition {self.partition}" + (f", QOS {self.qos}" if self.qos not in ("", "(null)") else "")
        why = _REASONS.get(self.reason, f"Slurm's reason is {self.reason}")
        words = [f"waits in {where} for {_clock(seconds)}: {why}"]
        if position and position > 1:
            words.append("one job before it" if position == 2 else f"{position - 1} jobs before it")
        words += [f"expected to start {self.starts.replace('T', ' at ')}"] if self.starts.startswith("20") else []
        return "; ".join(words)

    def end(self) -> str:
        return _ENDS.get(self.name, f"ended ({self.name.lower()})").format(limit=self.limit)


def ask(job: str) -> State | None:
    """The state of a job; None if Slurm does not answer, for example when it is busy."""
    said = _squeue("--states=all", f"--jobs={job}", f"--format={'|'.join(_FIELDS)}")
    fields = said.strip().split("|") if said else []
    return State(*fields) if len(fields) == len(_FIELDS) else None


def position(job: str, partition: str) -> int | None:
    """A job's place in its partition's queue, by priority; None if the site hides other users' jobs."""
    said = _squeue("--states=PENDING", f"--partition={partition}", "--sort=-p,i", "--format=%i")
    waiting = said.split() if said else []
    return waiting.index(job) + 1 if job in waiting else None


def _squeue(*options: str) -> str | None:
    command = ["squeue", "--noheader", *options]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


class Line:
    """One line that is updated in place, in a notebook or a terminal."""

    def __init__(self) -> None:
        self._shown, self._in_place = "", InPlace()
        self._is_notebook, self._is_terminal = in_kernel(), sys.stderr.isatty()

    def show(self, text: str) -> None:
        if text == self._shown:
            return
        before, self._shown = self._shown, text
        if self._is_notebook:
            self._in_place.show(text)
        elif self._is_terminal:
            print("\r" + text.ljust(len(before)), end="", file=sys.stderr, flush=True)
        elif _CLOCK.sub("", text) != _CLOCK.sub("", before):  # in a log, a new waiting time alone is no news
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._shown and self._is_terminal and not self._is_notebook:
            print(file=sys.stderr)


class Pace:
    """When to ask Slurm again: often at first, later every 30 s, because slurmctld serves all users."""

    def __init__(self, first_s: float = 0.5, last_s: float = 30.0) -> None:
        self._pause_s, self._last_s, self._next = first_s, last_s, 0.0

    def due(self) -> bool:
        if time.monotonic() < self._next:
            return False
        self._next, self._pause_s = time.monotonic() + self._pause_s, min(self._last_s, 1.5 * self._pause_s)
        return True


def _clock(seconds: float) -> str:
    return str(datetime.timedelta(seconds=int(seconds))).removeprefix("0:").removeprefix("0")
