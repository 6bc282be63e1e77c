"""A run with a stop in it against the run in one go, also where other ranks go on than began."""

from __future__ import annotations

from aiscale.measure.referee import trace
from aiscale.measure.referee.compare import compare
from aiscale.measure.referee.question import Runs, is_disturbed, why_nothing_to_compare
from aiscale.measure.referee.verdict import Verdict


def judge_resume(runs: Runs) -> Verdict:
    question = runs.question
    ranks = question.resume_ranks or question.ranks
    first = runs.start("first-part", question.ranks, question.resume)
    runs.finish("the first part", first)
    second = runs.start("second-part", ranks, work=first.work)
    runs.finish("the second part", second)
    whole_run, noisy_run = runs.reference("in-one-go", question.ranks)
    for run in (first, second, whole_run, noisy_run):
        if run.complaints():
            words = "; ".join(run.complaints()[:3])
            return Verdict(ranks, unknown=f"the script failed: {words}")
    before, after, whole = first.traces(), second.traces(), whole_run.traces()
    unknown = why_nothing_to_compare(after, whole)
    if any(each["ended"] != "script" for each in before):
        unknown = f"the first part did not stop within {question.steps} steps"
        unknown = f"{unknown}: --resume needs arguments that end it earlier"
    if unknown:
        return Verdict(ranks, unknown=unknown)
    taken = sum(bool(step["lr"]) for step in before[0]["steps"])
    many = _in_a_row(before, after, taken)
    verdict = compare(many, whole, noisy_run.traces(), resumed=True)
    verdict.ranks, verdict.is_of_restart = ranks, True
    if ranks == question.ranks:
        verdict.warnings += _generators_that_begin_anew(after, whole, taken)
    disturbed, words = is_disturbed(runs, whole)
    if disturbed:
        verdict.unknown = words
    elif words:
        verdict.not_compared.append(words)
    return verdict


def _in_a_row(before: list[dict], after: list[dict], taken: int) -> list[dict]:
    """All ranks of both parts: each does nothing in the steps of the other part."""
    steps_after = min(len(each["steps"]) for each in after)
    found = []
    for each in before:
        idle = [trace.empty_step() for _ in range(steps_after)]
        found.append(each | {"steps": each["steps"][:taken] + idle})
    for each in after:
        idle = [trace.empty_step() for _ in range(taken)]
        found.append(each | {"steps": idle + each["steps"]})
    return found


def _generators_that_begin_anew(after: list[dict], whole: list[dict], taken: int) -> list[str]:
    """Random numbers from which each step draws, and which the restart does not go on with."""
    words = []
    for name in ("torch", "random", "numpy"):
        odd = []
        for late, right in zip(after, whole, strict=True):
            if len(right["steps"]) <= taken or not taken:
                continue
            drawn = [
                right["steps"][number]["generators"].get(name) for number in (taken - 1, taken)
            ]
            here = late["steps"][0]["generators"].get(name)
            if None not in drawn and drawn[0] != drawn[1] != here:
                odd.append(late["rank"])
        if odd:
            state = f"{name}'s generator does not go on where it stopped, on ranks {odd}"
            words.append(f"{state}: other dropout masks, other noise. Save and set its state")
    return words
