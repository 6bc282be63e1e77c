"""The testbed of a round: a private Slurm of two virtual nodes, a launcher, a tiny model.

    with Testbed(folder) as testbed:
        job = testbed.submit("round-7")
        testbed.strike(Event(kind="kill", step=9, rank=1), job, "round-7")

The launcher is `ddp`, rendered for Perlmutter, which has a preemptible QOS, but with two GPUs per
node: a sum over two ranks does not depend on their order, so results can be compared bit for bit. A
step has many micro-batches, so that it lasts and disturbances come in mid-run: on a busy machine
Slurm is slower, and steps are too.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from aiscale.site.launchers import LESSONS, render
from aiscale.site.launchers.render import sourced
from aiscale.site.profiles import ENDED, site
from centre import Cluster
from rehearsal.settings import user_name

STEPS = 60
#: for one disturbance and Slurm's reaction: seconds on an idle machine, minutes on a starved one
LIMIT_S = 300
KINDS = {
    "signal": "USR1, as shortly before the time is up",
    "preempt": "another job goes first",
    "down": "the node is set DOWN",
    "kill": "kill -9 of a rank",
}
#: Kills all processes in a node's network namespace but slurmd, until none is left: one may have
#: just started another.
_KILL_ALL_BUT = (
    'while others="$(ip netns pids "$0" | grep -vx "$1")"; do kill -KILL $others; sleep 0.1; done'
)
#: They win over the launcher's own. A step takes some 0.2 s on two quiet cores.
_OPTIONS = (
    *("--model", "1x32", "--length", "32", "--batch", "128", "--micro-batch", "2"),
    *("--steps", str(STEPS), "--save-every", "5", "--warm-up", "5"),
)


class SoakError(Exception):
    """Something unexpected happened; the message is one line."""


class TooLate(SoakError):
    """The run ended before it could be disturbed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    kind: str  #: one of KINDS
    step: int  #: it comes after this many steps
    rank: int  #: the rank that `kill` kills


