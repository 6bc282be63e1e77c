"""The testbed of a round: a private Slurm of two virtual nodes, a launcher of this project, a tiny model.

    with Testbed(folder) as testbed:
        job = testbed.submit("round-7")
        testbed.strike(Event(kind="kill", step=9, rank=1), job, "round-7")

The launcher is `ddp`, rendered for Perlmutter, which has a preemptible QOS, but with two GPUs per node: a sum over two
ranks does not depend on their order, so results can be compared bit for bit. A slow link makes steps last without using
the cores, so that disturbances come in mid-run.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from aiscale.hpc.launchers import LESSONS, render
from aiscale.hpc.rehearsal.settings import user_name
from aiscale.hpc.sites import ENDED, Site, site
from centre import Cluster
from soak.plan import KINDS, STEPS, Event, SoakError, TooLate

RANKS = 2
#: For one disturbance and Slurm's reaction: seconds on an idle machine, minutes on a starved one.
LIMIT_S = 300
#: Asking Slurm takes a process and part of a core.
_ASK_EVERY_S = 0.3

#: Kills all processes in a node's network namespace but slurmd, until none is left: one may have just started another.
_KILL_ALL_BUT = 'while others="$(ip netns pids "$0" | grep -vx "$1")"; do kill -KILL $others; sleep 0.1; done'

_SETTINGS = {
    "model.n_layer": 1,
    "model.n_head": 2,
    "model.d_model": 32,
    "model.max_seq_len": 32,
    "model.activation_checkpointing": "false",
    "loop.seq_len": 32,
    "loop.global_batch": 4,
    "loop.micro_batch": 2,
    "loop.steps": STEPS,
    "loop.checkpoint_every": 5,
    "loop.eval_every": 0,
    "loop.eval_batches": 1,
    "loop.log_every": 1,
    "loop.device": "cpu",
    "loop.link_mbit_s": 10,
    "optimizer.warmup_steps": 5,
}


@dataclasses.dataclass(frozen=True)
class Job:
    state: str
    restarts: int
    node: str


class Testbed:
    """A private Slurm, and the launcher to submit there. Results go to folder/runs/NAME, output to folder/NAME.out."""

    def __init__(self, folder: Path, *, strategy: str = "ddp") -> None:
        self.folder = folder.absolute()
        self.strategy = strategy
        self.place = two_gpus_a_node()
        self.cluster = Cluster(site=self.place, nodes=2, share=[self.folder])

    def __enter__(self) -> Testbed:
        (self.folder / "runs").mkdir(parents=True, exist_ok=True)
        (self.folder / "ddp.sbatch").write_text(render(LESSONS["ddp"], self.place))
        _write_environment(self.folder / "environment")
        self.cluster.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.cluster.stop()

    def run(self, name: str) -> Path:
        return self.folder / "runs" / name

    # asking Slurm -----------------------------------------------------------------------------------------------------

    def submit(self, name: str) -> str:
        """Start or resume the run of that name; returns the job's number."""
        settings = {"name": name, "parallel.strategy": self.strategy, **_SETTINGS}
        words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        command = [
            "sbatch",
            "--parsable",
            "--qos=preempt",
            "--nodes=1",
            "--requeue",
            f"--output={self.folder / name}.out",
        ]
        command += [str(self.folder / "ddp.sbatch"), "--recipe", "laptop", "--quiet", *words]
        env = {"AISCALE_ENVIRONMENT": str(self.folder / "environment"), "AISCALE_RUNS": str(self.folder / "runs")}
        env |= {"CHAIN": "1", "RESTARTS": "1000"}
        return self._ask(*command, env=env)

    def job(self, number: str) -> Job:
        command = ["scontrol", "--oneliner", "show", "job", number]
        found: list[str] = []  # a busy slurmctld may leave it without an answer

        def answered() -> bool:
            found[:] = [self.cluster.login(command, capture_output=True, timeout=LIMIT_S).stdout]
            return "JobState=" in found[0]

        until(answered, f"{shlex.join(command)}: no answer", _ASK_EVERY_S)
        shown = found[0]
        state, restarts, node = (re.search(rf" {key}=(\S*)", shown)[1] for key in ("JobState", "Restarts", "NodeList"))
        return Job(state=state, restarts=int(restarts), node=node)

    def cancel_all(self) -> None:
        self._ask("scancel", f"--user={user_name()}")

    def _ask(self, *command: str, env: dict[str, str] | None = None) -> str:
        try:
            done = self.cluster.login(command, env=env, cwd=self.folder, capture_output=True, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            raise SoakError(f"{shlex.join(command[:4])}: no answer in {LIMIT_S} s") from None
        if done.returncode:
            raise SoakError(f"{shlex.join(command[:4])}: {done.stderr.strip() or f'status {done.returncode}'}")
        return done.stdout.strip()

    # disturbing the run -----------------------------------------------------------------------------------------------

    def strike(self, event: Event, job: str, name: str) -> str:
        """Disturb the job; returns the job that continues the run, once the disturbed one has ended or is requeued."""
        before = self.job(job)
        if before.state in ENDED:
            raise _over(event, job, before.state)
        try:
            getattr(self, f"_{event.kind}")(event, job, name, before)
        except SoakError:
            if self.job(job).state == "COMPLETED":  # before Slurm or the kernel was asked
                raise _over(event, job, "COMPLETED") from None
            raise
        if event.kind != "kill":
            self._await_requeue(event, job, before)
            return job
        until(lambda: self.job(job).state in ENDED, f"job {job} goes on without rank {event.rank}", _ASK_EVERY_S)
        if (state := self.job(job).state) != "FAILED":
            raise _over(event, job, state)
        return self.submit(name)  # a failed job is not requeued: its user submits again

    def _await_requeue(self, event: Event, job: str, before: Job) -> None:
        missing = f"job {job} has not been requeued after: {KINDS[event.kind]}"
        until(lambda: self._at_work(event, job).restarts > before.restarts, missing, _ASK_EVERY_S)

    def _at_work(self, event: Event, job: str) -> Job:
        now = self.job(job)
        if now.state in ENDED:
            raise _over(event, job, now.state)
        return now

    def _signal(self, event: Event, job: str, name: str, before: Job) -> None:
        self._ask("scancel", "--signal=USR1", job)

    def _preempt(self, event: Event, job: str, name: str, before: Job) -> None:
        options = [*self.cluster.asked, "--nodes=2", "--time=5", "--output=/dev/null"]
        self._ask("sbatch", *options, "--wrap=true")

    def _down(self, event: Event, job: str, name: str, before: Job) -> None:
        """Kill everything on the node at once; its slurmd does not answer until the job runs elsewhere."""
        daemon = (self.cluster.folder / f"slurmd.{before.node}.pid").read_text().strip()
        self._ask("kill", "-STOP", daemon)
        try:
            self._ask("bash", "-c", _KILL_ALL_BUT, before.node, daemon)
            self._ask("scontrol", "update", f"nodename={before.node}", "state=DOWN", "reason=soak")
            self._await_requeue(event, job, before)
            elsewhere = f"job {job} does not run on the other node"
            until(lambda: self._at_work(event, job).state == "RUNNING", elsewhere, _ASK_EVERY_S)
        finally:
            self._ask("kill", "-CONT", daemon)

    def _kill(self, event: Event, job: str, name: str, before: Job) -> None:
        _, pid = self.described(name)["world"]["processes"][event.rank]
        self._ask("kill", "-KILL", str(pid))

    # the run's own files ----------------------------------------------------------------------------------------------

    def described(self, name: str) -> dict:
        """run.json; empty before there is one."""
        path = self.run(name) / "run.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def forget(self, name: str) -> None:
        """Delete the run, its output, and what the launcher noted of its starts."""
        shutil.rmtree(self.run(name), ignore_errors=True)
        (self.folder / f"{name}.out").unlink(missing_ok=True)
        self._chain.unlink(missing_ok=True)

    def saved(self, job: str) -> list[int]:
        """The step that each start saved last, as the launcher noted it; 0 is none. The last start is that of `job`."""
        starts = self._chain.read_text().splitlines() if self._chain.exists() else []
        noted = [start.split()[4] for start in starts[:-1]]
        note = self.folder / "runs" / f".saved-{job}"
        noted += re.findall(r"step_(\d+)$", note.read_text() if note.exists() else "", re.MULTILINE)[-1:] or ["-"]
        return [0 if step == "-" else int(step) for step in noted]

    @property
    def _chain(self) -> Path:
        return self.folder / "runs" / ".chain-ddp"


def _over(event: Event, job: str, state: str) -> SoakError:
    if state == "COMPLETED":
        return TooLate(f"{event.kind} at step {event.step}: job {job} was done before")
    return SoakError(f"{event.kind} at step {event.step}: job {job} is {state}, which was not to be")


def losses(run: Path) -> list[tuple[int, float]]:
    """(step, training loss) of a run's metrics so far, in the order written."""
    path = run / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    rows = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [(row["step"], row["loss"]) for row in rows if row["kind"] == "train"]


def until(condition: Callable[[], bool], what: str, every_s: float = 0.1) -> None:
    """Wait for `condition`; raises SoakError with `what` after LIMIT_S."""
    end_at = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > end_at:
            raise SoakError(f"after {LIMIT_S} s still: {what}")
        time.sleep(every_s)


def two_gpus_a_node() -> Site:
    place = site("perlmutter")
    node = dataclasses.replace(place.node, gpus=RANKS, cores=RANKS, cpus_per_rank=1)
    return dataclasses.replace(place, node=node, srun=f"--cpus-per-task=1 --gpus-per-node={RANKS}")


def _write_environment(folder: Path) -> None:
    """An environment for the launcher that runs this Python. Its doctor always passes: it judges speed, which rounds
    side by side on one machine lack."""
    programs = folder / "bin"
    programs.mkdir(parents=True, exist_ok=True)
    (programs / "activate").write_text(f'export PATH="{programs}:$PATH"\n')
    python = programs / "python"
    python.write_text(
        f'#!/bin/bash\ncase "$*" in *"-m aiscale doctor"*) exit 0 ;; esac\nexec {shlex.quote(sys.executable)} "$@"\n'
    )
    python.chmod(0o755)
