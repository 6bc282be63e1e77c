"""The batch job in which a login node's notebook has its ranks: the site's `engines.sbatch`, with what was asked for.

    Job.of({"account": "abc123", "time": "30:00"}).submit(16, folder)     # the number of the job

Promises: the call is the same at every site; what is wrong is said before a job waits in the queue; a job gets no
secrets of the notebook server. What is not asked for comes from the site's profile, or from sbatch's own variables
(SBATCH_ACCOUNT, SBATCH_TIMELIMIT, SBATCH_QOS, SBATCH_RESERVATION, ...).
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

#: Variables of a notebook server, secrets among them, that have no business in a job; and those of the job we are in.
_PRIVATE = ("JPY_", "JUPYTER", "CONFIGPROXY_", "SLURM_", "PMI", guard.MARKER)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a call of `cluster.start` says about the job that it submits."""

    account: str = ""  #: that pays
    time: str | int = ""  #: as sbatch takes it: minutes, or H:MM:SS
    nodes: int = 0  #: 0: as many as the ranks need, one for each GPU
    partition: str = ""
    qos: str = ""
    reservation: str = ""  #: nodes set aside, for example for a class
    site: str = ""  #: a shipped profile or a .toml file; empty: AISCALE_SITE, or found out
    script: str = ""  #: your own copy of engines.sbatch, in place of the site's
    queue_timeout_s: float = 0  #: after which a job that still waits is cancelled; 0: it may wait

    @classmethod
    def of(cls, options: Mapping[str, object]) -> Job:
        """From keyword arguments, refusing unknown ones by naming the nearest."""
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
        """Whether it asks for a job of its own also where this process is in one already."""
        return any((self.account, self.time, self.partition, self.qos, self.reservation, self.script))

    @property
    def place(self) -> Site | None:
        """The profile of the site that this is; None if nobody has said and there is no telling."""
        try:
            return find(self.site) if self.site else here()
        except SiteError as error:
            raise ClusterError(f"cluster.start: {error}") from None

    def nodes_for(self, size: int) -> int:
        """How many nodes `size` ranks get."""
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
        """Hand the job to Slurm; returns its number. Raises ClusterError with what Slurm said."""
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
                "engines='slurm' needs sbatch, and there is none on PATH: is this a login node? engines='local' "
                "starts ranks on this machine; `aiscale rehearse` plays a site on any Linux machine"
            ) from None
        if done.returncode:
            said = "; ".join(re.sub(r"^sbatch: (error: )?", "", line) for line in done.stderr.strip().splitlines())
            raise ClusterError(f"Slurm refused the job: {said} (asked for: {' '.join(words[5:])})")
        return done.stdout.strip().partition(";")[0]

    def text(self, size: int) -> str:
        """The job's script."""
        if self.script:
            return Path(self.script).read_text()
        from aiscale.hpc.launchers import LESSONS, render  # jinja2, which only this needs

        place = self.place
        if place is None:
            raise ClusterError(
                f"engines='slurm': no telling which site this is: site={' or '.join(map(repr, names()))}, or a profile "
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
        """Where to submit from, and the variables by which the job finds the software of this kernel."""
        prefix, place = Path(sys.prefix), self.place
        is_environment = (prefix / "bin/activate").exists() or (prefix / "conda-meta").is_dir()
        if "AISCALE_ENVIRONMENT" in os.environ or not is_environment:
            return os.getcwd(), {}
        settings = prefix / "pyvenv.cfg"
        on_module = settings.exists() and "include-system-site-packages = true" in settings.read_text()
        if place and place.environment == "module" and on_module and prefix.name == ".venv":
            return str(prefix.parent), {}  # the script loads the module, and then .venv in this folder
        return os.getcwd(), {"AISCALE_ENVIRONMENT": str(prefix)}


def public(env: Mapping[str, str], keep: str = "SLURM_CONF") -> dict[str, str]:
    """`env` without what ranks elsewhere must not know."""
    return {key: value for key, value in env.items() if not key.startswith(_PRIVATE) or key.startswith(keep)}