class Testbed:
    """A private Slurm, and the launcher to submit there.
    Results go to folder/runs/NAME, output to folder/NAME.out."""

    def __init__(self, folder: Path) -> None:
        self.folder, place = folder.absolute(), site("perlmutter")
        node = dataclasses.replace(place.node, gpus=2, cores=2, cpus_per_rank=1)
        self.place = dataclasses.replace(
            place, node=node, srun="--cpus-per-task=1 --gpus-per-node=2"
        )
        self.cluster = Cluster(site=self.place, nodes=2, share=[self.folder])

    def __enter__(self) -> Testbed:
        (self.folder / "runs").mkdir(parents=True, exist_ok=True)
        files = {"ddp.sbatch": render(LESSONS["ddp"], self.place), **sourced(self.place)}
        for name, text in files.items():
            (self.folder / name).write_text(text)
        # that of a launcher; runs this one, and a doctor who finds every node ready
        python = self.folder / "environment/bin/python"
        python.parent.mkdir(parents=True, exist_ok=True)
        ready = 'case "$*" in *"-m aiscale doctor"*) echo "ready $SLURMD_NODENAME"; exit ;; esac'
        python.write_text(f'#!/bin/bash\n{ready}\nexec {shlex.quote(sys.executable)} "$@"\n')
        python.chmod(0o755)
        self.cluster.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.cluster.stop()

    def run(self, name: str) -> Path:
        return self.folder / "runs" / name

    def described(self, name: str) -> dict:
        """run.json; empty before there is one."""
        path = self.run(name) / "run.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def forget(self, name: str) -> None:
        """Cancel all jobs; delete the run and its output."""
        self._ask("scancel", f"--user={user_name()}")
        shutil.rmtree(self.run(name), ignore_errors=True)
        (self.folder / f"{name}.out").unlink(missing_ok=True)

    def submit(self, name: str) -> str:
        """Start or continue the run of that name; returns the job's number."""
        options = ["--parsable", f"--job-name={name}", "--qos=preempt", "--nodes=1", "--requeue"]
        options += [f"--output={self.folder / name}.out"]
        env = {
            "AISCALE_ENVIRONMENT": str(self.folder / "environment"),
            "AISCALE_RUNS": str(self.folder / "runs"),
        }
        env |= {"CHAIN": "1", "RESTARTS": "1000"}
        return self._ask("sbatch", *options, str(self.folder / "ddp.sbatch"), *_OPTIONS, env=env)

    def _ask(self, *command: str, env: dict[str, str] | None = None) -> str:
        done = self.cluster.login(
            command, env=env, cwd=self.folder, capture_output=True, timeout=LIMIT_S
        )
        if done.returncode:
            raise SoakError(
                f"{shlex.join(command[:4])}: {done.stderr.strip() or f'status {done.returncode}'}"
            )
        return done.stdout.strip()

    # waiting and disturbing ----------------------------------------------------------------------

    def job(self, number: str) -> tuple[str, int, str]:
        """(state, restarts, node); asks again while a busy slurmctld does not answer."""
        shown = ""
        while "JobState=" not in shown:
            command = ["scontrol", "--oneliner", "show", "job", number]
            shown = self.cluster.login(command, capture_output=True, timeout=LIMIT_S).stdout
        state, restarts, node = (
            re.search(rf" {key}=(\S*)", shown)[1] for key in ("JobState", "Restarts", "NodeList")
        )
        return state, int(restarts), node

    def wait(self, job: str, condition: Callable[[str, int], object], what: str) -> None:
        """Wait until `condition` holds, of the job's state and restarts.
        Raises SoakError if the job ends before."""
        end_at = time.monotonic() + LIMIT_S
        while time.monotonic() < end_at:
            state, restarts, _ = self.job(job)
            if condition(state, restarts):
                return
            if state in ENDED:
                raise (TooLate if state == "COMPLETED" else SoakError)(
                    f"job {job} is {state}, and {what}"
                )
            time.sleep(0.2)
        raise SoakError(f"after {LIMIT_S} s still: job {job} {what}")

    def await_start(self, job: str, name: str, before: list | None) -> list:
        """Wait for ranks other than `before`; returns their processes."""

        def ranks() -> list | None:
            return self.described(name).get("processes")

        self.wait(job, lambda *_: ranks() not in (None, before), "has not started to train")
        return ranks()

    def await_step(self, job: str, name: str, step: int) -> int:
        """Wait until `step` steps are taken; returns how many were."""

        def last() -> int:
            return max((number + 1 for number, _ in losses(self.run(name))), default=0)

        self.wait(job, lambda *_: last() >= step, f"has not come to step {step}")
        return last()

    def strike(self, event: Event, job: str, name: str) -> str:
        """Disturb the job; returns the job that continues the run.
        By then the disturbed one has ended or is requeued."""
        _, before, node = self.job(job)
        if event.kind == "kill":
            _, pid = self.described(name)["processes"][event.rank]
            self._ask("kill", "-KILL", str(pid))
            self.wait(job, lambda state, _: state == "FAILED", f"goes on without rank {event.rank}")
            return self.submit(name)  # a failed job is not requeued: its user submits again
        if event.kind == "down":
            self._down(job, node, before)
        elif event.kind == "signal":
            self._ask("scancel", "--signal=USR1", job)
        else:
            self._ask(
                "sbatch",
                *self.cluster.asked,
                "--nodes=2",
                "--time=5",
                "--output=/dev/null",
                "--wrap=true",
            )
        self.wait(job, lambda _, restarts: restarts > before, "has not been requeued")
        return job

    def _down(self, job: str, node: str, before: int) -> None:
        """Kill all on the node at once; its slurmd is silent until the job runs elsewhere."""
        daemon = (self.cluster.folder / f"slurmd.{node}.pid").read_text().strip()
        self._ask("kill", "-STOP", daemon)
        try:
            self._ask("bash", "-c", _KILL_ALL_BUT, node, daemon)
            self._ask("scontrol", "update", f"nodename={node}", "state=DOWN", "reason=soak")
            elsewhere = "does not run on the other node"
            self.wait(
                job, lambda state, restarts: restarts > before and state == "RUNNING", elsewhere
            )
        finally:
            self._ask("kill", "-CONT", daemon)


def losses(run: Path) -> list[tuple[int, float]]:
    """(step, training loss) of a run's metrics so far, in the order written."""
    path = run / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    rows = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [(row["step"], row["loss"]) for row in rows if row["kind"] == "train"]
