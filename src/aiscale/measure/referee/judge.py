"""Starts the runs that a verdict needs, one after the other, and compares them.

    verdict = judge(Question(Path("train_ddp.py"), ("--save", "{TMP}/ck"), ranks=4, steps=3))

The runs: many ranks, watched; the same bare, to see that watching changes no bit of it; one rank;
one rank with the noise of rounding. Where only the initial weights differ, one rank begins again
from those of many. For a restart, all runs have the same ranks: with a stop, and without."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from aiscale.measure.referee import order, tasks, trace
from aiscale.measure.referee.compare import compare
from aiscale.measure.referee.runs import Job, Run, wait
from aiscale.measure.referee.shards import wholes
from aiscale.measure.referee.verdict import Verdict


@dataclass(frozen=True)
class Question:
    script: Path
    arguments: tuple[str, ...] = ()
    ranks: int = 4
    steps: int = 3
    limit_s: float = 120.0  #: for each run
    #: Another script and its arguments as the reference on one rank.
    against: tuple[Path, tuple[str, ...]] | None = None
    #: Further arguments of the reference on one rank.
    reference_arguments: tuple[str, ...] = ()
    #: Further arguments with which the script stops early, to be started again without them.
    resume: tuple[str, ...] = ()
    resume_ranks: int = 0  #: of the second part; 0: as many as of the first


class _Runs:
    """The runs of one question, each in a folder of its own below one that only this user can
    enter."""

    def __init__(self, question: Question, top: Path, tell: Callable[[str], None]):
        self.question, self.top, self.tell = question, top, tell

    def start(
        self, name: str, ranks: int, more: tuple[str, ...] = (), work: Path | None = None, **watched
    ) -> Run:
        question = self.question
        script, arguments = question.script, question.arguments
        if ranks == 1 and question.against:
            script, arguments = question.against
        if ranks == 1:
            arguments = (*arguments, *question.reference_arguments)
        job = Job(script, (*arguments, *more), ranks, question.steps, **watched)
        return Run(job, self.top / name, work)

    def finish(self, words: str, *runs: Run) -> None:
        self.tell(words)
        wait(runs, self.question.limit_s)

    def many(self) -> Run:
        run = self.start("many", self.question.ranks)
        self.finish(f"{self.question.ranks} ranks", run)
        return run

    def bare(self, name: str) -> Run:
        run = self.start(name, self.question.ranks, bare=True)
        self.finish(f"{self.question.ranks} ranks, unwatched", run)
        return run

    def reference(
        self, name: str, ranks: int = 1, more: tuple[str, ...] = (), **given: Path
    ) -> tuple[Run, Run]:
        one = self.start(name, ranks, more, **given)
        noisy = self.start(f"{name}-noisy", ranks, more, noise=True, **given)
        self.finish(f"reference, ranks: {ranks}, with and without rounding noise", one, noisy)
        return one, noisy


def judge(question: Question, tell: Callable[[str], None] = lambda words: None) -> Verdict:
    began = time.monotonic()
    private = tempfile.TemporaryDirectory(prefix="aiscale-referee-")
    with tasks.shared_folder() if tasks.count() > 1 else private as top:
        look = _judge_resume if question.resume else _judge
        verdict = look(_Runs(question, Path(top), tell))
    verdict.seconds = time.monotonic() - began
    return verdict


def _judge(runs: _Runs) -> Verdict:
    many_run = runs.many()
    many = many_run.traces()
    if many_run.complaints():
        return _of_failed_ranks(many, many_run.complaints())
    one_run, noisy_run = runs.reference("one")
    failed = one_run.complaints() or noisy_run.complaints()
    if failed:
        return Verdict(len(many), unknown=f"the reference on one rank failed: {failed[0]}")
    one, noisy = one_run.traces(), noisy_run.traces()
    unknown = _why_nothing_to_compare(many, one)
    if unknown:
        return Verdict(len(many), unknown=unknown)
    disturbed, words = _is_disturbed(runs, many)
    verdict = compare(many, one, noisy)
    verdict = _from_equal_inputs(runs, many_run, many, one, verdict)
    if disturbed:
        verdict.unknown = words
    elif words:
        verdict.not_compared.append(words)
    return verdict


def _judge_resume(runs: _Runs) -> Verdict:
    """Two parts of a run, with a stop between them, against the run in one go."""
    question = runs.question
    first = runs.start("first-part", question.ranks, question.resume)
    runs.finish("the first part", first)
    second = runs.start("second-part", question.ranks, work=first.work)
    runs.finish("the second part", second)
    whole_run, noisy_run = runs.reference("in-one-go", question.ranks)
    for run in (first, second, whole_run, noisy_run):
        if run.complaints():
            return Verdict(
                question.ranks, unknown=f"the script failed: {'; '.join(run.complaints()[:3])}"
            )
    before, after, whole = first.traces(), second.traces(), whole_run.traces()
    unknown = _why_nothing_to_compare(after, whole)
    if any(trace["ended"] != "script" for trace in before):
        unknown = f"the first part did not stop within {question.steps} steps"
        unknown = f"{unknown}: --resume needs arguments that end it earlier"
    if unknown:
        return Verdict(question.ranks, unknown=unknown)
    for early, late in zip(before, after, strict=True):
        taken = [step for step in early["steps"] if step["lr"]]
        late["steps"] = taken + late["steps"]
    verdict = compare(after, whole, noisy_run.traces(), resumed=True)
    disturbed, words = _is_disturbed(runs, whole)
    if disturbed:
        verdict.unknown = words
    elif words:
        verdict.not_compared.append(words)
    return verdict


def _of_failed_ranks(many: list[dict], complaints: list[str]) -> Verdict:
    verdict = Verdict(len(many))
    verdict.first = order.steps_left_out(many) or order.first_difference(many, [])
    if verdict.first is None:
        verdict.unknown = f"the script failed on {len(many)} ranks: {'; '.join(complaints[:3])}"
    else:
        verdict.not_compared.append(f"what comes after it: {'; '.join(complaints[:3])}")
    return verdict


def _why_nothing_to_compare(many: list[dict], one: list[dict]) -> str:
    if len(many) > 1 and not any(trace["connected"] for trace in many):
        return "no rank has called init_process_group: these processes know nothing of each other"
    for words, traces in (("many ranks", many), ("one rank", one)):
        if not any(trace["digests"] for trace in traces):
            return f"no optimizer of torch took a step on {words}"
        if not any(trace["modules"] for trace in traces):
            return f"no model of torch was called on {words}"
    return ""


def _is_disturbed(runs: _Runs, many: list[dict]) -> tuple[bool, str]:
    """Whether watching has changed a bit of a loss or a weight, and what to say about it."""
    bare = runs.bare("bare").traces()
    where = _first_other_bit(many, bare)
    if not where:
        return False, ""
    if _first_other_bit(bare, runs.bare("bare-again").traces()):
        return (
            False,
            "whether watching disturbs: two runs of the script itself are not equal bit by bit",
        )
    return True, f"watching changes this script: {where} is another without it"


def _first_other_bit(these: list[dict], those: list[dict]) -> str:
    for this, that in zip(these, those, strict=True):
        for kind in ("digests", "losses"):
            for number, (mine, other) in enumerate(zip(this[kind], that[kind], strict=False)):
                if mine != other and not (
                    mine != mine and other != other
                ):  # two NaN are equal here
                    what = "loss" if kind == "losses" else "weights after optimizer step"
                    return f"{what} {number} of rank {this['rank']}"
    return ""


def _from_equal_inputs(
    runs: _Runs, many_run: Run, many: list[dict], one: list[dict], verdict: Verdict
) -> Verdict:
    """Where one rank begins with other weights or reads other batches: give it those of many."""
    given: dict[str, Path] = {}
    told = []
    while verdict.first and verdict.first.is_input:
        more = _inputs_of(runs, many_run, many, one, verdict.first.what)
        if not more or set(more) <= set(given):
            break
        given |= more
        one_again, noisy = runs.reference(f"one-with-{'-'.join(given)}", **given)
        if one_again.complaints() or noisy.complaints():
            break
        told.append(verdict.first)
        verdict = compare(many, one_again.traces(), noisy.traces())
        if "weights" in given and _keeps_weights_of_its_own(one, verdict):
            verdict.unknown = (
                "the optimizer has a copy of the weights, which cannot be set to equal"
            )
    verdict.given = told + verdict.given
    return verdict


def _keeps_weights_of_its_own(one: list[dict], verdict: Verdict) -> bool:
    """Whether the first update may part only because the optimizer still has its first weights."""
    first = verdict.first
    return bool(one[0]["unseen"] and first and first.step == 0 and first.what == "next weights")


def _inputs_of(
    runs: _Runs, many_run: Run, many: list[dict], one: list[dict], what: str
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


def say_progress(words: str) -> None:
    print(f"running: {words} ...", file=sys.stderr, flush=True)
