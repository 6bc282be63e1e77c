"""A watchdog: a collective that does not come to its end ends the job, with the rank that did not arrive.

    with watching(world, timeout_s=240, tell=records.note):       # all ranks enter it; 0: no watch
        train()

gloo and NCCL wait for a missing rank until their own timeout and then know only that somebody is missing. Here every
rank writes into the rendezvous store, every few seconds, what it has begun (`progress`), from a thread of its own: one
that sleeps, computes or is stuck in a file system tells where it is, one that was stopped falls silent. A rank that has
begun nothing new for half the timeout reads what the others wrote; after all of it `hang.find` judges, and the lowest
rank that waits prints one line and ends the job. Where all have arrived and the network loses what they send, the
backend's own timeout has the last word, and so it has for messages between two ranks under NCCL.

The time in which this process itself was stopped (Ctrl-Z, a suspended job) does not count. And while a rank has neither
spoken lately nor been silent for long, nobody is judged: a busy machine may hold up any process for some seconds.
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
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from aiscale.distributed.connect import World
from aiscale.distributed.failing import HANG_STATUS, LOST_STATUS, end_now
from aiscale.distributed.hang import Hang, Told, find

_LONGEST_BEAT_S = 5.0
_SILENT_S = 12.0  #: whoever is taken for dead has said nothing for at least as long
_HEARD_S = 15.0  #: for the others to hear that a rank has spoken, and for the next one to speak where that did not help
#: keys in the store: a rank has spoken; how many wanted to; how many have heard it
_OVER, _SPEAKS, _HEARD = "over", "speaks", "heard"
_watches = itertools.count()  #: of this process; ranks begin them together


@contextmanager
def watching(world: World, timeout_s: float, tell: Callable[[str], None] | None = None) -> Iterator[None]:
    """End the job when a collective lasts longer than `timeout_s`; 0: never. `tell` is called with the line on the rank
    that prints it, and given some seconds. All ranks enter it together."""
    if world.size == 1 or not timeout_s:
        yield
        return
    watch = _Watch(world, timeout_s, tell or (lambda line: None))
    try:
        yield
    finally:
        watch.stop()


@dataclass(frozen=True)
class _News:
    """The latest that a rank wrote."""

    beat: int
    since_s: float  #: when it was first seen
    moved: bool  #: an earlier beat was seen as well, so that it is known when this one came
    told: Told


class _Watch:
    def __init__(self, world: World, timeout_s: float, tell: Callable[[str], None]) -> None:
        self.world, self.timeout_s, self.tell = world, timeout_s, tell
        self.beat_s = min(timeout_s / 8, _LONGEST_BEAT_S)
        self.patience_s = max(timeout_s / 2 - self.beat_s, _SILENT_S)  #: with the store, and with a rank
        self.progress = world.traffic.progress
        self.awake_since_s = time.monotonic()  #: time before does not count: the process was stopped
        self.heard_s = time.monotonic()  #: when the store last answered
        self.news: dict[int, _News] = {}  #: by rank
        self.silent: set[int] = set()  #: ranks, as of the last judgement
        self.speaks, self.next_s = False, 0.0  #: this rank; not before, since another one does
        self._over, self._beat = threading.Event(), 0
        # A connection of its own: torch's may be held by somebody who waits for a key.
        store = dist.distributed_c10d._get_default_store().clone()
        store.set_timeout(datetime.timedelta(seconds=max(timeout_s, 10.0)))
        self._store = dist.PrefixStore(f"aiscale/watch{next(_watches)}", store)
        self._write()
        world.barrier()  # now each has written
        for work in (self._talk, self._judge):
            threading.Thread(target=work, name="aiscale watch", daemon=True).start()

    def stop(self) -> None:
        """Say that this rank trains no more; the others go on watching."""
        self._over.set()

    # Two threads: where the store does not answer, one of them must not wait for it ---------------------------------

    def _talk(self) -> None:
        with suppress(RuntimeError):  # the store ends with the job, and a silent one is for the other thread
            while not self._over.wait(self.beat_s):
                self._write()
                if self._idle_s() >= self.timeout_s / 2:
                    self._read()
                    if self._store.check([_OVER]) and not self.speaks:
                        self._end_unheard()
                self.heard_s = time.monotonic()
            self._write()

    def _judge(self) -> None:
        before_s = time.monotonic()
        while not self._over.wait(self.beat_s):
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
        # While steps follow each other nobody asks, and NCCL's recorder takes a tenth of a second to read.
        busy = self.progress.pull is not None and self._idle_s() < self.beat_s
        begun = None if busy else self.progress.table(self.awake_since_s)
        note = [self._beat, self.progress.step, _where(), self._over.is_set(), begun]
        self._store.set(str(self.world.rank), json.dumps(note))

    def _read(self) -> None:
        notes = self._store.multi_get([str(rank) for rank in range(self.world.size)])
        now = time.monotonic()
        for rank, note in enumerate(map(json.loads, notes)):
            beat, step, where, left, begun = note
            before = self.news.get(rank)
            if before is None or before.beat != beat:
                told = Told(step, where, left, begun or {}, busy=begun is None)
                self.news[rank] = _News(beat, now, before is not None, told)

    def _find(self) -> Hang | None:
        now, news = time.monotonic(), dict(self.news)
        if not self._store_answers():
            return self._of_store()
        if len(news) < self.world.size:
            return None
        ages_s = {r: now - max(of.since_s, self.awake_since_s) for r, of in news.items() if not of.told.left}
        self.silent = {rank for rank, age_s in ages_s.items() if age_s > self.patience_s}
        if any(age_s > 3 * self.beat_s or not news[r].moved for r, age_s in ages_s.items() if r not in self.silent):
            return None
        return find({rank: of.told for rank, of in news.items()}, silent=self.silent, timeout_s=self.timeout_s)

    def _of_store(self) -> Hang:
        in_rank_0 = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        keeper = "rank 0, where it is kept" if in_rank_0 else "the launcher, which keeps it"
        where = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
        text = (
            f"nothing was begun for {self.timeout_s:g} s and the store at {where} does not answer: {keeper}, is "
            "stopped, or its node is gone"
        )
        first = 1 if in_rank_0 else 0
        return Hang(list(range(first, self.world.size)), [0] * in_rank_0, text)

    def _is_my_turn(self, hang: Hang) -> bool:
        """One of the ranks that wait speaks, the lowest if it can. If that does not end the job, the next one does."""
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
        except RuntimeError:  # it has just ended
            return True

    def _store_answers(self) -> bool:
        return time.monotonic() - max(self.heard_s, self.awake_since_s) <= self.patience_s

    def _end(self, hang: Hang) -> None:
        line = (
            f"{hang.text}; the job ends here; if a rank may take that long between two collectives, raise "
            f"loop.hang_timeout_s above {self.timeout_s:g}"
        )
        self.speaks = True
        print(f"aiscale: {line}", file=sys.stderr, flush=True)
        # In a thread, since all may wait for a file system, which then does not take this either.
        note = threading.Thread(target=self._tell, args=(line,), daemon=True)
        note.start()
        # Ranks that only lose their connection to this one have nothing to add: let them know before it is cut.
        known = threading.Thread(target=self._make_known, daemon=True)
        known.start()
        known.join(_HEARD_S if self._store_answers() else 0)
        note.join(3 * self.beat_s)
        end_now(HANG_STATUS)

    def _make_known(self) -> None:
        """Returns when all ranks have heard that nobody else needs to speak, but for those that cannot."""
        with suppress(RuntimeError):
            self._store.set(_OVER, "1")
            deaf = self.silent | {rank for rank, of in self.news.items() if of.told.left}
            while self._store.add(_HEARD, 0) < self.world.size - 1 - len(deaf):
                time.sleep(0.05)

    def _tell(self, line: str) -> None:
        with suppress(Exception):  # such as a full disk
            self.tell(line)

    def _end_unheard(self) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stderr__.fileno())
        self._store.add(_HEARD, 1)
        # The launcher should see first how the one that spoke has ended, and then it ends this one, too.
        time.sleep(_HEARD_S + 3 * self.beat_s + 5)
        end_now(LOST_STATUS)


_TORCH = str(Path(torch.__file__).parent)


def _where() -> str:
    """Where the main thread is, outside torch."""
    frame = sys._current_frames().get(threading.main_thread().ident)
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, "<")):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}" if frame else ""
