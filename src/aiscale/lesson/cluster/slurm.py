"""Ranks in a Slurm job: by srun if this kernel is in a job, else in a job submitted for them.

The job is the site's `engines.sbatch` with the caller's options. Nothing listens on a login node:
rank 0's task runs the controller and the rendezvous store, and the kernel connects with a key from
a folder that only its owner can read. The job ends with the ranks, with the kernel, or when waiting
for it is interrupted.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from aiscale.errors import hint
from aiscale.lesson.cluster import guard
from aiscale.lesson.cluster.cells import InPlace
from aiscale.lesson.cluster.errors import ClusterError, RanksInterrupted
from aiscale.lesson.cluster.local import Exit, LocalLauncher, spawn
from aiscale.site.profiles import ENDED, Site, SiteError, find, here, names

_PAUSE_S = 30.0  #: between two questions to Slurm, at first less: slurmctld serves all users
_LOG_S = 0.3  #: between looks at a log, which may be on a shared file system
_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")
#: Variables that the job must not get: the notebook server's, with its secrets, and those of the
#: job that we are in.
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

    @classmethod
    def of(cls, options: Mapping[str, object]) -> Job:
        """From keyword arguments; refuses unknown ones and names the nearest."""
        fields = [field.name for field in dataclasses.fields(cls)]
        for name in options.keys() - set(fields):
            every = [*fields, "engines", "threads", "device"]
            raise ClusterError(
                f"cluster.start: there is no option {name}: {hint(name, every, ', '.join(fields))}"
            )
        return cls(**options)

    @property
    def is_own(self) -> bool:
        """Whether to submit a new job even if this process is in one already."""
        return any(
            (self.account, self.time, self.partition, self.qos, self.constraint, self.reservation)
        )

    @property
    def place(self) -> Site | None:
        """The profile of this site, of its nodes without GPUs if asked for; None if unknown."""
        try:
            place = find(self.site) if self.site else here()
        except SiteError as error:
            raise ClusterError(f"cluster.start: {error}") from None
        words = {self._asked(name) for name in ("constraint", "partition")}
        cpus = set()
        if place:
            kinds = place.cpus.node.kinds
            cpus = {place.cpus.partition, *(kind.constraint for kind in kinds)} - {""}
        return place.on_cpus() if words & cpus else place

    def _asked(self, name: str) -> str:
        return getattr(self, name) or os.environ.get(f"SBATCH_{name.upper()}", "")

    def nodes_for(self, size: int) -> int:
        place = self.place
        each = place.node.ranks_per_node if place else size
        needed = -(-size // each)
        if self.nodes and self.nodes < needed:
            raise ClusterError(
                f"cluster.start: {size} ranks on {self.nodes} nodes of {place.title}, which has "
                f"{each} to a node: ask for nodes={needed}, or fewer ranks"
            )
        return self.nodes or needed

    def submit(self, size: int, folder: Path, env: Mapping[str, str]) -> str:
        """Submit the job; returns its id. Raises ClusterError with Slurm's message."""
        nodes = self.nodes_for(size)
        script = folder / "engines.sbatch"
        for name, text in self.files(size).items():
            (folder / name).write_text(text)
        words = [
            "sbatch",
            "--parsable",
            "--export=ALL",
            "--no-requeue",
            f"--output={folder}/launcher.log",
        ]
        options = {
            "account": self.account,
            "time": self.time,
            "partition": self.partition,
            "qos": self.qos,
        }
        options |= {"reservation": self.reservation, "constraint": self.constraint, "nodes": nodes}
        words += [f"--{name}={value}" for name, value in options.items() if value != ""]
        env = {**public(env), "AISCALE_FOLDER": str(folder), "AISCALE_RANKS": str(size)}
        # A centre's own site.sh is for its GPU nodes.
        if "AISCALE_SITE_SH" not in env or "gpus-per-node" not in script.read_text():
            env["AISCALE_SITE_SH"] = str(folder / "site.sh")
        prefix = Path(sys.prefix)  # where the job finds this kernel's software
        if (prefix / "bin/activate").exists() or (prefix / "conda-meta").is_dir():
            env.setdefault("AISCALE_ENVIRONMENT", str(prefix))
        if not shutil.which("sbatch"):
            raise ClusterError(
                "engines='slurm' needs sbatch, and there is none on PATH: run this on a login node"
            )
        done = subprocess.run([*words, str(script)], capture_output=True, text=True, env=env)
        if done.returncode:
            why = done.stderr.replace("sbatch: error: ", "").strip().replace("\n", "; ")
            raise ClusterError(f"Slurm refused the job: {why} (asked for: {' '.join(words[5:])})")
        return done.stdout.strip().partition(";")[0]

    def files(self, size: int) -> dict[str, str]:
        """{name: text} of the batch file and of what it sources."""
        # jinja2, which only this needs
        from aiscale.site.launchers import LESSONS, render
        from aiscale.site.launchers.render import sourced

        place = self.place
        if place is None:
            choices = " or ".join(map(repr, names()))
            raise ClusterError(
                f"engines='slurm': this site is unknown: set site={choices}, or a profile of your "
                "own"
            )
        account = self._asked("account")
        if not account and "account" in place.scheduler.required:
            what = f"engines='slurm' at {place.title} needs account=..., or SBATCH_ACCOUNT"
            raise ClusterError(f"{what}: {place.scheduler.account_hint}")
        # sbatch reads the environment's too; the profile says whether jobs share nodes there.
        there = {"partition": place.scheduler.partitions, "qos": place.scheduler.qos}
        queue = {
            name: self._asked(name)
            for name in there
            if getattr(self, name) or self._asked(name) in there[name]
        }
        try:
            nodes = self.nodes_for(size)
            place = dataclasses.replace(place, **queue)
            place = place.part(size) if nodes == 1 else place
            ranks = nodes * place.node.ranks_per_node
            lesson = dataclasses.replace(LESSONS["engines"], ranks=ranks)
            text = render(lesson, place)
        except SiteError as error:
            raise ClusterError(f"cluster.start: {error}") from None
        if not account:
            text = re.sub(r"(?m)^#SBATCH --account=.*\n", "", text)
        return {"engines.sbatch": text, **sourced(place)}


