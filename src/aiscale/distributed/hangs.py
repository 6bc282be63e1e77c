"""The watchdog: if a collective does not finish, it names the rank that did not arrive and ends the job.

    with watching(world, timeout_s=240, tell=records.note):       # all ranks enter it; 0: no watchdog
        train()

gloo and NCCL wait for a missing rank until their own timeout and then cannot say which one it is. Here a thread of
every rank writes what the rank has begun (`Traffic.progress`) into the rendezvous store every few seconds: a rank that
sleeps, computes or is stuck in a file system still reports where it is, one that was stopped falls silent. A rank that
has begun nothing new for half the timeout reads the others' states; after the whole timeout `find` looks for the cause,
and the lowest waiting rank prints one line and ends the job. If all ranks arrived and the network loses their messages,
only the backend's own timeout helps; the same goes for messages between two ranks under NCCL.

Time in which this process itself was stopped (Ctrl-Z, a suspended job) does not count. While some rank is late with its
state but not yet silent, no rank is blamed: a busy machine may delay any process by some seconds.
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist

from aiscale.distributed.connect import World
from aiscale.distributed.counter import ANY_SOURCE, members, message
from aiscale.distributed.failing import HANG_STATUS, LOST_STATUS, end_now

_LONGEST_BEAT_S = 5.0  #: between two states that a rank writes
_SILENT_S = 12.0  #: a rank is not taken for dead before it has been silent this long
_HEARD_S = 15.0  #: time for the other ranks to see that one has reported, before the next one reports
#: keys in the store: a rank has reported; how many ranks wanted to; how many have seen the report
_OVER, _SPEAKS, _HEARD = "over", "speaks", "heard"
_NAMED = 8  #: ranks that one line names
#: all ranks must give the same number of bytes to these
_ALIKE = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
_TORCH = str(Path(torch.__file__).parent)
Tell = Callable[[str, list[str]], None]

_watches = itertools.count()  #: of this process; the same on all ranks


# Finding the cause from the states of all ranks --------------------------------------------------------------------


@dataclass(frozen=True)
class RankState:
    step: int = 0
    where: str = ""  #: the main thread's file:line in function
    left: bool = False  #: it has finished training
    begun: dict[str, list] = field(default_factory=dict)  #: Progress.table()
    busy: bool = False  #: it has just begun something, and `begun` is empty
    age_s: float = 0.0  #: since it was first read
    is_news: bool = True  #: an earlier state was read before, so age_s is known

    def number(self, group: str) -> int:
        return self.begun[group][0] if group in self.begun else 0

    @property
    def idle_s(self) -> float:
        return min((age for *_, age, _ in self.begun.values()), default=float("inf"))


@dataclass(frozen=True)
class Hang:
    """A collective that does not finish."""

    waiting: list[int]  #: ranks that have begun it
    missing: list[int]  #: ranks that have not, or do not answer
    text: str  #: one line
    deaf: int = 0  #: how many ranks no longer read the store


@dataclass(frozen=True)
class _Pending:
    group: str
    entry: list  #: of a waiting rank, as in Progress.table()
    waiting: list[int]
    behind: list[int]

    def not_finished(self, timeout_s: float) -> str:
        number, op, nbytes, _, step = self.entry
        what = f"{op} of {nbytes:,} bytes" if nbytes else op
        source, message_to, target = self.group.partition(">")
        where = f"from rank {source} to rank {target}" if message_to else f"in group {self.group}"
        return f"{what} {where}, number {number}, begun in step {step}, was not finished within {timeout_s:g} s"


def find(
    states: dict[int, RankState], *, timeout_s: float, beat_s: float = 1.0, patience_s: float = _SILENT_S
) -> Hang | None:
    """The hang that causes the others, or None.

    Ranks begin the same collectives of a group in the same order. So a rank that has begun fewer than another, for
    longer than the timeout, is missing; if several are, blame the one that is not itself waiting. Ranks write every
    `beat_s`; one that has written nothing for `patience_s` no longer answers.
    """
    silent = {rank for rank, state in states.items() if state.age_s > patience_s and not state.left}
    for rank, state in states.items():
        held_up = not state.left and (state.age_s > 3 * beat_s or not state.is_news)
        if rank not in silent and (held_up or state.busy):
            return None
    deaf = len(silent) + sum(state.left for state in states.values())
    hang = _of_silent(states, silent, timeout_s) if silent else _of_missing(states, timeout_s)
    return hang and replace(hang, deaf=deaf)


def _of_missing(states: dict[int, RankState], timeout_s: float) -> Hang | None:
    groups = sorted({group for state in states.values() for group in state.begun})
    # A rank that holds up another may itself have begun to wait a little later: once one is due, count both.
    pending = [found for group in groups if (found := _pending(group, states, timeout_s / 2))]
    if all(each.entry[3] < timeout_s for each in pending):
        return next(filter(None, (_mismatch(group, states, timeout_s) for group in groups)), None)
    waits = {rank for each in pending for rank in each.waiting}
    behind = {rank for each in pending for rank in each.behind}
    # If they all wait for each other, blame the one that stopped first.
    missing = behind - waits or {max(behind, key=lambda rank: (states[rank].left, states[rank].idle_s))}
    worst = max(pending, key=lambda each: len(missing.intersection(each.behind)))
    missing = sorted(missing.intersection(worst.behind))
    text = f"{worst.not_finished(timeout_s)}: {_absent(missing, worst.group, states)}"
    return Hang(worst.waiting, missing, text)


def _pending(group: str, states: dict[int, RankState], longer_than_s: float) -> _Pending | None:
    ranks = [rank for rank in members(group) if rank in states]
    if ">" in group and any(message(ANY_SOURCE, rank) in states[rank].begun for rank in ranks):
        return None  # a receive from any source does not say from which rank
    first = max(states[rank].number(group) for rank in ranks)
    waiting = [rank for rank in ranks if states[rank].number(group) == first]
    behind = [rank for rank in ranks if states[rank].number(group) < first]
    entry = max((states[rank].begun[group] for rank in waiting), key=lambda entry: entry[3])
    if not behind or entry[3] < longer_than_s:
        return None
    return _Pending(group, entry, waiting, behind)


def _mismatch(group: str, states: dict[int, RankState], timeout_s: float) -> Hang | None:
    """All ranks have begun the same number of collectives, but not the same ones."""
    ranks = [rank for rank in members(group) if rank in states and group in states[rank].begun]
    entries = {rank: states[rank].begun[group] for rank in ranks}
    if ">" in group or any(entry[3] < timeout_s for entry in entries.values()):
        return None
    kinds: dict[str, list[int]] = {}
    for rank, (_, op, nbytes, *_) in entries.items():
        kinds.setdefault(f"{op} of {nbytes:,} bytes" if op in _ALIKE else op, []).append(rank)
    if len(kinds) < 2:
        return None
    # The majority is assumed to be right.
    (usual, right), *others = sorted(kinds.items(), key=lambda kind: (-len(kind[1]), kind[1]))
    number, *_, step = entries[right[0]]
    text = (
        f"{usual} in group {group}, number {number}, begun in step {step}, was not finished within {timeout_s:g} s: "
        + "; ".join(f"{_ranks(wrong)} began {what} instead" for what, wrong in others)
        + ": it skipped a collective or made one more than the others"
    )
    return Hang(right, sorted(rank for _, wrong in others for rank in wrong), text)


def _of_silent(states: dict[int, RankState], silent: set[int], timeout_s: float) -> Hang:
    missing, waiting = sorted(silent), sorted(set(states) - silent)
    why = f"{_ranks(missing)} no longer answer{'s' * (len(missing) == 1)}: stopped, out of memory, or the node is gone"
    # It may have begun the collective before it fell silent, so the counts may agree.
    ops = [(entry, group) for rank in waiting for group, entry in states[rank].begun.items()]
    ops = [(entry, group) for entry, group in ops if silent.intersection(members(group)) and entry[3] >= timeout_s / 2]
    if not ops:
        return Hang(waiting, missing, f"nothing was begun for {timeout_s:g} s: {why}")
    entry, group = min(ops, key=lambda op: op[0][3])
    return Hang(waiting, missing, f"{_Pending(group, entry, waiting, missing).not_finished(timeout_s)}: {why}")


def _absent(missing: list[int], group: str, states: dict[int, RankState]) -> str:
    one = states[missing[0]]
    doing = "trains no more" if one.left else f"is in step {one.step}" + (f" at {one.where}" if one.where else "")
    last = one.begun.get(group)
    came = f", its last one there was number {last[0]}, {last[1]}" if last else ""
    who = "it" if len(missing) == 1 else f"rank {missing[0]}"
    return f"{_ranks(missing)} did not come to it; {who} {doing}{came}"


def _ranks(ranks: list[int]) -> str:
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:_NAMED]))}{more}"


# The watchdog --------------------------------------------------------------------------------------------------------


@contextmanager
def watching(world: World, timeout_s: float, tell: Tell | None = None) -> Iterator[None]:
    """End the job when a collective takes longer than `timeout_s`; 0: never. The rank that reports calls `tell` with
    the line and the hosts of the missing ranks, and gives it some seconds. All ranks enter together."""
    if world.size == 1 or not timeout_s:
        yield
        return
    watch = _Watch(world, timeout_s, tell or (lambda line, hosts: None))
    try:
        yield
    finally:
        watch.over.set()  # this rank has finished; the others go on watching


class _Watch:
    def __init__(self, world: World, timeout_s: float, tell: Tell) -> None:
        self.world, self.timeout_s, self.tell = world, timeout_s, tell
        self.beat_s = min(timeout_s / 8, _LONGEST_BEAT_S)
        self.patience_s = max(timeout_s / 2 - self.beat_s, _SILENT_S)  #: for the store, and for a rank
        self.progress = world.traffic.progress
        self.awake_since_s = time.monotonic()  #: earlier time does not count
        self.heard_s = self.awake_since_s  #: when the store last answered
        self.states: dict[int, tuple[int, float, RankState]] = {}  #: by rank: (beat, when read, state)
        self.speaks, self.next_s = False, 0.0  #: this rank reports; not before, since another one does
        self.over, self._beat = threading.Event(), 0
        # A separate connection: on torch's, another thread may be waiting for a key.
        store = world.store.clone()
        store.set_timeout(datetime.timedelta(seconds=max(timeout_s, 10.0)))
        self._store = dist.PrefixStore(f"aiscale/watch{next(_watches)}", store)
        self._write()
        world.barrier()  # now every rank has written once
        # Two threads: if the store does not answer, one of them must not wait for it.
        for work in (self._exchange, self._judge):
            threading.Thread(target=work, name="aiscale watch", daemon=True).start()

    def _exchange(self) -> None:
        with suppress(RuntimeError):  # the store ends with the job; _judge handles one that does not answer
            while not self.over.wait(self.beat_s):
                self._write()
                if self._idle_s() >= self.timeout_s / 2:
                    self._read()
                    if self._store.check([_OVER]) and not self.speaks:
                        self._end_unheard()
                self.heard_s = time.monotonic()
            self._write()

    def _judge(self) -> None:
        before_s = time.monotonic()
        while not self.over.wait(self.beat_s):
            now = time.monotonic()
            if now - before_s > self.beat_s + self.timeout_s / 4:
                self.awake_since_s = now
            before_s = now
            if self._idle_s() >= self.timeout_s and (hang := self._find()) and self._is_my_turn(hang):
                self._end(hang)

    def _idle_s(self) -> float:
        return time.monotonic() - max(self.progress.latest_s, self.awake_since_s)

    def _write(self) -> None:
        self._beat += 1
        # While steps go on nobody reads the table, and reading NCCL's recorder takes a tenth of a second.
        busy = self.progress.pull is not None and self._idle_s() < self.beat_s
        begun = {} if busy else self.progress.table(self.awake_since_s)
        state = {"step": self.progress.step, "where": _where(), "left": self.over.is_set(), "begun": begun}
        self._store.set(str(self.world.rank), json.dumps([self._beat, {**state, "busy": busy}]))

    def _read(self) -> None:
        notes = self._store.multi_get([str(rank) for rank in range(self.world.size)])
        now = time.monotonic()
        for rank, (beat, state) in enumerate(map(json.loads, notes)):
            before = self.states.get(rank)
            if before is None or before[0] != beat:
                self.states[rank] = (beat, now, RankState(**state, is_news=before is not None))

    def _find(self) -> Hang | None:
        now = time.monotonic()
        if not self._store_answers():
            return self._of_store()
        if len(self.states) < self.world.size:
            return None
        seen = dict(self.states)
        aged = {r: replace(of, age_s=now - max(at, self.awake_since_s)) for r, (_, at, of) in seen.items()}
        return find(aged, timeout_s=self.timeout_s, beat_s=self.beat_s, patience_s=self.patience_s)

    def _of_store(self) -> Hang:
        in_rank_0 = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        whose = "rank 0, where it is kept" if in_rank_0 else "the launcher, which keeps it"
        where = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
        text = (
            f"nothing was begun for {self.timeout_s:g} s and the store at {where} does not answer: {whose}, is "
            "stopped, or its node is gone"
        )
        first = 1 if in_rank_0 else 0
        return Hang(list(range(first, self.world.size)), [0] * in_rank_0, text)

    def _store_answers(self) -> bool:
        return time.monotonic() - max(self.heard_s, self.awake_since_s) <= self.patience_s

    def _is_my_turn(self, hang: Hang) -> bool:
        """One of the waiting ranks reports, the lowest if it can. If that does not end the job, the next one does."""
        if self.world.rank not in hang.waiting:
            return False
        place = hang.waiting.index(self.world.rank)
        if self._idle_s() < self.timeout_s + min(place, 3) * 2 * self.beat_s or time.monotonic() < self.next_s:
            return False
        if self.next_s or self._is_first():
            return True
        self.next_s = time.monotonic() + (place + 1) * (_HEARD_S + 5.0)
        return False

    def _is_first(self) -> bool:
        try:
            return not self._store_answers() or self._store.add(_SPEAKS, 1) == 1
        except RuntimeError:  # the store has just ended
            return True

    def _end(self, hang: Hang) -> None:
        line = (
            f"{hang.text}; the job ends here; if a rank may take that long between two collectives, raise "
            f"loop.hang_timeout_s above {self.timeout_s:g}"
        )
        self.speaks = True
        print(f"aiscale: {line}", file=sys.stderr, flush=True)
        # In a thread: if the job hangs in a file system, this write hangs too.
        note = threading.Thread(target=self._tell, args=(line, hang.missing), daemon=True)
        note.start()
        # Ranks that only lose their connection to this one have nothing to add: tell them before it is cut.
        known = threading.Thread(target=self._make_known, args=(hang.deaf,), daemon=True)
        known.start()
        known.join(_HEARD_S if self._store_answers() else 0)
        note.join(3 * self.beat_s)
        end_now(HANG_STATUS)

    def _make_known(self, deaf: int) -> None:
        """Returns when all ranks that still read the store know that no other rank needs to report."""
        with suppress(RuntimeError):
            self._store.set(_OVER, "1")
            while self._store.add(_HEARD, 0) < self.world.size - 1 - deaf:
                time.sleep(0.05)

    def _tell(self, line: str, missing: list[int]) -> None:
        hosts = {host for rank, (host, _) in enumerate(self.world.processes) if rank in missing}
        with suppress(Exception):  # such as a full disk
            self.tell(line, sorted(hosts))

    def _end_unheard(self) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stderr__.fileno())
        self._store.add(_HEARD, 1)
        # The launcher should first see how the reporting rank ended; then it ends this one, too.
        time.sleep(_HEARD_S + 3 * self.beat_s + 5)
        end_now(LOST_STATUS)


def _where() -> str:
    """The main thread's position, outside torch."""
    frame = sys._current_frames().get(threading.main_thread().ident)
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, "<")):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}" if frame else ""
