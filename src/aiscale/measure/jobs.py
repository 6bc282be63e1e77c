"""Compares every trainer with serial training: on the same data, by the same seed, the same run.

    aiscale verify 'zero*' ddp-x2 --json    # without names all cases; exit status 0 if all hold

Each case is a job as a user would start it. Afterwards its losses, gradient norms, evaluations and
weights are compared.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from aiscale.errors import ConfigError, hint
from aiscale.measure import cases
from aiscale.measure.cases import STEPS, TOKENS, Case
from aiscale.measure.weights import weights_of
from aiscale.plan.presets import model_of
from aiscale.private import STORE, new_store
from aiscale.processes import start_python

#: (of losses, of gradient norms and weights). Adam turns a gradient near 0, of which rounding is a
#: large part, into a step as large as any: weights are further apart than losses.
TOLERANCE = {"fp64": (1e-10, 1e-10), "fp32": (2e-5, 2e-3)}
_JOBS_AT_A_TIME = 2  #: while the ranks of one wait for each other, the other computes
_TIMEOUT_S = 300
#: What jobs are forked with, instead of importing it.
_NEEDED = ["torch._dynamo", "torch.distributed.checkpoint", "aiscale.train.data"]
#: Lines of a launcher about an error that the rank itself has explained better.
_SECOND_HAND = re.compile(r"aiscale: rank \d+ of \d+ (failed with exit status|died: signal 15)")


@dataclass(frozen=True)
class Outcome:
    """What a run has left."""

    steps: list[dict]
    evaluations: list[dict]
    weights: dict[str, Tensor]


@dataclass(frozen=True)
class Verdict:
    """A case's differences from its reference. None: there is nothing to compare."""

    case: Case
    loss_difference: float  #: largest over the steps, nats
    eval_difference: float | None  #: the same over the evaluations
    norm_difference: float | None  #: of the gradient before clipping, relative
    weight_difference: float  #: largest over all weights
    seconds: float
    error: str = ""

    @property
    def tolerances(self) -> tuple[float, float]:
        return TOLERANCE[self.case.precision]

    @property
    def holds(self) -> bool:
        return not self.error and all(found <= most for found, most in self.differences)

    @property
    def differences(self) -> list[tuple[float, float]]:
        """(difference, what is allowed) of each quantity that both runs have."""
        of_losses, of_others = self.tolerances
        pairs = [
            (self.loss_difference, of_losses),
            (self.eval_difference, of_losses),
            (self.norm_difference, of_others),
            (self.weight_difference, of_others),
        ]
        return [(found, most) for found, most in pairs if found is not None]

    def __str__(self) -> str:
        state = "holds" if self.holds else "failed" if self.error else "differs"
        of_losses, of_others = self.tolerances
        losses = f"loss {_said(self.loss_difference)}, eval {_said(self.eval_difference)}"
        others = f"norm {_said(self.norm_difference)}, weights {_said(self.weight_difference)}"
        found = f"{losses} (allowed {of_losses:.0e}), {others} (allowed {of_others:.0e})"
        return f"{self.case.name}: {state}: {self.error or found}, {self.seconds:.1f} s"

    def to_dict(self) -> dict:
        names = ("trainer", "ranks", "reference", "precision")
        about = {name: getattr(self.case, name) for name in names}
        result = {**asdict(self), "case": self.case.name, "seconds": round(self.seconds, 1)}
        return {**result, **about, "tolerances": self.tolerances, "holds": self.holds}


def _said(difference: float | None) -> str:
    return "not there" if difference is None else f"{difference:.0e}"


def verify(
    names: Iterable[str] = (), *, report: Callable[[Verdict], None] = lambda verdict: None
) -> list[Verdict]:
    """Run the named cases (`zero*` names several; default: all), and what they are compared with.

    `report` is called after each. Raises ConfigError for an unknown name.
    """
    selection = choose(names)
    references = {case.reference: cases.CASES[case.reference] for case in selection}
    verdicts: dict[str, Verdict] = {}
    with tempfile.TemporaryDirectory(prefix="aiscale-verify-") as folder:
        write_text(Path(folder, "text"))
        true: dict[str, Outcome] = {}  #: of the references

        def judge(case: Case) -> None:
            verdicts[case.name] = _verdict(case, Path(folder), true)
            if case in selection:
                report(verdicts[case.name])

        with ThreadPoolExecutor(_JOBS_AT_A_TIME) as pool:
            others = [case for case in selection if case.name not in references]
            # References first; then the slowest, so that none runs alone at the end.
            others.sort(key=lambda case: -case.ranks)
            for batch in (references.values(), others):
                list(pool.map(judge, batch))
    return [verdicts[case.name] for case in selection]


def choose(patterns: Iterable[str]) -> list[Case]:
    """The cases that match, all without a pattern; ConfigError for a pattern that matches none."""
    selection = {}
    for pattern in list(patterns) or ["*"]:
        names = fnmatch.filter(cases.CASES, pattern)
        if not names:
            advice = hint(pattern, cases.CASES, "aiscale verify --list names them")
            raise ConfigError(f"unknown case {pattern!r}: {advice}")
        selection.update(dict.fromkeys(names))
    return [cases.CASES[name] for name in cases.CASES if name in selection]


