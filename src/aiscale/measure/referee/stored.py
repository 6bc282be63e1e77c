"""One run of a script's ranks against a reference that is kept: what a second try needs no longer.

    tried = try_again(question, Path("my/.reference"))
    tried.verdict, tried.complaints, tried.traffic["all_reduce"]

The reference is the question's other script on one rank, with the noise of rounding and without.
It is run anew when its script, a file beside it, its arguments or torch have changed. Whether
watching disturbs the script is not asked: that needs two runs more."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from aiscale.measure.referee import order
from aiscale.measure.referee.again import from_equal_inputs
from aiscale.measure.referee.compare import compare
from aiscale.measure.referee.question import (
    Question,
    Runs,
    say_nothing,
    why_nothing_to_compare,
)
from aiscale.measure.referee.runs import Run, read_traces
from aiscale.measure.referee.verdict import Verdict


@dataclass(frozen=True)
class Tried:
    verdict: Verdict
    complaints: list[str]  #: why ranks of the script have failed
    #: Bytes that rank 0 hands over in a step, by operation.
    traffic: Mapping[str, float] = field(default_factory=dict)
    micro_batches: int = 0  #: losses of rank 0's first step, each of which begins a backward pass
    #: What torch.load finds in the file `{TMP}/checkpoint`, if the script has saved one.
    saved: Any = None
    omitted: str = ""  #: a step of an optimizer, a call of a model: what its ranks never do
    notes: frozenset[str] = frozenset()  #: what watchers of rank 0 have met, "forward prefetch"
    #: Of the model, on rank 0 in a step: one for each micro-batch. A pipeline's first has more.
    calls: int = 0
    apart: int | None = None  #: the first step after which ranks' weights are not equal bit by bit
    printed: str = ""  #: by all ranks of the script
    expected: str = ""  #: by the reference


def try_again(question: Question, kept: Path) -> Tried:
    """Raises RuntimeError if the reference itself fails."""
    place = kept / _key(question)
    with tempfile.TemporaryDirectory(prefix="aiscale-referee-") as top:
        runs = Runs(question, Path(top), say_nothing)
        many_run = runs.start("many", question.ranks, is_reference=False)
        started = [many_run]
        if not place.is_dir():
            started += _start_reference(runs)
        runs.finish("the script", *started)
        if started[1:]:
            _keep(started[1:], place)
        many = many_run.traces()
        seen = _seen(many_run, many)
        if complaints := many_run.complaints():
            verdict = Verdict(len(many))
            verdict.first = order.steps_left_out(many) or order.first_difference(many, [])
            return Tried(verdict, complaints, **seen)
        one, noisy = (read_traces(place / name, 1) for name in ("one", "one-noisy"))
        verdict = compare(many, one, noisy)
        verdict.unknown = verdict.unknown or why_nothing_to_compare(many, one)
        verdict = from_equal_inputs(runs, many_run, many, one, verdict)
        omitted = why_nothing_to_compare(many, many)
        return Tried(verdict, [], **seen, omitted=omitted, expected=_printed(place / "one"))


def run_once(question: Question, more: tuple[str, ...], after: tuple[str, ...] = ()) -> Tried:
    """The ranks alone, with further arguments of the script: nothing is compared.

    `after`: those of a run before it, whose checkpoint it finds.
    """
    with tempfile.TemporaryDirectory(prefix="aiscale-referee-") as top:
        runs = Runs(question, Path(top), say_nothing)
        for arguments in [after, more] if after else [more]:
            name = f"run{arguments is more:d}"
            work = Path(top, "run0", "work") if after else None
            run = runs.start(name, question.ranks, arguments, work, is_reference=False)
            runs.finish("the script", run)
        traces = run.traces()
        return Tried(Verdict(len(traces)), run.complaints(), **_seen(run, traces))


def run_kept(question: Question, more: tuple[str, ...], kept: Path) -> Tried:
    """As `run_once`, of a script that is right: what it prints and sends is kept for further tries.

    Raises RuntimeError if it fails.
    """
    arguments = (*question.arguments, *more, f"ranks {question.ranks}")
    place = kept / f"{_key(replace(question, against=(question.script, arguments)))}.json"
    if not place.exists():
        tried = run_once(question, more)
        if tried.complaints:
            raise RuntimeError(f"{question.script.name} failed: {'; '.join(tried.complaints)}")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps({"traffic": tried.traffic, "printed": tried.printed}))
    return Tried(Verdict(question.ranks), [], **json.loads(place.read_text()))


def _seen(run: Run, traces: list[dict]) -> dict:
    first = traces[0]["steps"][:1]
    calls = [len(step["calls"]) for step in traces[0]["steps"] if step["calls"]]
    return {
        "calls": min(calls, default=0),
        "apart": _first_apart(traces),
        "micro_batches": len(first[0]["losses"]) if first else 0,
        "saved": _saved(run.work / "checkpoint"),
        "traffic": _in_a_step(traces[0]),
        "notes": frozenset(traces[0]["notes"]),
        "printed": _printed(run.folder),
    }


def _key(question: Question) -> str:
    """Of all that decides what the reference computes."""
    script, arguments = question.against
    told = [torch.__version__, question.steps, *arguments, *question.reference_arguments]
    digest = hashlib.sha256(json.dumps([str(each) for each in told]).encode())
    for path in [script, *sorted(script.parent.glob("*.py"))]:
        if path == script or not path.name.startswith("train"):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _start_reference(runs: Runs) -> list[Run]:
    return [runs.start("one", 1), runs.start("one-noisy", 1, noise=True)]


def _keep(reference: list[Run], place: Path) -> None:
    """Whole or not at all."""
    if failed := [words for run in reference for words in run.complaints()]:
        raise RuntimeError(f"the reference on one rank failed: {'; '.join(failed)}")
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as draft:
        for run in reference:
            folder = Path(draft, "traces", run.folder.name)
            folder.mkdir(parents=True)
            for pattern in ("rank*.pt", "sent*.jsonl", "out*"):
                for path in run.folder.glob(pattern):
                    shutil.copy2(path, folder)
        if not place.exists():
            Path(draft, "traces").rename(place)


def _first_apart(traces: list[dict]) -> int | None:
    for number, digests in enumerate(zip(*(trace["digests"] for trace in traces), strict=False)):
        if len(set(digests)) > 1:
            return number
    return None


def _in_a_step(trace: dict) -> dict[str, float]:
    steps = len(trace["steps"]) or 1
    return {operation: nbytes / steps for operation, nbytes in trace["traffic"].items()}


def _saved(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True) if path.is_file() else None
    except (RuntimeError, OSError, pickle.UnpicklingError):
        return None


def _printed(run: Path) -> str:
    return "".join(path.read_text(errors="replace") for path in sorted(run.glob("out*")))
