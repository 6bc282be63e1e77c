"""Runs one rank again where the first comparison leaves a question open.

Where only the initial weights or the batches differ, one rank is given those of many. Where one
factor may come from the ranks or from the micro-batches, one rank gets other micro-batches."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from aiscale.measure.referee import trace
from aiscale.measure.referee.causes import DDP, DIVIDE_BY_MICRO_BATCHES
from aiscale.measure.referee.compare import compare
from aiscale.measure.referee.question import Runs
from aiscale.measure.referee.runs import Run
from aiscale.measure.referee.shards import wholes
from aiscale.measure.referee.verdict import Cause, Part, Verdict


def from_equal_inputs(
    runs: Runs, many_run: Run, many: list[dict], one: list[dict], verdict: Verdict
) -> Verdict:
    """Where one rank begins with other weights or reads other batches: give it those of many."""
    given: dict[str, Path] = {}
    told = []
    while different := _different_input(verdict):
        more = _inputs_of(runs, many_run, many, one, different.what)
        if not more or set(more) <= set(given):
            break
        given |= more
        one_again, noisy = runs.reference(f"one-with-{'-'.join(given)}", **given)
        if one_again.complaints() or noisy.complaints():
            break
        told.append(different)
        verdict = compare(many, one_again.traces(), noisy.traces())
        if "weights" in given and _keeps_weights_of_its_own(one, verdict):
            verdict.unknown = (
                "the optimizer has a copy of the weights, which cannot be set to equal"
            )
    verdict.given = told + verdict.given
    return verdict


def _different_input(verdict: Verdict) -> Part | None:
    """What makes all that follows incomparable, even if copies on the ranks have drifted apart."""
    if verdict.first and verdict.first.is_input:
        return verdict.first
    return verdict.given[-1] if verdict.given else None


def _keeps_weights_of_its_own(one: list[dict], verdict: Verdict) -> bool:
    """Whether the first update may part only because the optimizer still has its first weights."""
    first = verdict.first
    return bool(one[0]["unseen"] and first and first.step == 0 and first.what == "next weights")


def _inputs_of(
    runs: Runs, many_run: Run, many: list[dict], one: list[dict], what: str
) -> dict[str, Path]:
    """What one rank can be given so that this difference goes away."""
    if what == "samples":
        kept = list(many_run.folder.glob("batches*.pt"))
        return {"batches": many_run.folder} if len(kept) == len(many) else {}
    found = wholes(many, 0, "weights")
    is_part = set(one[0]["steps"][0]["weights"]) - set(found)
    if is_part or any(whole.is_sketch for whole in found.values()):
        return {}
    path = runs.top / "weights.pt"
    trace.save(path, {name: whole.values for name, whole in found.items()})
    return {"weights": path}


def with_other_micro_batches(
    runs: Runs, many: list[dict], one: list[dict], verdict: Verdict
) -> Verdict:
    """Say of a factor whether it is the number of ranks or that of micro-batches: one rank with as
    many micro-batches as each of the ranks."""
    option = _option(runs)
    first = verdict.first
    if not first or not first.cause.is_open or not option:
        return verdict
    size = len(one[0]["steps"][0]["calls"][0]["rows"]) * len(many)
    more = (option, str(size))
    one_again, noisy = runs.reference("one-other-micro-batch", more=more)
    if one_again.complaints() or noisy.complaints():
        return verdict
    other = compare(many, one_again.traces(), noisy.traces()).first
    tried = f"with {option} {size} on one rank"
    if other and (other.step, other.what) == (first.step, first.what):
        words = f"off by the number of ranks: {tried} it is the same"
        cause = Cause(words, "divide by the number of ranks once", DDP)
    else:
        words = f"not divided by the number of micro-batches: {tried} it is gone"
        cause = Cause(words, DIVIDE_BY_MICRO_BATCHES, DDP)
    verdict.first = replace(first, cause=cause)
    return verdict


def _option(runs: Runs) -> str:
    """The script's option for the size of a micro-batch, if it has one."""
    question = runs.question
    if question.against:
        return ""
    known = " ".join(question.arguments) + question.script.read_text()
    found = re.search(r"--[a-z_-]*micro[-_]batch[a-z_-]*", known)
    return found[0] if found else ""
