"""One round: a run disturbed as planned, resumed each time, then compared bit for bit with the undisturbed one.

wanted = reference(testbed, "undisturbed")
outcome = play(testbed, "round-7", plan(seed=0, number=7), wanted)     # outcome.wrong is "" if nothing was lost
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

from aiscale.hpc.sites import ENDED
from aiscale.train import open_trained
from soak.plan import Event, SoakError, TooLate
from soak.testbed import Testbed, losses, until

T = TypeVar("T")
#: On a starved machine the scheduler may act after the run has ended: that round tests nothing, and is repeated.
_ATTEMPTS = 3


@dataclass
class Reference:
    weights: dict[str, torch.Tensor]
    losses: list[tuple[int, float]]  #: (step, training loss)

    @classmethod
    def of(cls, run: Path) -> Reference:
        model, _ = open_trained(run)
        return cls(weights=model.state_dict(), losses=losses(run))


@dataclass
class Outcome:
    hits: list[list] = field(default_factory=list)  #: [kind, steps taken then, step resumed from]
    wrong: str = ""  #: empty if the results equal the undisturbed run's
    seconds: float = 0
    folder: Path = Path()  #: files of a round that went wrong


def reference(testbed: Testbed, name: str) -> Reference:
    """The undisturbed run, from the same launcher; reused if it has already finished."""
    if testbed.described(name).get("status") != "finished":
        testbed.forget(name)
        _finish(testbed, testbed.submit(name))
    return Reference.of(testbed.run(name))


def play(testbed: Testbed, name: str, events: Sequence[Event], wanted: Reference) -> Outcome:
    """Play a round from the start. Unexpected events are recorded in the outcome, too."""
    start = time.monotonic()
    for _ in range(_ATTEMPTS):
        outcome = Outcome(folder=testbed.folder)
        testbed.cancel_all()  # jobs of a round that went wrong
        testbed.forget(name)
        try:
            _disturb(testbed, name, events, outcome)
            outcome.wrong = _taken_twice(outcome) or difference(testbed.run(name), wanted)
        except TooLate as error:
            outcome.wrong = str(error)
            continue
        except SoakError as error:
            outcome.wrong = str(error)
        break
    if not outcome.wrong:
        shutil.rmtree(testbed.run(name))
    outcome.seconds = time.monotonic() - start
    return outcome


def _disturb(testbed: Testbed, name: str, events: Sequence[Event], outcome: Outcome) -> None:
    job = testbed.submit(name)
    ranks = _started(testbed, job, name, None)
    for event in events:
        _taken(testbed, job, name, event.step)
        _spare(testbed, job)
        taken = _taken(testbed, job, name, event.step)
        job = testbed.strike(event, job, name)
        outcome.hits.append([event.kind, taken, 0])
        ranks = _started(testbed, job, name, ranks)
        outcome.hits[-1][2] = testbed.described(name)["resumed_from_step"]
    _finish(testbed, job)


def _started(testbed: Testbed, job: str, name: str, before: list | None) -> list:
    """Wait for ranks other than `before`; returns their processes."""

    def new() -> list | None:
        ranks = testbed.described(name).get("world", {}).get("processes")
        return ranks if ranks and ranks != before else None

    if found := _seen(testbed, job, new, "has not started to train"):
        return found
    raise SoakError(
        f"job {job} is {testbed.job(job).state} without having trained; {testbed.folder / name}.out says why"
    )


def _taken(testbed: Testbed, job: str, name: str, step: int) -> int:
    """Wait until `step` steps are taken, or the job ends; returns how many were taken."""

    def last() -> int:
        return max((number for number, _ in losses(testbed.run(name))), default=0)

    _seen(testbed, job, lambda: last() >= step, f"has not come to step {step}")
    return last()


def _spare(testbed: Testbed, job: str) -> None:
    """Wait for a checkpoint if the start before saved none: after two such starts in a row a launcher gives up."""
    *before, last, _ = [0, *testbed.saved(job)]
    if before and last <= max(before):
        _seen(testbed, job, lambda: testbed.saved(job)[-1] > max(before), "saves nothing")


def _seen(testbed: Testbed, job: str, look: Callable[[], T], what: str) -> T:
    """Check `look` often, and the job's state rarely because that starts a process; returns the last look."""
    asked = time.monotonic()

    def seen_or_over() -> bool:
        nonlocal asked
        if look():
            return True
        if time.monotonic() - asked < 2:
            return False
        asked = time.monotonic()
        return testbed.job(job).state in ENDED

    until(seen_or_over, f"job {job} {what}")
    return look()


def _finish(testbed: Testbed, job: str) -> None:
    until(lambda: testbed.job(job).state in ENDED, f"job {job} has not ended", every_s=0.5)
    if (state := testbed.job(job).state) != "COMPLETED":
        raise SoakError(f"job {job} ended as {state}")


def _taken_twice(outcome: Outcome) -> str:
    """USR1 asks for a checkpoint, and leaves time for it: no step may be taken twice."""
    lost = [(at, start) for kind, at, start in outcome.hits if kind == "signal" and start < at]
    return "USR1 came at step {}, but the run went on from step {}".format(*lost[0]) if lost else ""


def difference(run: Path, wanted: Reference) -> str:
    """How a run differs from the undisturbed one; empty if it does not."""
    found = Reference.of(run)
    if [step for step, _ in found.losses] != [step for step, _ in wanted.losses]:
        return f"metrics.jsonl has {len(found.losses)} steps, not each of 1 to {len(wanted.losses)} once, in order"
    if odd := [one for one, other in zip(found.losses, wanted.losses, strict=True) if one != other]:
        return f"the loss differs from step {odd[0][0]} on"
    odd = [name for name, tensor in wanted.weights.items() if not torch.equal(tensor, found.weights[name])]
    return f"{len(odd)} of {len(found.weights)} tensors of weights differ, {odd[0]} the first" if odd else ""
