"""The batch job for a notebook's ranks on a login node: the site's `engines.sbatch`, with the caller's options.

    Job.of({"account": "abc123", "time": "30:00"}).submit(16, folder)     # -> job id

The call is the same at every site; bad options are reported before the job is queued; the job does not get the notebook
server's secrets. Defaults come from the site's profile and from sbatch's own variables (SBATCH_ACCOUNT,
SBATCH_TIMELIMIT, SBATCH_QOS, SBATCH_RESERVATION, ...).
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from aiscale.cluster import guard
from aiscale.cluster.cells import InPlace, in_kernel
from aiscale.cluster.errors import ClusterError
from aiscale.config import hint
from aiscale.hpc.sites import ENDED, Site, SiteError, find, here, names

#: Variables that the job must not get: the notebook server's, with its secrets, and those of the job that we are in.
_PRIVATE = ("JPY_", "JUPYTER", "CONFIGPROXY_", "SLURM_", "PMI", guard.MARKER)


@dataclass(frozen=True, kw_only=True)
class Job:
    """Options of the job that `cluster.start` submits."""

    account: str = ""  #: charged for the job
    time: str | int = ""  #: as for sbatch: minutes, or H:MM:SS
    nodes: int = 0  #: 0: as many as the ranks need, one rank per GPU
    partition: str = ""
    qos: str = ""
    constraint: str = ""  #: kind of nodes: cpu at Perlmutter, for ranks that need no GPU
    reservation: str = ""  #: for example of a class
    site: str = ""  #: a shipped profile or a .toml file; empty: AISCALE_SITE, or detected
    script: str = ""  #: your own copy of engines.sbatch, instead of the site's

    @classmethod
    def of(cls, options: Mapping[str, object]) -> Job:
        """From keyword arguments; refuses unknown ones and names the nearest."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                every = [*known, "engines", "threads", "device"]
                meant = hint(name, every, f"a job has {', '.join(known)}")
                raise ClusterError(f"cluster.start: there is no option {name}: {meant}")
        return cls(**options)

    def __post_init__(self) -> None:
        if not isinstance(self.nodes, int) or self.nodes < 0:
            raise ClusterError(f"cluster.start: nodes is {self.nodes!r}: it must be a whole number, or 0 for enough")
        if self.time != "" and not re.fullmatch(r"\d+(-\d+)?(:\d+){0,3}", str(self.time)):
            raise ClusterError(f"cluster.start: time is {self.time!r}: it must be minutes, MM:SS, H:MM:SS or D-H:MM:SS")
        if self.script and not Path(self.script).is_file():
            raise ClusterError(f"cluster.start: there is no script {self.script}: make one by `aiscale launchers`")

    @property
    def is_own(self) -> bool:
        """Whether to submit a new job even if this process is in one already."""
        return any((self.account, self.time, self.partition, self.qos, self.constraint, self.reservation, self.script))

    @property
    def place(self) -> Site | None:
        """The profile of this site, of its nodes without GPUs if those are asked for; None if it is neither given nor
        detected."""
        try:
            place = find(self.site) if self.site else here()
        except SiteError as error:
            raise ClusterError(f"cluster.start: {error}") from None
        asked = {
            getattr(self, name) or os.environ.get(f"SBATCH_{name.upper()}") for name in ("constraint", "partition")
        }
        cpus = {place.cpus.partition, *(kind.constraint for kind in place.cpus.node.kinds)} - {""} if place else set()
        return place.on_cpus() if asked & cpus else place

    def nodes_for(self, size: int) -> int:
        place = self.place
        each = place.node.ranks_per_node if place else size
        needed = -(-size // each)
        if self.nodes and self.nodes < needed:
            raise ClusterError(
                f"cluster.start: {size} ranks on {self.nodes} nodes of {place.title}, which has {each} to a node: "
                f"ask for nodes={needed}, or fewer ranks"
            )
        return self.nodes or needed

    def submit(self, size: int, folder: Path, env: Mapping[str, str]) -> str:
        """Submit the job; returns its id. Raises ClusterError with Slurm's message."""
        nodes = self.nodes_for(size)
        script = folder / "engines.sbatch"
        script.write_text(self.text(size))
        words = ["sbatch", "--parsable", "--export=ALL", "--no-requeue", f"--output={folder}/launcher.log"]
        words += [f"--nodes={nodes}"]
        asked = {"account": self.account, "time": self.time, "partition": self.partition, "qos": self.qos}
        asked |= {"reservation": self.reservation, "constraint": self.constraint}
        words += [f"--{name}={value}" for name, value in asked.items() if value != ""]
        env = {**public(env), "AISCALE_FOLDER": str(folder), "AISCALE_RANKS": str(size)}
        prefix = Path(sys.prefix)  # where the job finds this kernel's software
        if (prefix / "bin/activate").exists() or (prefix / "conda-meta").is_dir():
            env.setdefault("AISCALE_ENVIRONMENT", str(prefix))
        try:
            done = subprocess.run([*words, str(script)], capture_output=True, text=True, env=env)
        except OSError:
            raise ClusterError(
                "engines='slurm' needs sbatch, and there is none on PATH: run this on a login node; engines='local' "
                "starts ranks on this machine; launchers/rehearsal plays a site on any Linux machine"
            ) from None
        if done.returncode:
            said = "; ".join(re.sub(r"^sbatch: (error: )?", "", line) for line in done.stderr.strip().splitlines())
            raise ClusterError(f"Slurm refused the job: {said} (asked for: {' '.join(words[5:])})")
        return done.stdout.strip().partition(";")[0]

    def text(self, size: int) -> str:
        if self.script:
            return Path(self.script).read_text()
        from aiscale.hpc.launchers import LESSONS, render  # jinja2, which only this needs

        place = self.place
        if place is None:
            raise ClusterError(
                f"engines='slurm': this site is unknown: set site={' or '.join(map(repr, names()))}, or a profile "
                "of your own (.toml), here or in AISCALE_SITE"
            )
        account = self.account or os.environ.get("SBATCH_ACCOUNT")
        if not account and "account" in place.scheduler.required:
            raise ClusterError(
                f"engines='slurm' at {place.title} needs account=..., or SBATCH_ACCOUNT: {place.scheduler.account_hint}"
            )
        asked = {name: value for name in ("partition", "qos") if (value := getattr(self, name))}
        known = {"partition": place.scheduler.partitions, "qos": place.scheduler.qos}
        for name, names_there in known.items():  # sbatch reads them too; the profile says whether they share nodes
            if name not in asked and (value := os.environ.get(f"SBATCH_{name.upper()}")) in names_there:
                asked[name] = value
        try:
            nodes = self.nodes_for(size)
            place = dataclasses.replace(place, **asked)
            place = place.part(size) if nodes == 1 else place
            lesson = dataclasses.replace(LESSONS["engines"], ranks=nodes * place.node.ranks_per_node)
            text = render(lesson, place)
        except SiteError as error:
            raise ClusterError(f"cluster.start: {error}") from None
        return text if account else re.sub(r"(?m)^#SBATCH --account=.*\n", "", text)


def public(env: Mapping[str, str], keep: str = "SLURM_CONF") -> dict[str, str]:
    """`env` without what ranks on other machines must not know."""
    return {key: value for key, value in env.items() if not key.startswith(_PRIVATE) or key.startswith(keep)}


# Asking Slurm about a job ---------------------------------------------------------------------------------------------


WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")
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
        return self.name in ENDED

    @property
    def hopeless(self) -> str:
        """Why a waiting job will never start; empty if it may."""
        return _HOPELESS.get(self.reason, "") if self.is_waiting else ""

    def waiting(self, seconds: float) -> str:
        """Why and how long the job has been waiting, in one line."""
        where = f"partition {self.partition}" + (f", QOS {self.qos}" if self.qos not in ("", "(null)") else "")
        why = _REASONS.get(self.reason, f"Slurm's reason is {self.reason}")
        clock = str(datetime.timedelta(seconds=int(seconds))).removeprefix("0:").removeprefix("0")
        expected = f"; expected to start {self.starts.replace('T', ' at ')}" if self.starts.startswith("20") else ""
        return f"waits in {where} for {clock}: {why}{expected}"

    def end(self) -> str:
        return _ENDS.get(self.name, f"ended ({self.name.lower()})").format(limit=self.limit)


def ask(job: str) -> State | None:
    """The state of a job; None if Slurm does not answer, for example when it is busy."""
    command = ["squeue", "--noheader", "--states=all", f"--jobs={job}", f"--format={'|'.join(_FIELDS)}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    fields = done.stdout.strip().split("|")
    return State(*fields) if done.returncode == 0 and len(fields) == len(_FIELDS) else None


class Line:
    """One line: updated in place in a notebook, elsewhere printed when it has news."""

    def __init__(self) -> None:
        self._shown, self._in_place, self._is_notebook = "", InPlace(), in_kernel()

    def show(self, text: str) -> None:
        if self._is_notebook:
            self._in_place.show(text)
        elif _CLOCK.sub("", text) != _CLOCK.sub("", self._shown):  # a new waiting time alone is no news
            print(text, file=sys.stderr, flush=True)
        self._shown = text