def write_text(folder: Path) -> None:
    """What the cases learn from, as a folder of tokens."""
    folder.mkdir()
    numbers = cases.text()
    tokens = b"".join(number.to_bytes(2, "little") for number in numbers)
    (folder / "tokens.bin").write_bytes(tokens)
    about = {"tokens": len(numbers), "vocab_size": TOKENS, "sha256": "of the cases"}
    (folder / "manifest.json").write_text(json.dumps(about))


def _verdict(case: Case, folder: Path, true: dict[str, Outcome]) -> Verdict:
    start = time.perf_counter()
    failed = partial(Verdict, case, *[float("nan")] * 4)
    is_reference = case.name == case.reference
    if not is_reference and case.reference not in true:
        return failed(0.0, f"its reference {case.reference} failed")
    error = run_job(case, folder)
    if error:
        return failed(time.perf_counter() - start, error)
    try:
        outcome = _read(folder / case.name, case)
        if is_reference:
            true[case.name] = outcome
        differences = _differences(case, outcome, true[case.reference])
    except Exception as error:
        what = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return failed(time.perf_counter() - start, what)
    return Verdict(case, *differences, time.perf_counter() - start)


def _differences(case: Case, outcome: Outcome, true: Outcome) -> tuple[float | None, ...]:
    """The largest difference in (loss, evaluation, gradient norm, weights)."""
    evaluations = norms = None
    if case.evaluates:
        evaluations = _largest_of_losses(outcome.evaluations, true.evaluations)
    if case.has_norm:
        pairs = zip(outcome.steps, true.steps, strict=True)
        norms = _largest([abs(a["grad_norm"] / b["grad_norm"] - 1) for a, b in pairs])
    elif any(line["grad_norm"] is not None for line in outcome.steps):
        raise RuntimeError("the record has gradient norms that nobody knows")
    if outcome.weights.keys() != true.weights.keys():
        wrong = sorted(outcome.weights.keys() ^ true.weights.keys())
        raise RuntimeError(f"weights that only one of the two has: {', '.join(wrong[:5])}")
    weights = [
        (outcome.weights[name] - weight).abs().max().item() for name, weight in true.weights.items()
    ]
    return (
        _largest_of_losses(outcome.steps, true.steps),
        evaluations,
        norms,
        _largest(weights),
    )


def _largest_of_losses(lines: list[dict], true_lines: list[dict]) -> float:
    when, truly_when = ([line["step"] for line in each] for each in (lines, true_lines))
    if when != truly_when:
        raise RuntimeError(f"results of steps {when}, expected {truly_when}")
    pairs = zip(lines, true_lines, strict=True)
    return _largest([abs(a["loss"] - b["loss"]) for a, b in pairs])


def _largest(numbers: list[float]) -> float:
    """Infinity for what is no number: `max` would pass it over."""
    return max((number if number == number else float("inf") for number in numbers), default=0.0)


def _read(path: Path, case: Case) -> Outcome:
    note = json.loads((path / "run.json").read_text())
    ran, meant = (note["trainer"], note["world_size"]), (case.trainer, case.ranks)
    if ran != meant:
        what = f"{ran[0]} on {ran[1]} ranks, not as {meant[0]} on {meant[1]}"
        raise RuntimeError(f"{path.name} ran as {what}")
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "train"]
    if len(steps) != STEPS:
        raise RuntimeError(f"{path.name} left {len(steps)} losses, expected {STEPS}")
    weights = weights_of(path, model_of(case.model))
    return Outcome(steps, [line for line in lines if line["kind"] == "eval"], weights)


def run_job(case: Case, folder: Path) -> str:
    """Run the case's job, with results below `folder`; returns its error in one line, or ""."""
    log = folder / f"{case.name}.log"
    # One thread per rank: the same order of summation on every machine.
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    if case.source:
        env["PYTHONPATH"] = os.pathsep.join([case.source, env.get("PYTHONPATH", "")])
    try:
        with log.open("ab") as file:
            if case.launcher or case.source:
                status = _in_a_new_python(case, folder, env, file)
            else:
                status = _forked(case, folder, env, file)
    except subprocess.TimeoutExpired:
        return f"no end after {_TIMEOUT_S} s"
    return _explain(log, status) if status else ""


def _in_a_new_python(case: Case, folder: Path, env: dict, file) -> int:
    command = [sys.executable, *case.command(folder)]
    store = None
    if case.launcher == "mpiexec":
        command = [cases.find_mpiexec(), "-n", str(case.ranks), *command]
        store = new_store()
        env = {**env, STORE: str(store)}
    try:
        files = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
        return subprocess.run(command, env=env, timeout=_TIMEOUT_S, **files).returncode
    finally:
        if store:
            for left in store.parent.glob(f"{store.name}*"):
                left.unlink(missing_ok=True)


def _forked(case: Case, folder: Path, env: dict, file) -> int:
    words = case.command(folder)
    outputs = {"stdout": file.fileno(), "stderr": file.fileno()}
    job = start_python(words, env, preload=_NEEDED, **outputs)
    job.join(_TIMEOUT_S)
    if job.exitcode is None:
        job.kill()  # its ranks end with it
        raise subprocess.TimeoutExpired(words, _TIMEOUT_S)
    return job.exitcode


def _explain(log: Path, status: int) -> str:
    """The line of a failed job's log that says why."""
    text = log.read_text(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first_hand = [line for line in lines if not _SECOND_HAND.match(line)] or lines
    ours = [line for line in first_hand if line.startswith("aiscale: ")]
    return (ours or first_hand or [f"exit status {status}"])[-1]
