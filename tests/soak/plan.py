"""The plan of a round: each disturbance once, in an order and at steps drawn from a seed.

plan(seed=0, number=7)      # round 7 of seed 0: [Event(kind="down", step=6, rank=0), ...]
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from aiscale.config import ConfigError

STEPS = 60
#: kind -> description
KINDS = {
    "signal": "USR1, as shortly before the time is up",
    "preempt": "another job goes first",
    "down": "the node is set DOWN",
    "kill": "kill -9 of a rank",
}
#: The job must still be running when the last disturbance comes, which may be some steps late.
_LAST = STEPS - 16


class SoakError(ConfigError):
    """Something unexpected happened, or cannot be done; the message is one line."""


class TooLate(SoakError):
    """The run ended before it could be disturbed."""


@dataclass(frozen=True, kw_only=True)
class Event:
    kind: str  #: one of KINDS
    step: int  #: it comes after this many steps
    rank: int  #: the rank that `kill` kills


def plan(*, seed: int, number: int, ranks: int = 2, kinds: Sequence[str] = tuple(KINDS)) -> list[Event]:
    """The disturbances of one round, in order."""
    chance = random.Random(f"{seed}/{number}")
    order = chance.sample(list(kinds), len(kinds))
    steps = sorted(chance.sample(range(1, _LAST + 1), len(kinds)))
    return [Event(kind=kind, step=step, rank=chance.randrange(ranks)) for kind, step in zip(order, steps, strict=True)]
