"""Compares every strategy with serial: same data, global batch and seed, so the same losses and weights.

    aiscale verify 'zero*' ddp-x2 --json        # without names all cases; exit status 0 only if every case holds

Each case is a job as a user would start it. After 20 steps its losses, gradient norms, evaluations and weights are
compared. In fp64 cases that hold differ by at most 1e-13. In fp32 the serial run differs from itself by up to 2.3e-6
when its batch is summed in 2 to 12 parts. The mistakes in tests/faults.py cause differences of 1e-3 or more.
"""

from __future__ import annotations

import fnmatch
import os
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from aiscale import checkpoint
from aiscale.config import ConfigError, hint
from aiscale.model import GPT
from aiscale.processes import start_python
from aiscale.train import load_run, read_metrics
from aiscale.verify import cases
from aiscale.verify.cases import STEPS, Case
from aiscale.verify.simulated import Outcome, simulate

TOLERANCE = {"fp64": 1e-10, "fp32": 2e-5}
_JOBS_AT_A_TIME = 2  #: while the ranks of one wait for each other, the other computes


@dataclass(frozen=True)
class Verdict:
    """A case's differences from its reference."""

    case: Case
    loss_difference: float  #: largest over the steps, nats
    eval_difference: float  #: the same over the evaluations
    norm_difference: float  #: of the gradient before clipping, relative; largest over the steps
    weight_difference: float  #: largest over all weights
    seconds: float
    error: str = ""

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.case.precision]

    @property
    def holds(self) -> bool:
        return not self.error and all(difference <= self.tolerance for difference in self.differences)

    @property
    def differences(self) -> tuple[float, ...]:
        return self.loss_difference, self.eval_difference, self.norm_difference, self.weight_difference

    def __str__(self) -> str:
        state = "holds" if self.holds else "failed" if self.error else "differs"
        numbers = zip(("loss", "eval", "norm", "weights"), self.differences, strict=True)
        said = self.error or ", ".join(f"{name} {difference:.0e}" for name, difference in numbers)
        return f"{self.case.name}: {state}: {said} (allowed {self.tolerance:.0e}, {self.seconds:.1f} s)"

    def to_dict(self) -> dict:
        setting = {name: getattr(self.case, name) for name in ("strategy", "ranks", "reference", "precision")}
        result = {**asdict(self), "case": self.case.name, "seconds": round(self.seconds, 1)}
        return {**result, **setting, "tolerance": self.tolerance, "holds": self.holds}


def verify(names: Iterable[str] = (), *, report: Callable[[Verdict], None] = lambda verdict: None) -> list[Verdict]:
    """Run the named cases (`zero*` names several; default: all) and compare each with its serial run. `report` is
    called after each. Raises ConfigError for an unknown name."""
    selection = choose(names)
    references = {case.reference: cases.CASES[case.reference] for case in selection}
    verdicts: dict[str, Verdict] = {}
    with tempfile.TemporaryDirectory(prefix="aiscale-verify-") as folder:
        true: dict[str, Outcome] = {}  #: of the references
        reading = threading.Lock()  #: a simulated case seeds torch's one generator

        def judge(case: Case) -> None:
            verdicts[case.name] = _verdict(case, Path(folder), true, reading)
            if case in selection:
                report(verdicts[case.name])

        with ThreadPoolExecutor(_JOBS_AT_A_TIME) as pool:
            # References first, since the others need them; then the slowest, so that none runs alone at the end.
            later = sorted((case for case in selection if case.name not in references), key=lambda it: -it.ranks)
            for batch in (references.values(), later):
                list(pool.map(judge, batch))
    return [verdicts[case.name] for case in selection]


def choose(patterns: Iterable[str]) -> list[Case]:
    """The cases that match, all without a pattern; raises ConfigError for a pattern that matches none."""
    selection = {}
    for pattern in list(patterns) or ["*"]:
        names = fnmatch.filter(cases.CASES, pattern)
        if not names:
            advice = hint(pattern, cases.CASES, "aiscale verify --list names them")
            raise ConfigError(f"unknown case {pattern!r}: {advice}")
        selection.update(dict.fromkeys(names))
    return [cases.CASES[name] for name in cases.CASES if name in selection]


