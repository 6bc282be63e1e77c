"""What is asked about a script, and the runs that answer it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from aiscale.measure.referee.runs import Job, Run, wait


@dataclass(frozen=True)
class Question:
    script: Path
    arguments: tuple[str, ...] = ()
    ranks: int = 4
    steps: int = 3
    limit_s: float = 120.0  #: for each run
    #: The script is this module, started as by `python -m` from this process's folder.
    module: str = ""
    #: Another script and its arguments as the reference on one rank.
    against: tuple[Path, tuple[str, ...]] | None = None
    #: Further arguments of the reference on one rank.
    reference_arguments: tuple[str, ...] = ()
    #: Further arguments with which the script stops early, to be started again without them.
    resume: tuple[str, ...] = ()
    resume_ranks: int = 0  #: of the second part; 0: as many as of the first


def say_nothing(words: str) -> None:
    """Of what is running."""


class Runs:
    """The runs of one question, each in a folder of its own below one that only this user can
    enter."""

    def __init__(self, question: Question, top: Path, tell: Callable[[str], None]):
        self.question, self.top, self.tell = question, top, tell

    def start(
        self,
        name: str,
        ranks: int,
        more: tuple[str, ...] = (),
        work: Path | None = None,
        is_reference: bool | None = None,
        **watched,
    ) -> Run:
        """`is_reference`: without it, a run on one rank is."""
        question = self.question
        script, arguments, module = question.script, question.arguments, question.module
        if is_reference is None:
            is_reference = ranks == 1
        if is_reference and question.against:
            script, arguments = question.against
            module = ""
        if is_reference:
            arguments = (*arguments, *question.reference_arguments)
        job = Job(script, (*arguments, *more), ranks, question.steps, module=module, **watched)
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


def why_nothing_to_compare(many: list[dict], one: list[dict]) -> str:
    for words, traces in (("many ranks", many), ("one rank", one)):
        if not any(trace["digests"] for trace in traces):
            return f"no optimizer of torch took a step on {words}"
        if not any(trace["modules"] for trace in traces):
            return f"no model of torch was called on {words}"
    # known from the optimizer's first step on
    if len(many) > 1 and not any(trace["connected"] for trace in many):
        return "no rank has called init_process_group: these processes know nothing of each other"
    return ""


def is_disturbed(runs: Runs, many: list[dict]) -> tuple[bool, str]:
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
