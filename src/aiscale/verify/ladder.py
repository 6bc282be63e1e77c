"""Every strategy against serial: same data, same global batch, same seed, so the same losses and weights.

    aiscale verify                # the whole ladder, a table, exit status 0 only if every rung holds
    aiscale verify ddp-x2 --json

Each rung is a job as a user would start it (`mpiexec -n 2 python -m aiscale train ...`), and what it left on disk is
compared: losses from metrics.jsonl, weights from the checkpoint.

Tolerances. In fp64 a different order of summation changes the last of 16 digits, which AdamW's division by a small
root can lift by some orders of magnitude in 20 steps: 1e-10 leaves room for that and for nothing else (a gradient
summed instead of averaged, a batch read twice, a wrong weight-decay group all show at 1e-6 or above). In fp32 the
serial run against itself, its batch summed in two halves, drifts by about 3e-5 in the weights after 20 steps: that is
the floor, and 2e-4 the tolerance.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from aiscale import checkpoint
from aiscale.config import ConfigError
from aiscale.model import GPT
from aiscale.train import load_run, read_metrics

STEPS = 20
TOLERANCE = {"fp64": 1e-10, "fp32": 2e-4}
_TIMEOUT_S = 180


class LadderError(RuntimeError):
    """A rung that left nothing to compare; the message is one line."""


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One way of training the ladder's model."""

    name: str
    launcher: str = ""  #: command in front of `python -m aiscale train`, {python} and {mpiexec} filled in
    arguments: str = ""  #: added to aiscale train
    settings: tuple[str, ...] = ()  #: --set
    precision: str = "fp64"

    def command(self, runs_dir: Path) -> list[str]:
        """The job's command line."""
        python = sys.executable
        start = self.launcher.format(python=python, mpiexec=find_mpiexec()) if self.launcher else python
        settings = (*_BASE, f"loop.precision={self.precision}", f"name={self.name}", *self.settings)
        pairs = [word for setting in settings for word in ("--set", setting)]
        arguments = [
            "train",
            "--recipe",
            "laptop",
            "--runs-dir",
            str(runs_dir),
            "--quiet",
            *shlex.split(self.arguments),
        ]
        return [*shlex.split(start), "-m", "aiscale", *arguments, *pairs]


@dataclass(frozen=True)
class Verdict:
    """How far a rung is from serial."""

    rung: Rung
    loss_difference: float  #: largest over the steps, nats
    weight_difference: float  #: largest over all weights
    seconds: float
    error: str = ""

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.rung.precision]

    @property
    def holds(self) -> bool:
        return not self.error and max(self.loss_difference, self.weight_difference) <= self.tolerance

    def to_dict(self) -> dict:
        return {
            "rung": self.rung.name,
            "precision": self.rung.precision,
            "loss_difference": self.loss_difference,
            "weight_difference": self.weight_difference,
            "tolerance": self.tolerance,
            "seconds": round(self.seconds, 1),
            "holds": self.holds,
            "error": self.error,
        }


#: A model small enough for seconds, a batch that 1, 2, 3 and 4 ranks divide, and clipping at work.
_BASE = (
    "model.n_layer=2",
    "model.n_head=2",
    "model.d_model=32",
    "model.max_seq_len=32",
    "loop.seq_len=32",
    "loop.global_batch=12",
    f"loop.steps={STEPS}",
    "loop.eval_every=0",
    "loop.eval_batches=1",
    "loop.device=cpu",
    "optimizer.clip_norm=0.5",
)
_DDP, _MPI = "parallel.strategy=ddp", "parallel.strategy=mpi"
_TORCHRUN = "{python} -m torch.distributed.run --standalone --nproc-per-node"

