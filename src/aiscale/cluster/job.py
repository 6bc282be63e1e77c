"""The batch job for a notebook's ranks on a login node: the site's `engines.sbatch`, with the caller's options.

    Job.of({"account": "abc123", "time": "30:00"}).submit(16, folder)     # -> job id

The call is the same at every site; bad options are reported before the job is queued; the job does not get the notebook
server's secrets. Defaults come from the site's profile and from sbatch's own variables (SBATCH_ACCOUNT,
SBATCH_TIMELIMIT, SBATCH_QOS, SBATCH_RESERVATION, ...).
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from aiscale.cluster import guard
from aiscale.cluster.errors import ClusterError
from aiscale.hpc.sites import Site, SiteError, find, here, names

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
    reservation: str = ""  #: for example of a class
    site: str = ""  #: a shipped profile or a .toml file; empty: AISCALE_SITE, or detected
    script: str = ""  #: your own copy of engines.sbatch, instead of the site's
    queue_timeout_s: float = 0  #: cancel a job that is still queued after this; 0: never

    @classmethod
    def of(cls, options: Mapping[str, object]) -> Job:
        """From keyword arguments; refuses unknown ones and names the nearest."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, [*known, "engines", "threads", "device", "env"], n=1)
                meant = f"did you mean {near[0]}?" if near else f"a job has {', '.join(known)}"
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
        return any((self.account, self.time, self.partition, self.qos, self.reservation, self.script))

    @property
    def place(self) -> Site | None:
        """The profile of this site; None if it is neither given nor detected."""
        try:
            return find(self.site) if self.site else here()
        except SiteError as error:
            raise ClusterError(f"cluster.start: {error}") from None

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
        asked["reservation"] = self.reservation
        words += [f"--{name}={value}" for name, value in asked.items() if value != ""]
        place, extra = self._environment()
        extra |= {"AISCALE_FOLDER": str(folder), "AISCALE_RANKS": str(size)}
        try:
            done = subprocess.run(
                [*words, str(script)], capture_output=True, text=True, cwd=place, env={**public(env), **extra}
            )
        except OSError:
            raise ClusterError(
                "engines='slurm' needs sbatch, and there is none on PATH: run this on a login node; engines='local' "
                "starts ranks on this machine; `aiscale rehearse` plays a site on any Linux machine"
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
        try:
            place = dataclasses.replace(place, **asked)
            lesson = dataclasses.replace(LESSONS["engines"], ranks=self.nodes_for(size) * place.node.ranks_per_node)
            text = render(lesson, place)
        except SiteError as error:
            raise ClusterError(f"cluster.start: {error}") from None
        return text if account else re.sub(r"(?m)^#SBATCH --account=.*\n", "", text)

    def _environment(self) -> tuple[str, dict[str, str]]:
        """The folder to submit from, and the variables by which the job finds this kernel's software."""
        prefix = Path(sys.prefix)
        is_environment = (prefix / "bin/activate").exists() or (prefix / "conda-meta").is_dir()
        if "AISCALE_ENVIRONMENT" in os.environ or not is_environment:
            return os.getcwd(), {}
        return os.getcwd(), {"AISCALE_ENVIRONMENT": str(prefix)}


def public(env: Mapping[str, str], keep: str = "SLURM_CONF") -> dict[str, str]:
    """`env` without what ranks on other machines must not know."""
    return {key: value for key, value in env.items() if not key.startswith(_PRIVATE) or key.startswith(keep)}
