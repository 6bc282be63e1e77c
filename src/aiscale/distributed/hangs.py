"""The watchdog: if a collective does not finish, it names the missing rank, says where all ranks are, and ends the job.

gloo and NCCL cannot say which rank is missing. So a thread of every rank writes what the rank has begun
(`Traffic.progress`) and where it is into the rendezvous store; one that was stopped falls silent. After the timeout
`find` looks for the cause, and the lowest waiting rank prints it and ends the job. For what the network or the store
loses, and for messages between two ranks over NCCL, the backend's own timeout remains.
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from aiscale import processes
from aiscale.distributed.connect import World
from aiscale.distributed.counter import ANY_SOURCE, members, message
from aiscale.distributed.failing import end_now
from aiscale.launch import HANG_STATUS, LOST_STATUS

_SILENT_S = 12.0  #: a rank is not taken for dead before it has been silent this long
_OVER = "over"  #: key in the store: a rank has reported
_NAMED = 8  #: ranks that are named
#: all ranks must give the same number of bytes to these
_ALIKE = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
_TORCH = str(Path(torch.__file__).parent)
_watches = itertools.count()  #: of this process; the same on all ranks


@dataclass(frozen=True)
class RankState:
    step: int = 0
    where: str = ""  #: the main thread's calls outside torch, the innermost first
    left: bool = False  #: it has finished training
    begun: dict[str, list] = field(default_factory=dict)  #: Progress.table()
    busy: bool = False  #: it has just begun something, and `begun` is empty
    age_s: float = 0.0  #: since it was first read

    def __str__(self) -> str:
        return "trains no more" if self.left else f"is in step {self.step}" + f" at {self.where}" * bool(self.where)


class Hang(NamedTuple):
    """A collective that does not finish."""

    waiting: list[int]  #: ranks that have begun it
    missing: list[int]  #: ranks that have not, or do not answer
    text: str  #: one line


def find(states: dict[int, RankState], timeout_s: float) -> Hang | None:
    """The hang that causes the others, or None.

    Ranks begin the same collectives of a group in the same order. So a rank that has begun fewer than another, or
    another one, for longer than the timeout, is missing; if several are, blame the one that is not itself waiting."""
    silent = {rank for rank, of in states.items() if not of.left and of.age_s > max(timeout_s / 2, _SILENT_S)}
    late_s = 3 * _beat_s(timeout_s)
    if any(of.busy or (of.age_s > late_s and not of.left) for rank, of in states.items() if rank not in silent):
        return None
    groups = sorted({group for of in states.values() for group in of.begun})
    pending = [each for group in groups if (each := _pending(group, states, silent, timeout_s / 2))]
    if all(entry[3] < timeout_s for _, entry, *_ in pending):
        return None
    behind = {rank for *_, ranks in pending for rank in ranks}
    missing = silent or behind - {rank for *_, ranks, _ in pending for rank in ranks} or behind
    group, entry, waiting, behind = max(pending, key=lambda each: len(missing.intersection(each[3])))
    missing = sorted(missing.intersection(behind))
    if silent:
        why = f"no longer answer{'s' * (len(missing) == 1)}: stopped, out of memory, or the node is gone"
    else:
        last = states[missing[0]].begun.get(group)
        its_last = f", its last one there was number {last[0]}, {last[1]}" if last else ""
        why = f"did not come to it; rank {missing[0]} {states[missing[0]]}{its_last}"
    return Hang(waiting, missing, f"{_what(entry, group, timeout_s)}: {_ranks(missing)} {why}")


def _pending(group: str, states: dict[int, RankState], silent: set[int], longer_than_s: float) -> tuple | None:
    """(group, entry, ranks that have begun it, those that have not) of a group's latest collective, if it is late."""
    ranks, is_message = [rank for rank in members(group) if rank in states], ">" in group
    if is_message and any(message(ANY_SOURCE, rank) in states[rank].begun for rank in ranks):
        return None  # a receive from any source does not say from which rank
    begun = {rank: states[rank].begun[group] for rank in ranks if group in states[rank].begun and rank not in silent}
    kind = lambda e: (e[0],) if is_message else (e[0], e[1], e[2] * (e[1] in _ALIKE))  # noqa: E731
    # Of those that have begun the latest one, the majority is assumed to be right.
    latest = [kind(entry) for entry in begun.values() if entry[0] == max(each[0] for each in begun.values())]
    waiting = [rank for rank in begun if kind(begun[rank]) == Counter(latest).most_common(1)[0][0]]
    entry = max((begun[rank] for rank in waiting), key=lambda entry: entry[3], default=None)
    # A rank that holds up another may itself have begun to wait a little later: half the timeout counts.
    if entry is None or len(waiting) == len(ranks) or entry[3] < longer_than_s:
        return None
    return group, entry, waiting, [rank for rank in ranks if rank not in waiting]


def _beat_s(timeout_s: float) -> float:
    return min(timeout_s / 8, 5.0)


