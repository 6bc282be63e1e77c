"""A rehearsed centre, and what tests ask of it: steps, jobs, how they ended, programs they called.

with Cluster(site="frontier", nodes=2) as nodes:
    nodes.run(["hostname"], ntasks=16, capture_output=True)
    assert nodes.wait(nodes.submit("job.sbatch", "--nodes=2")) == "COMPLETED"
    nodes.calls("module")
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import rehearsal
from aiscale.site.profiles import ENDED


@dataclass(frozen=True)
class Call:
    """A call of a program that the site has and this machine lacks."""

    node: str
    program: str
    args: tuple[str, ...]


class Cluster(rehearsal.Cluster):
    @property
    def asked(self) -> list[str]:
        """The options that the site requires, with values that it accepts."""
        site, accounts = self.settings.site, self.settings.accounts
        longest = site.scheduler.hours_for(self.nodes, site.partition, site.qos) or 1
        hours = min(longest, 24)  # a site may have no limit
        values = {
            "account": (*accounts, site.scheduler.account_example)[0],
            "constraint": "&".join(
                sorted({word for kind in site.node.kinds for word in kind.constraint.split("&")})
            ),
            "time": str(round(hours * 60)),  # the maximum: a benchmark must not be cut off
        }
        words = [f"--{name}={values[name]}" for name in site.scheduler.required if values.get(name)]
        words += [f"--partition={site.partition}"] if site.partition else []
        return words + ([f"--qos={site.qos}"] if site.qos else [])

    def run(
        self, command: Sequence[str | Path], *, ntasks: int = 0, srun=(), **options
    ) -> subprocess.CompletedProcess:
        """Run a command as `ntasks` tasks (0: one per node) with srun.
        It has the options that the site requires and those in `srun`; keywords as for `login`."""
        ntasks = ntasks or self.nodes
        nodes = min(self.nodes, ntasks)
        size = [
            f"--nodes={nodes}",
            f"--ntasks={ntasks}",
            f"--ntasks-per-node={-(-ntasks // nodes)}",
        ]
        return self.login(
            ["srun", "--quiet", "--kill-on-bad-exit=1", *self.asked, *size, *srun, *command],
            **options,
        )

    def submit(
        self, script: str | Path, *options: str, args: Sequence[str | Path] = (), **keywords
    ) -> str:
        """sbatch with `options`, and `args` for the script; returns the job's number.
        A launcher finds site.sh as by `aiscale submit`.
        Raises RehearsalError with sbatch's message. Keywords as for `login`."""
        beside = Path(script).absolute().with_name("site.sh")
        keywords["env"] = {"AISCALE_SITE_SH": str(beside), **(keywords.get("env") or {})}
        done = self.login(
            ["sbatch", "--parsable", *options, script, *args], capture_output=True, **keywords
        )
        if done.returncode:
            raise rehearsal.RehearsalError(done.stderr.strip())
        return done.stdout.strip()

    def accepts(self, launchers: Path) -> None:
        """Check that Slurm accepts a folder's files, on as many nodes as are here."""
        for path in (files := sorted(launchers.glob("*.sbatch"))):
            size = [] if re.search(r"--nodes=1\b", path.read_text()) else [f"--nodes={self.nodes}"]
            done = self.login(["sbatch", "--test-only", *size, path], capture_output=True)
            assert done.returncode == 0 and "to start at" in done.stderr, (
                f"{path.name}: {done.stderr}"
            )
        assert files

    def wait(self, job: str, *, timeout_s: float = 300) -> str:
        """Wait for a job to end; returns its state, such as COMPLETED."""
        end_at = time.monotonic() + timeout_s
        while time.monotonic() < end_at:
            shown = self.login(["scontrol", "--oneliner", "show", "job", job], capture_output=True)
            # without any answer slurmctld was busy
            assert "Invalid job id" not in shown.stderr, shown.stderr
            state = re.search(r"JobState=(\S+)", shown.stdout)
            if state and state[1] in ENDED:
                return state[1]
            time.sleep(0.1)
        raise AssertionError(
            f"job {job} had not ended after {timeout_s:g} s: {' '.join(shown.stdout.split()[:12])}"
        )

    def calls(self, program: str = "") -> list[Call]:
        """Recorded calls of the site's programs, or of `program`, in order."""
        log = self.folder / "calls"
        rows = [line.split("\t") for line in log.read_text().splitlines()] if log.exists() else []
        found = [Call(node, name, tuple(args)) for node, name, *args in rows]
        return [call for call in found if program in ("", call.program)]