RUNGS: tuple[Rung, ...] = (
    Rung(name="serial"),
    Rung(name="serial-accumulated", settings=("loop.micro_batch=3",)),
    Rung(name="mpi-x2", launcher="{mpiexec} -n 2 {python}", settings=(_MPI,)),
    Rung(name="ddp-x2", arguments="--nproc 2", settings=(_DDP,)),
    Rung(name="ddp-x2-accumulated", arguments="--nproc 2", settings=(_DDP, "loop.micro_batch=3")),
    Rung(name="ddp-x3-torchrun", launcher=f"{_TORCHRUN} 3", settings=(_DDP,)),
    Rung(name="ddp-x3-mpiexec", launcher="{mpiexec} -n 3 {python}", settings=(_DDP,)),
    Rung(name="ddp-x4", arguments="--nproc 4", settings=(_DDP, "parallel.bucket_mb=0.05")),
    Rung(name="serial-fp32", precision="fp32"),
    Rung(name="ddp-x2-fp32", arguments="--nproc 2", settings=(_DDP,), precision="fp32"),
)
_REFERENCE = {"fp64": "serial", "fp32": "serial-fp32"}


def climb(names: Iterable[str] = (), *, report: Callable[[Verdict], None] = lambda verdict: None) -> list[Verdict]:
    """Run the named rungs (all, if none is named) and compare each with serial. `report` is called after each."""
    known = {rung.name: rung for rung in RUNGS}
    for name in names:
        if name not in known:
            raise ConfigError(f"unknown rung {name}: it may be one of {', '.join(known)}")
    chosen = [known[name] for name in names] or list(RUNGS)
    references: dict[str, tuple[list[float], dict]] = {}
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="aiscale-verify-") as folder:
        for rung in chosen:
            base = _REFERENCE[rung.precision]
            if base not in references:
                error, seconds = _train(known[base], Path(folder))
                if error:
                    raise LadderError(f"the reference {base} itself failed: {error}")
                references[base] = _read(Path(folder) / base)
                if rung.name == base:
                    verdicts.append(Verdict(rung, 0.0, 0.0, seconds))
                    report(verdicts[-1])
                    continue
            verdicts.append(_compare(rung, Path(folder), references[base]))
            report(verdicts[-1])
    return verdicts


def find_mpiexec() -> str:
    """The mpiexec beside this Python (the mpich wheel's), else the one on PATH."""
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if not found:
        raise ConfigError("no mpiexec here: pip install mpich, or load your site's MPI module")
    return found


def _compare(rung: Rung, folder: Path, reference: tuple[list[float], dict]) -> Verdict:
    error, seconds = _train(rung, folder)
    if error:
        return Verdict(rung, float("nan"), float("nan"), seconds, error)
    losses, weights = _read(folder / rung.name)
    loss = max(abs(a - b) for a, b in zip(losses, reference[0], strict=True))
    weight = max((weights[name] - tensor).abs().max().item() for name, tensor in reference[1].items())
    return Verdict(rung, loss, weight, seconds)


def _train(rung: Rung, folder: Path) -> tuple[str, float]:
    """Run the rung's job; returns (error or "", seconds)."""
    start = time.perf_counter()
    try:
        job = subprocess.run(rung.command(folder), capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"no end after {_TIMEOUT_S} s", time.perf_counter() - start
    seconds = time.perf_counter() - start
    if job.returncode:
        lines = [line for line in job.stderr.splitlines() if line.strip()]
        return (lines[-1] if lines else f"exit status {job.returncode}"), seconds
    return "", seconds


def _read(path: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """(losses of every step, final weights) of a finished run."""
    losses = [record["loss"] for record in read_metrics(path)]
    if len(losses) != STEPS:
        raise LadderError(f"{path.name} left {len(losses)} losses, expected {STEPS}")
    run = load_run(path)
    dtype = torch.float64 if run.loop.precision == "fp64" else torch.float32
    weights = GPT(run.model).to(dtype).state_dict()
    checkpoint.load_weights(weights, checkpoint.latest(path / "checkpoints"))
    return losses, weights
