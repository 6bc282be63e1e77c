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
from pathlib import Path

from aiscale.measure.referee import order, tasks
from aiscale.measure.referee.again import from_equal_inputs, with_other_micro_batches
from aiscale.measure.referee.compare import compare
from aiscale.measure.referee.question import (
    Question,
    Runs,
    is_disturbed,
    say_nothing,
    why_nothing_to_compare,
)
from aiscale.measure.referee.restart import judge_resume
from aiscale.measure.referee.verdict import Verdict


def judge(question: Question, tell: Callable[[str], None] = say_nothing) -> Verdict:
    began = time.monotonic()
    private = tempfile.TemporaryDirectory(prefix="aiscale-referee-")
    with tasks.shared_folder() if tasks.count() > 1 else private as top:
        look = judge_resume if question.resume else _judge
        verdict = look(Runs(question, Path(top), tell))
    verdict.seconds = time.monotonic() - began
    return verdict


def _judge(runs: Runs) -> Verdict:
    many_run = runs.many()
    many = many_run.traces()
    if many_run.complaints():
        return _of_failed_ranks(many, many_run.complaints())
    one_run, noisy_run = runs.reference("one")
    failed = one_run.complaints() or noisy_run.complaints()
    if failed:
        words = f"the reference on one rank failed: {'; '.join(failed)}. A script that needs more"
        words = f"{words} than one rank can be compared with another script: --against"
        return Verdict(len(many), unknown=words)
    one, noisy = one_run.traces(), noisy_run.traces()
    unknown = why_nothing_to_compare(many, one)
    if unknown:
        return Verdict(len(many), unknown=unknown)
    disturbed, words = is_disturbed(runs, many)
    verdict = compare(many, one, noisy)
    verdict = from_equal_inputs(runs, many_run, many, one, verdict)
    verdict = with_other_micro_batches(runs, many, one, verdict)
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


def say_progress(words: str) -> None:
    print(f"running: {words} ...", file=sys.stderr, flush=True)
