"""Simulated ranks: a program runs on each of them, and time, memory and messages are counted.

    world = World(4, Costs(forward_s=1), layers=4)
    world.ranks[0].give(...)                 # what the ranks hold at first
    returned = world.run(program)            # program(rank), a function; see `ranks` for what a rank can do
    world.time_s, world.memory_gb, world.sent_gb, world.events, world.messages, world.memory(0)

Programs run in threads, one at a time, until they must wait for another rank. Time does not depend on whose turn it is:
each rank has a clock of its own, and what arrives carries its time.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator

from simulated.machine import Costs, Machine, SimulationError, line_of_program
from simulated.ranks import Rank


class _Stop(BaseException):
    """Ends a rank's thread after another one failed."""


class World(Machine):
    """`size` ranks, what they may do and at what cost, and what they have done."""

    def __init__(self, size: int, costs: Costs, **model: int) -> None:
        super().__init__(size, costs, **model)
        self.stuck: dict[int, tuple[float, str]] = {}  #: after a deadlock: since when a rank waits, and for what
        self.ranks = [Rank(self, index) for index in range(size)]
        self._turns = [threading.Semaphore(0) for _ in range(size)]
        self._back = threading.Semaphore(0)
        self._waiting: dict[int, tuple[Callable[[], bool], str, list[int], str]] = {}
        self._failed: BaseException | None = None

    def run(self, program: Callable, *arguments: object) -> list:
        """Run it on every rank; what it returned on each."""
        returned, left = [None] * self.size, set(range(self.size))

        def body(index: int) -> None:
            self._turns[index].acquire()
            try:
                if not self._failed:
                    returned[index] = program(self.ranks[index], *arguments)
            except BaseException as error:
                self._failed = self._failed or error
            left.discard(index)
            self._back.release()

        for index in range(self.size):
            threading.Thread(target=body, args=(index,), daemon=True).start()
        while left:
            able = [r for r in sorted(left) if self._failed or r not in self._waiting or self._waiting[r][0]()]
            if not able:
                self._failed = SimulationError(self._deadlock(left))
            for index in able:
                self._waiting.pop(index, None)
                self._turns[index].release()
                self._back.acquire()
        if self._failed:
            raise self._failed
        return returned

    def wait(self, index: int, ready: Callable[[], bool], what: str, for_ranks: list[int]) -> None:
        """Let the others go on until `ready`."""
        self._waiting[index] = ready, what, for_ranks, line_of_program()
        self._back.release()
        self._turns[index].acquire()
        if self._failed:
            raise _Stop

    def _deadlock(self, left: set[int]) -> str:
        lines = []
        for index in sorted(left):
            _, what, for_ranks, line = self._waiting[index]
            ended = [str(r) for r in for_ranks if r not in left]
            why = f": the program has ended on rank {', '.join(ended)}" if ended else ""
            since_s = self.ranks[index]._clock_s
            self.stuck[index] = since_s, what
            lines.append(f"rank {index} has waited since {since_s:g} s for {what}{why}{line}")
        return "deadlock: nobody can go on\n  " + "\n  ".join(lines)

    # what was counted

    @property
    def time_s(self) -> float:
        return max([0.0, *(event.end_s for event in self.events), *(m.arrived_s for m in self.messages)])

    @property
    def sent_gb(self) -> float:
        """By the rank that sends most."""
        return max(rank.sent_gb for rank in self.ranks)

    @property
    def memory_gb(self) -> float:
        """The largest peak of all ranks."""
        return max(self.peak_gb(index) for index in range(self.size))

    def peak_gb(self, index: int) -> float:
        return max((sum(held.values()) for _, held in self.memory(index)), default=0.0)

    def memory(self, index: int) -> Iterator[tuple[float, dict[str, float]]]:
        """(time, GB of each kind that the rank holds from then on)."""
        steps = sorted((round(at, 9), gb, v.kind) for v in self.ranks[index]._held for at, gb in v.steps)
        held: dict[str, float] = defaultdict(float)
        for place, (at_s, gb, kind) in enumerate(steps):
            held[kind] += gb
            if place + 1 == len(steps) or steps[place + 1][0] > at_s:
                yield at_s, dict(held)
