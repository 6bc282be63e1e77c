"""What this rank has begun: for every group the number, the name and the size of its latest collective.

    progress.step = 12                        # of training, set by the loop
    progress.begin("all_reduce", "dp 0-6/2", 4096)
    progress.table()                          # {"dp 0-6/2": [number, "all_reduce", 4096, seconds ago, step]}

`wire` fills it, `watch` shows it to the other ranks and compares. What NCCL has begun is in its flight recorder; `pull`
brings it in when the table is asked for. A message counts as a collective of two ranks, its
sender and its receiver ("3>5"): whoever is ahead there waits for the other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

ANY_SOURCE = "*"


class Progress:
    """Filled from any thread."""

    def __init__(self) -> None:
        self.latest_s = time.monotonic()  #: when anything was begun
        #: () -> {group: (number, op, bytes, seconds ago)} of what is noted elsewhere
        self.pull: Callable[[], dict[str, tuple[int, str, int, float]]] | None = None
        self._step = 0
        self._begun: dict[str, tuple[int, str, int, float, int]] = {}
        self._lock = threading.Lock()

    @property
    def step(self) -> int:
        """The optimizer step that is being taken; 0 before training."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step, self.latest_s = step, time.monotonic()

    def begin(self, op: str, group: str, nbytes: int) -> None:
        """Note a collective as it is begun. group: the same text on all its ranks, made by `label` or `message`."""
        now = time.monotonic()
        with self._lock:
            number = self._begun[group][0] if group in self._begun else 0
            self._begun[group] = (number + 1, op, nbytes, now, self._step)
            self.latest_s = now

    def table(self, since_s: float = 0.0) -> dict[str, list]:
        """{group: [number, op, bytes, seconds ago, step]}; time before `since_s` does not count."""
        now = time.monotonic()
        with self._lock:
            begun = dict(self._begun)
        for group, (number, op, nbytes, age_s) in (self.pull() if self.pull else {}).items():
            begun[group] = (number, op, nbytes, now - age_s, self._step)
            self.latest_s = max(self.latest_s, now - age_s)
        return {group: [*what, now - max(at, since_s), step] for group, (*what, at, step) in begun.items()}


def label(name: str, ranks: Sequence[int]) -> str:
    """A group as short text; `members` reads it. ("dp", (0, 2, 4, 6)) -> "dp 0-6/2"."""
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if len(ranks) > 2 and stride > 0 and list(ranks) == list(range(ranks[0], ranks[-1] + 1, stride)):
        return f"{name} {ranks[0]}-{ranks[-1]}" + (f"/{stride}" if stride > 1 else "")
    return f"{name} {','.join(map(str, ranks))}"


def message(source: int | str, target: int) -> str:
    """The label of messages from one rank (or ANY_SOURCE) to another."""
    return f"{source}>{target}"


def members(group: str) -> list[int]:
    """The ranks that a label names."""
    if ">" in group:
        return [int(rank) for rank in group.split(">") if rank != ANY_SOURCE]
    ranks = group.rpartition(" ")[2]
    first, dash, last = ranks.partition("-")
    if not dash:
        return [int(rank) for rank in ranks.split(",")]
    last, _, stride = last.partition("/")
    return list(range(int(first), int(last) + 1, int(stride or 1)))
