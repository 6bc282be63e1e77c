"""Every strategy against serial: same data, same global batch, same seed, so the same losses and weights.

    aiscale verify                      # the whole ladder, a table, exit status 0 only if every rung holds
    aiscale verify 'zero*' ddp-x2 --json

Each rung is a job as a user would start it (`mpiexec -n 2 python -m aiscale train ...`), and what it left on disk is
compared after 20 steps: losses and gradient norms from metrics.jsonl, weights from the checkpoint, whatever its format.

Tolerances. In fp64 a different order of summation changes the last of 16 digits: the rungs that hold differ by 1e-13 or
less, and 1e-10 leaves room for that and for nothing else. In fp32 (for libraries that refuse fp64) the serial run
against itself, its batch summed in 2 to 12 parts, drifts by at most 2.3e-6 with these settings: that is the floor, and
2e-5 the tolerance. The mistakes in tests/faults.py show at 1e-3 or above.
"""

from __future__ import annotations

import fnmatch
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from aiscale import checkpoint
from aiscale.config import ConfigError
from aiscale.model import GPT
from aiscale.train import load_run, read_metrics
from aiscale.verify import rungs
from aiscale.verify.jobs import Jobs
from aiscale.verify.rungs import STEPS, Rung

TOLERANCE = {"fp64": 1e-10, "fp32": 2e-5}
_LANES = 2  #: jobs at a time: while the ranks of one wait for each other, another computes

Weights = dict[str, torch.Tensor]


class LadderError(RuntimeError):
    """A rung that left nothing to compare; the message is one line."""


@dataclass(frozen=True)
class Verdict:
    """How far a rung is from serial."""

    rung: Rung
    loss_difference: float  #: largest over the steps, nats
    norm_difference: float  #: of the gradient before clipping, relative; largest over the steps
    weight_difference: float  #: largest over all weights
    seconds: float
    error: str = ""

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.rung.precision]

    @property
    def holds(self) -> bool:
        differences = (self.loss_difference, self.norm_difference, self.weight_difference)
        return not self.error and all(difference <= self.tolerance for difference in differences)

    def to_dict(self) -> dict:
        return {
            "rung": self.rung.name,
            "strategy": self.rung.strategy,
            "ranks": self.rung.ranks,
            "reference": self.rung.reference,
            "precision": self.rung.precision,
            "loss_difference": self.loss_difference,
            "norm_difference": self.norm_difference,
            "weight_difference": self.weight_difference,
            "tolerance": self.tolerance,
            "seconds": round(self.seconds, 1),
            "holds": self.holds,
            "error": self.error,
        }


def climb(names: Iterable[str] = (), *, report: Callable[[Verdict], None] = lambda verdict: None) -> list[Verdict]:
    """Run the named rungs (all, if none is named; `zero*` names several) and compare each with its serial run.

    `report` is called after each. Raises ConfigError for an unknown name.
    """
    chosen = _choose(names)
    references = {rung.reference: rungs.RUNGS[rung.reference] for rung in chosen}
    verdicts: dict[str, Verdict] = {}
    with tempfile.TemporaryDirectory(prefix="aiscale-verify-") as folder, Jobs() as jobs:
        climber = _Climber(jobs, Path(folder))

        def judge(rung: Rung) -> None:
            verdicts[rung.name] = climber.verdict(rung)
            if rung in chosen:
                report(verdicts[rung.name])

        with ThreadPoolExecutor(_LANES) as lanes:
            # The slowest first, or one lane would end with it alone; references before all, which the others need.
            later = sorted((rung for rung in chosen if rung.name not in references), key=lambda it: -it.ranks)
            for batch in (references.values(), later):
                list(lanes.map(judge, batch))
    return [verdicts[rung.name] for rung in chosen]


def _choose(patterns: Iterable[str]) -> list[Rung]:
    chosen = {}
    for pattern in list(patterns) or ["*"]:
        found = fnmatch.filter(rungs.RUNGS, pattern)
        if not found:
            raise ConfigError(f"unknown rung {pattern}: it may be one of {', '.join(rungs.RUNGS)}")
        chosen.update(dict.fromkeys(found))
    return [rungs.RUNGS[name] for name in rungs.RUNGS if name in chosen]


class _Climber:
    """What is known of the references so far."""

    def __init__(self, jobs: Jobs, folder: Path) -> None:
        self.jobs, self.folder = jobs, folder
        self.left: dict[str, tuple[list[dict], Weights]] = {}  #: what a reference left
        self._reading = threading.Lock()

    def verdict(self, rung: Rung) -> Verdict:
        start = time.perf_counter()
        failed = partial(Verdict, rung, *[float("nan")] * 3)
        is_reference = rung.name == rung.reference
        if not is_reference and rung.reference not in self.left:
            return failed(0.0, f"its reference {rung.reference} failed")
        error = self.jobs.run(rung, self.folder)
        seconds = time.perf_counter() - start
        if error:
            return failed(seconds, error)
        try:
            with self._reading:
                metrics, weights = _read(self.folder / rung.name, rung)
        except Exception as error:
            return failed(seconds, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        if is_reference:
            self.left[rung.name] = metrics, weights
        return Verdict(rung, *_differences(metrics, weights, *self.left[rung.reference]), seconds)


def _differences(metrics: list[dict], weights: Weights, true_metrics: list[dict], true_weights: Weights):
    """(loss, gradient norm, weights): the largest difference in each."""
    pairs = list(zip(metrics, true_metrics, strict=True))
    loss = max(abs(a["loss"] - b["loss"]) for a, b in pairs)
    norm = max(abs(a["grad_norm"] / b["grad_norm"] - 1) for a, b in pairs)
    return loss, norm, max((weights[name] - tensor).abs().max().item() for name, tensor in true_weights.items())


def _read(path: Path, rung: Rung) -> tuple[list[dict], Weights]:
    """(metrics of every step, final weights) of a finished run."""
    metrics = read_metrics(path)
    if len(metrics) != STEPS:
        raise LadderError(f"{path.name} left {len(metrics)} losses, expected {STEPS}")
    newest = checkpoint.latest(path / "checkpoints")
    note = checkpoint.read_note(newest)
    ran, meant = (note["layout"]["strategy"], note["world_size"]), (rung.strategy, rung.ranks)
    if ran != meant:
        raise LadderError(f"{path.name} ran as {ran[0]} on {ran[1]} ranks, not as {meant[0]} on {meant[1]}")
    run = load_run(path)
    dtype = torch.float64 if run.loop.precision == "fp64" else torch.float32
    # What the checkpoint leaves out must not be right by chance.
    weights = {name: torch.full_like(t, torch.nan, dtype=dtype) for name, t in GPT(run.model).state_dict().items()}
    checkpoint.load_weights(weights, newest)
    return metrics, weights