def public(env: Mapping[str, str], keep: str = "SLURM_CONF") -> dict[str, str]:
    """`env` without what ranks on other machines must not know."""
    return {
        key: value
        for key, value in env.items()
        if not key.startswith(_PRIVATE) or key.startswith(keep)
    }


def ask(job: str) -> tuple[str, str, str]:
    """(state, why it waits, nodes) of a job in Slurm's words.

    Empty if Slurm does not answer, as when it is busy.
    """
    command = ["squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T|%r|%N"]
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PAUSE_S, stdin=subprocess.DEVNULL
        )
        if done.returncode == 0 and done.stdout.count("|") == 2:
            return tuple(done.stdout.strip().split("|"))
    return "", "", ""


class SlurmLauncher(LocalLauncher):
    remote = True

    def __init__(self, size: int, folder: Path, job: Job) -> None:
        super().__init__(size, folder, job)
        self.options = job
        self.job = ""  #: the job's id, once there is one
        self.submits = job.is_own or "SLURM_JOB_ID" not in os.environ
        self._asked = self._looked = 0.0
        self._tmp = ""
        self._ends: list[Exit] = []

    @staticmethod
    def folder_for(cluster_id: str) -> Path:
        runs = Path(os.environ.get("AISCALE_RUNS") or "runs").absolute()
        try:
            runs.mkdir(parents=True, exist_ok=True)
            return Path(tempfile.mkdtemp(prefix=f"engines-{cluster_id}-", dir=runs))
        except OSError as error:
            why = f"{runs} cannot be written ({error.strerror})"
            raise ClusterError(
                f"{why}: set AISCALE_RUNS to a folder that you may write to and all nodes see"
            ) from None

    def start(self, env: Mapping[str, str]) -> None:
        # Each node has its own /tmp: where ranks see this kernel's temporary files.
        self._tmp = tempfile.tempdir = tempfile.mkdtemp(prefix="tmp-", dir=self.folder)
        if self.submits:
            self.job = self.options.submit(self.size, self.folder, env)
            (self.folder / "job").write_text(self.job)
            self._await_start()
            return
        self.job = os.environ["SLURM_JOB_ID"]
        command = [
            *self._srun(),
            sys.executable,
            "-u",
            "-m",
            "aiscale.lesson.cluster",
            str(self.folder),
        ]
        self.process = spawn([*command, str(self.size), "slurm"], self.folder / "launcher.log", env)

    def _srun(self) -> list[str]:
        place, have = self.options.place, int(os.environ.get("SLURM_NNODES", 1))
        nodes = self.options.nodes_for(self.size)
        if nodes > have:
            needed = f"{self.size} ranks need {nodes} nodes{f' of {place.title}' if place else ''}"
            raise ClusterError(
                f"cluster.start: {needed}, and job {self.job} has {have}: start fewer"
            )
        # --overlap: this kernel may itself be in a step that holds all of the job's resources.
        words = [
            "srun",
            "--overlap",
            "--kill-on-bad-exit=1",
            f"--nodes={nodes}",
            f"--ntasks={self.size}",
        ]
        words += [f"--ntasks-per-node={-(-self.size // nodes)}"]
        words += shlex.split(place.srun) if place else []
        words += place.step_prefix(nodes) if place else []
        return words

    def _await_start(self) -> None:
        """Return when the job runs; until then show what Slurm says about it."""
        line, pause_s = InPlace(), 0.5
        try:
            while True:
                state, why, nodes = ask(self.job)
                if state:
                    more = f"({why})" if state in _WAITING else f"on {nodes}"
                    line.show(f"job {self.job} is {state} " + more)
                    if state not in _WAITING:
                        return
                time.sleep(pause_s)
                pause_s = min(_PAUSE_S, 1.5 * pause_s)
        except KeyboardInterrupt:
            raise RanksInterrupted(
                f"job {self.job} had not started, and has been cancelled"
            ) from None

    def exits(self) -> list[Exit]:
        if not self._ends and time.monotonic() - self._looked > _LOG_S:
            self._looked = time.monotonic()
            self._ends = self._look()
        return self._ends

    def _look(self) -> list[Exit]:
        log = self.folder / "launcher.log"
        if log.exists() and (end := first_end(log.read_text(errors="replace"), self.job)):
            return [end]
        if self.process and (code := self.process.poll()) is not None:
            return [Exit.of("srun", code, "launcher")]
        if self.submits and time.monotonic() - self._asked > _PAUSE_S:
            self._asked = time.monotonic()
            if (state := ask(self.job)[0]) in ENDED:
                return [Exit(f"job {self.job} ended ({state})", "launcher")]
        return []

    def stop(self) -> None:
        """End the step, and the job if we submitted it."""
        if self._tmp:
            tempfile.tempdir = None  # tempfile then chooses a folder again
            shutil.rmtree(self._tmp, ignore_errors=True)
        if self.process:  # ends a step that has not started
            self.process.terminate()
        guard.cancel(str(self.folder))


_END = re.compile(
    r"^srun: error: \S+: tasks? (\d+)\S*: (.*)$|\*\*\* ((?:JOB|STEP) .*) \*\*\*", re.MULTILINE
)


def first_end(log: str, job: str) -> Exit | None:
    """What ended a step, from the output of srun and slurmd.

    The first to end, not those that Slurm then killed.
    """
    if (end := _END.search(log)) is None:
        return None
    if end[1]:
        return Exit(f"rank {end[1]} ended: {end[2]}", f"rank{end[1]}")
    return Exit(f"job {job} ended: {end[3]}", "launcher")
