"""Waiting for ranks, and what to do when one of them fails, dies, or is told to stop.

One rank that raises usually leaves the others waiting for it in a collective. So after a short grace they are
interrupted; those that answer close their connections, which makes the ones that hang in gloo fail as well; whoever is
left then is beyond help, and the caller kills all.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait

from aiscale.cluster.errors import Failure, own_frames, without_source

TICK_S = 0.05
#: How long the other ranks may take to finish or fail by themselves once one has failed.
GRACE_S = 1.0
#: How long a rank may take to answer a signal, and then the loss of its connections: its first traceback takes long.
SIGNAL_ANSWER_S = 0.5
ANSWER_S = 15.0
#: How long text may take to arrive once every rank has answered: it comes by another way.
OUTPUT_S = 30.0

#: Words in a rank's error that mean that its process group is broken and must not be used again.
_BROKEN_GROUP = ("gloo", "nccl", "connection closed", "process group", "timed out", "distnetwork", "diststore")


class Pending:
    """The answers of some ranks to one request."""

    def __init__(self, children: Mapping[int, Future]) -> None:
        self._children = dict(children)

    def ranks(self) -> list[int]:
        """Ranks that have not answered yet."""
        return [rank for rank, child in self._children.items() if not child.done()]

    def failures(self) -> list[Failure]:
        """What ranks have raised so far, in rank order."""
        done = ((rank, child.result()) for rank, child in self._children.items() if child.done())
        return [failure for rank, result in done if (failure := _failure(rank, result))]

    def results(self) -> list:
        return [child.result() for child in self._children.values()]

    def wait(self, timeout_s: float | None, on_tick: Callable[[], None], *, until_failure: bool = False) -> bool:
        """Wait until all have answered, or one has failed; False when the time is over. `on_tick` may raise."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while waiting := [child for child in self._children.values() if not child.done()]:
            wait(waiting, timeout=TICK_S, return_when=FIRST_COMPLETED)
            on_tick()
            if until_failure and self.failures():
                return True
            if deadline is not None and time.monotonic() > deadline:
                return not self.ranks()
        on_tick()
        return True

    def interrupt(self, send: Callable[[list[int], int], None], free_others: Callable[[list[int]], None]) -> list[int]:
        """Make everybody answer; the ranks that do not. `send` signals ranks, `free_others` makes ranks leave."""
        send(self.ranks(), signal.SIGINT)
        if not self.wait(SIGNAL_ANSWER_S, _nothing):
            free_others(self.ranks())
            self.wait(ANSWER_S, _nothing)
        return self.ranks()

    def await_output(self, is_in_vain: Callable[[], bool]) -> None:
        """Wait until all that the ranks have printed and drawn is here."""
        outputs = [child.output for child in self._children.values()]
        deadline = time.monotonic() + OUTPUT_S
        while not is_in_vain() and wait(outputs, timeout=TICK_S).not_done and time.monotonic() < deadline:
            pass


def breaks_group(failures: list[Failure]) -> bool:
    """Whether errors say that the process group itself is damaged."""
    return any(word in f"{f.name} {f.message}".lower() for f in failures for word in _BROKEN_GROUP)


def _nothing() -> None:
    pass


def _failure(rank: int, result: object) -> Failure | None:
    from ipyparallel import error

    if isinstance(result, error.RemoteError):
        return Failure(rank, result.ename, without_source(result.evalue), own_frames(result.traceback or ""))
    if isinstance(result, error.KernelError):  # aborted, or its engine is gone
        return Failure(rank, type(result).__name__, str(result), "")
    return None