def _what(entry: list, group: str, timeout_s: float) -> str:
    number, op, nbytes, _, step = entry
    source, message_to, target = group.partition(">")
    where = f"from rank {source} to rank {target}" if message_to else f"in group {group}"
    what = f"{op} of {nbytes:,} bytes" if nbytes else op
    return f"{what} {where}, number {number}, begun in step {step}, was not finished within {timeout_s:g} s"


def _ranks(ranks: list[int]) -> str:
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:_NAMED]))}{more}"


@contextmanager
def watching(world: World, timeout_s: float, tell: Callable[[str], None] = lambda line: None) -> Iterator[None]:
    """End the job when a collective takes longer than `timeout_s`; 0: never. The rank that reports calls `tell`."""
    if world.size == 1 or not timeout_s:
        yield
        return
    watch = _Watch(world, timeout_s, tell)
    try:
        yield
    finally:
        watch.over.set()  # this rank has finished; the others go on watching


class _Watch:
    def __init__(self, world: World, timeout_s: float, tell: Callable[[str], None]) -> None:
        self.world, self.timeout_s, self.tell = world, timeout_s, tell
        self.beat_s = _beat_s(timeout_s)
        self.progress = world.traffic.progress
        self.states: dict[int, tuple[int, float, RankState]] = {}  #: by rank: (beat, when read, state)
        self.over, self._beat = threading.Event(), 0
        # A separate connection: on torch's, another thread may be waiting for a key.
        store = world.store.clone()
        store.set_timeout(datetime.timedelta(seconds=max(timeout_s, 10.0)))
        self._store = dist.PrefixStore(f"aiscale/watch{next(_watches)}", store)
        self._write()
        world.barrier()  # now every rank has written once
        threading.Thread(target=self._watch, name="aiscale watch", daemon=True).start()

    def _watch(self) -> None:
        with suppress(RuntimeError):  # the store ends with the job
            while not self.over.wait(self.beat_s):
                self._write()
                if self._idle_s() >= self.timeout_s / 2:
                    self._read_and_judge()
            self._write()

    def _idle_s(self) -> float:
        return time.monotonic() - self.progress.latest_s

    def _write(self) -> None:
        self._beat += 1
        # While steps go on nobody reads the table, and reading NCCL's recorder takes a tenth of a second.
        busy = self.progress.pull is not None and self._idle_s() < self.beat_s
        begun = {} if busy else self.progress.table()
        state = {"step": self.progress.step, "where": _where(), "left": self.over.is_set(), "begun": begun}
        self._store.set(str(self.world.rank), json.dumps([self._beat, {**state, "busy": busy}]))

    def _read_and_judge(self) -> None:
        if self._store.check([_OVER]):
            self._end_unheard()
        notes = self._store.multi_get([str(rank) for rank in range(self.world.size)])
        now = time.monotonic()
        for rank, (beat, state) in enumerate(map(json.loads, notes)):
            if rank not in self.states or self.states[rank][0] != beat:
                self.states[rank] = (beat, now, RankState(**state))
        aged = {rank: replace(of, age_s=now - at) for rank, (_, at, of) in self.states.items()}
        late_s = self._idle_s() - self.timeout_s
        hang = find(aged, self.timeout_s) if late_s >= 0 else None
        # The lowest of the waiting ranks reports. If that does not end the job, the next one does.
        if hang and self.world.rank in hang.waiting:
            if late_s >= hang.waiting.index(self.world.rank) * max(2 * self.beat_s, 2.0):
                self._end(hang)

    def _end(self, hang: Hang) -> None:
        remedy = "if a rank may take that long between two collectives, raise loop.hang_timeout_s above"
        line = f"{hang.text}; the job ends here; {remedy} {self.timeout_s:g}"
        shown = sorted({*hang.missing[:_NAMED], *range(min(_NAMED, self.world.size))})
        lines = [line, *(f"rank {rank} {self.states[rank][2]}" for rank in shown)]
        print("\n".join(f"aiscale: {line}" for line in lines), file=sys.stderr, flush=True)
        self._store.set(_OVER, "1")  # ranks that only lose their connection to this one have nothing to add
        # In a thread: if the job hangs in a file system, this write hangs too.
        threading.Thread(target=self.tell, args=(line,), daemon=True).start()
        time.sleep(4 * self.beat_s)
        end_now(HANG_STATUS)

    def _end_unheard(self) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stderr__.fileno())
        # The launcher should first see how the reporting rank ended; then it ends this one, too.
        time.sleep(8 * self.beat_s + 15)
        end_now(LOST_STATUS)


def _where() -> str:
    """The main thread's calls outside torch, the innermost first."""
    calls = traceback.extract_stack(sys._current_frames().get(threading.main_thread().ident))
    start = max((i for i, call in enumerate(calls) if call.filename == processes.__file__), default=-1)
    own = [call for call in reversed(calls[start + 1 :]) if not call.filename.startswith((_TORCH, "<"))]
    return ", called by ".join(f"{Path(call.filename).name}:{call.lineno} in {call.name}" for call in own[:4])