def _verdict(case: Case, folder: Path, true: dict[str, Outcome], reading: threading.Lock) -> Verdict:
    start = time.perf_counter()
    failed = partial(Verdict, case, *[float("nan")] * 4)
    is_reference = case.name == case.reference
    if not is_reference and case.reference not in true:
        return failed(0.0, f"its reference {case.reference} failed")
    error = "" if case.simulated else run_job(case, folder)
    if error:
        return failed(time.perf_counter() - start, error)
    try:
        with reading:
            outcome = simulate(case) if case.simulated else _read(folder / case.name, case)
        if is_reference:
            true[case.name] = outcome
        differences = _differences(outcome, true[case.reference])
    except Exception as error:
        what = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return failed(time.perf_counter() - start, what)
    return Verdict(case, *differences, time.perf_counter() - start)


def _differences(outcome: Outcome, true: Outcome) -> tuple[float, float, float, float]:
    """The largest difference in (loss, evaluation, gradient norm, weights)."""
    (metrics, evaluations, weights), (true_metrics, true_evaluations, true_weights) = outcome, true
    when, truly_when = ([(line["step"], line["tokens"]) for line in lines] for lines in (evaluations, true_evaluations))
    if not when or when != truly_when:
        raise RuntimeError(f"evaluations of (step, tokens) {when}, expected {truly_when}")
    norms = [a["grad_norm"] / b["grad_norm"] - 1 for a, b in zip(metrics, true_metrics, strict=True)]
    return (
        _largest_of_losses(metrics, true_metrics),
        _largest_of_losses(evaluations, true_evaluations),
        max(map(abs, norms)),
        max((weights[name] - tensor).abs().max().item() for name, tensor in true_weights.items()),
    )


def _largest_of_losses(lines: list[dict], true_lines: list[dict]) -> float:
    return max(abs(a["loss"] - b["loss"]) for a, b in zip(lines, true_lines, strict=True))


def _read(path: Path, case: Case) -> Outcome:
    metrics = read_metrics(path)
    if len(metrics) != STEPS:
        raise RuntimeError(f"{path.name} left {len(metrics)} losses, expected {STEPS}")
    newest = checkpoint.latest(path / "checkpoints")
    note = checkpoint.read_note(newest)
    ran, meant = (note["layout"]["strategy"], note["world_size"]), (case.strategy, case.ranks)
    if ran != meant:
        raise RuntimeError(f"{path.name} ran as {ran[0]} on {ran[1]} ranks, not as {meant[0]} on {meant[1]}")
    run = load_run(path)
    dtype = torch.float64 if run.loop.precision == "fp64" else torch.float32
    # NaN: weights missing from the checkpoint must not be right by chance.
    weights = {name: torch.full_like(t, torch.nan, dtype=dtype) for name, t in GPT(run.model).state_dict().items()}
    checkpoint.load_weights(weights, newest)
    return metrics, read_metrics(path, "eval"), weights


TIMEOUT_S = 180
#: Modules from whose process jobs are forked, without libraries that change torch when they are imported.
_NEEDED = ["torch._dynamo", "aiscale.train", *(f"aiscale.parallel.{name}" for name in ("ddp", "fsdp", "pipeline"))]
#: Lines of a launcher about an error that the rank itself has explained better.
_SECOND_HAND = re.compile(r"aiscale: rank \d+ of \d+(: lost its connection| failed with exit status| died: signal 15)")


def run_job(case: Case, folder: Path) -> str:
    """Run the case's job, with results below `folder`; returns its error in one line, or ""."""
    log = folder / f"{case.name}.log"
    try:
        if case.launcher:
            with log.open("ab") as file:
                files = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
                status = subprocess.call(case.command(folder), env=_environment(), timeout=TIMEOUT_S, **files)
        else:
            status = train(case.arguments(folder), log)
    except subprocess.TimeoutExpired:
        return f"no end after {TIMEOUT_S} s"
    return _explain(log, status) if status else ""


def train(arguments: list[str], log: Path) -> int:
    """The exit status of `aiscale ARGUMENTS`, whose output goes to `log`; raises subprocess.TimeoutExpired."""
    argv = [*cases.PYTHON[1:], "-m", "aiscale", *arguments]
    with log.open("ab") as file:
        job = start_python(argv, _environment(), preload=_NEEDED, stdout=file.fileno(), stderr=file.fileno())
        job.join(TIMEOUT_S)
        if job.exitcode is None:
            job.kill()  # its ranks end with it
            raise subprocess.TimeoutExpired(argv, TIMEOUT_S)
    return job.exitcode


def _environment() -> dict[str, str]:
    """One thread per rank: the same order of summation on every machine."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def _explain(log: Path, status: int) -> str:
    """The line of a failed job's log that says why."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    first_hand = [line for line in lines if not _SECOND_HAND.match(line)] or lines
    ours = [line for line in first_hand if line.startswith("aiscale: ")]
    return (ours or first_hand or [f"exit status {status}"])[-1]
