"""`make soak`: jobs are disturbed repeatedly under a private Slurm; is anything lost?

make soak                                         # 20 rounds
make soak ARGS='--seed 0 --first 7 --rounds 1'    # repeat round 7

In each round one run of the shipped launcher is disturbed once in every way, at steps drawn from
the seed, and resumed each time. The exit status is 0 only if all rounds end with the undisturbed
run's weights and losses, bit for bit.
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from aiscale.train.record import read_note
from aiscale.train.sharded_checkpoint import folders
from aiscale.train.trained import weights_of
from rehearsal import why_not
from soak.testbed import KINDS, STEPS, Event, SoakError, Testbed, TooLate, losses

#: On a starved machine the scheduler may act after the run has ended: that round tests nothing, and
#: is repeated.
ATTEMPTS = 3


def plan(*, seed: int, number: int) -> list[Event]:
    """The disturbances of one round: each once, in an order and at steps drawn from the seed."""
    chance = random.Random(f"{seed}/{number}")
    # the job must still be running when the last one comes, which may be some steps late
    last = STEPS - 15
    order = chance.sample(list(KINDS), len(KINDS))
    steps = sorted(chance.sample(range(1, last), len(KINDS)))
    return [
        Event(kind=kind, step=step, rank=chance.randrange(2))
        for kind, step in zip(order, steps, strict=True)
    ]


@dataclass
class Reference:
    weights: dict[str, torch.Tensor]
    losses: list[tuple[int, float]]  #: (step, training loss)

    @classmethod
    def of(cls, run: Path) -> Reference:
        return cls(weights=weights_of(folders(run)[0], read_note(run)), losses=losses(run))


def difference(run: Path, wanted: Reference) -> str:
    """How a run differs from the undisturbed one; empty if it does not."""
    seen = Reference.of(run)
    if [step for step, _ in seen.losses] != [step for step, _ in wanted.losses]:
        return (
            f"metrics.jsonl has {len(seen.losses)} steps, "
            f"not each of {len(wanted.losses)} once, in order"
        )
    if odd := [one for one, other in zip(seen.losses, wanted.losses, strict=True) if one != other]:
        return f"the loss differs from step {odd[0][0]} on"
    odd = [
        name
        for name, tensor in wanted.weights.items()
        if not torch.equal(tensor, seen.weights[name])
    ]
    return (
        f"{len(odd)} of {len(seen.weights)} tensors of weights differ, {odd[0]} the first"
        if odd
        else ""
    )


def play(testbed: Testbed, name: str, events: list[Event], wanted: Reference) -> str:
    """Play a round from the start; returns what is wrong with its result, or too late."""
    for _ in range(ATTEMPTS):
        testbed.forget(name)
        try:
            job = testbed.submit(name)
            ranks = testbed.await_start(job, name, None)
            for event in events:
                at = testbed.await_step(job, name, event.step)
                job = testbed.strike(event, job, name)
                ranks = testbed.await_start(job, name, ranks)
                start = testbed.described(name)["first_step"]
                print(
                    f"{name}: {KINDS[event.kind]} after {at} steps, goes on after {start}",
                    flush=True,
                )
                if event.kind == "signal" and start < at:  # it leaves time for a checkpoint
                    return f"USR1 came after {at} steps, but the run went on after {start}"
            testbed.wait(job, lambda state, _: state == "COMPLETED", "does not end")
            return difference(testbed.run(name), wanted)
        except TooLate as error:
            late = str(error)
        except SoakError as error:
            return str(error)
    return late


def main() -> int:
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--rounds", type=int, default=20, metavar="N", help="runs to disturb (default: 20)"
    )
    parser.add_argument(
        "--first",
        type=int,
        default=1,
        metavar="N",
        help="the number of the first round (default: 1)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="decides what happens when (default: 0)"
    )
    parser.add_argument(
        "--dir",
        default="build/soak",
        metavar="DIR",
        help="for runs and output (default: build/soak)",
    )
    args = parser.parse_args()
    if reason := why_not():
        parser.error(reason)
    with Testbed(Path(args.dir)) as testbed:
        testbed.forget("undisturbed")
        testbed.wait(
            testbed.submit("undisturbed"),
            lambda state, _: state == "COMPLETED",
            "is the undisturbed run",
        )
        wanted, wrong = Reference.of(testbed.run("undisturbed")), 0
        for number in range(args.first, args.first + args.rounds):
            told = play(testbed, f"round-{number}", plan(seed=args.seed, number=number), wanted)
            print(f"round {number}: {told or 'nothing lost'}", flush=True)
            wrong += bool(told)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
