"""A slow link between ranks that share one machine: every rank gets a network card of so many megabits a second.

    world.link.rate_mbit_s = 100          # on every rank, between two steps; 0: as fast as the machine is
    with world.link.at(100): ...          # for a while
    aiscale train --recipe laptop --nproc 4 --set parallel.strategy=ddp --set loop.link_mbit_s=100

gloo carries out each collective at once, and its result is held back until the link would have brought it: from the
moment at which the last rank has joined in, for as long as the bytes of the busiest link take. A card is a queue in
each direction: what is asked for while it is busy comes after. The time passes while the rank computes, so a gradient
bucket that is on its way during the backward pass costs nothing until somebody waits for it. gloo's own time lies
inside, not on top. So that ranks agree when a transfer began, each collective is preceded by one of 16 bytes that
carries the time (and the slowest card's rate: ranks may differ), each message by one from its sender. Beyond its bytes
each message, and a collective is several, takes `world.link.latency_s`.

Bookkeeping (`world.control()`) and barriers pass freely: they are no part of what a slow link is set up to show. Two
messages that cross between two ranks pass each other, which gloo's do only where both receives were posted first.
`aiscale bench link` compares all this with links that the Linux kernel has slowed.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.futures import Future

from aiscale.config import ConfigError
from aiscale.cost import all_reduce_wire_bytes, collective_terms, gloo_reduce_wire_bytes

__all__ = ["Carried", "Link", "busiest_link"]

#: Of 1514 bytes that Ethernet carries, 14 are its own, 20 IP's and 32 TCP's: that is what a shaped interface counts.
FRAMING = 1514 / 1448
#: Every second frame is acknowledged by one of 66 bytes, which takes room where data goes in that direction as well:
#: 1.068 in all; a slowed interface sent 1.067 times the bytes of an all-reduce at 60 Mbit/s, 1.051 at 250.
_ACKNOWLEDGED = FRAMING + 66 / 2 / 1448
_ONE_WAY = ("send", "recv", "broadcast", "scatter", "gather")
#: What a message takes beyond its bytes on cards that the kernel slows: `bench link` found 0.65 to 1.1 ms at 118 to 255
#: Mbit/s, where frames are handed on in pieces of 0.4 ms. Without it, small buckets would seem up to 13 % too fast.
LATENCY_S = 0.8e-3
_STAMP_TAG = 2**30  #: of the message that goes before a message


def busiest_link(op: str, nbytes: float, world: int) -> tuple[float, float]:
    """(messages one after another, bytes through the busiest card in one direction, waits counted as bytes) of gloo's
    collective."""
    messages, busiest_bytes = collective_terms(op, nbytes, world)
    if op == "reduce_scatter":  # gloo makes it of an all-reduce
        return 2 * messages, all_reduce_wire_bytes(nbytes, world)
    if op == "reduce":  # a reduce-scatter, whose sums then go to the root
        return 2.0 * (world - 1), max(all_reduce_wire_bytes(nbytes, world), gloo_reduce_wire_bytes(nbytes, world))
    if op == "broadcast":  # a rank sends to all below it in the tree at the same time: the next level waits for all
        return messages, messages * (messages + 1) / 2 * nbytes
    if op == "all_to_all":
        # All n - 1 messages of S/n start together. But gloo announces that it is ready to receive on the connection
        # that carries data the other way, so where the later of two ranks sends before it says so, one direction waits
        # for the other: always at the distance n/2, else in one of two cases. Over all orders of arrival, with fair
        # shares of every card, that comes to n/2 more messages.
        messages += world // 2
        return messages, messages * nbytes / world
    if op == "recv":
        return 1.0, float(nbytes)
    return messages, busiest_bytes


class Link:
    """This rank's network card. Made by `connect`; groups hand it what they carry."""

    def __init__(self, refusal: str = "") -> None:
        self.latency_s = LATENCY_S  #: of one message, on a slowed link
        self._refusal = refusal  #: why it cannot be slowed
        self._rate_mbit_s = 0.0
        self._free_s = {"out": 0.0, "in": 0.0}  #: when each direction has brought all it was given
        self._under_way: list[Carried] = []  #: in the order in which they were asked for; those not yet scheduled
        self._lock = threading.RLock()

    @property
    def rate_mbit_s(self) -> float:
        """Megabits a second, in each direction, as the interface counts them (with frames); 0: not slowed."""
        return self._rate_mbit_s

    @rate_mbit_s.setter
    def rate_mbit_s(self, rate_mbit_s: float) -> None:
        if not (math.isfinite(rate_mbit_s) and rate_mbit_s >= 0):
            raise ConfigError(f"the link's rate is {rate_mbit_s} Mbit/s: it must be at least 0 (0: not slowed)")
        if rate_mbit_s and self._refusal:
            raise ConfigError(f"a link of {rate_mbit_s:g} Mbit/s was asked for, but {self._refusal}")
        self._rate_mbit_s = float(rate_mbit_s)

    @contextmanager
    def at(self, rate_mbit_s: float) -> Iterator[None]:
        """Slowed to `rate_mbit_s` inside; every rank enters it."""
        before = self.rate_mbit_s
        self.rate_mbit_s = rate_mbit_s
        try:
            yield
        finally:
            self.rate_mbit_s = before

    def carry(
        self, group: dist.ProcessGroup, op: str, nbytes: float, args: tuple, start: Callable[[], dist.Work]
    ) -> dist.Work:
        """Start a collective, or a message, of `group`; its work ends when the link has brought it.

        args: of the group's method, whose second and third are peer and tag of a message.
        """
        if group.size() == 1:
            return start()
        # Two threads that each start a pair must not mix them: ranks would pair them differently.
        with self._lock:
            carried = Carried(self, group, op, nbytes, args)
            carried.work = start()
            self._under_way.append(carried)
            return carried

    def schedule(self, carried: Carried) -> None:
        """Find out when `carried` arrives, after what was asked for before it and has begun."""
        carried.hear()
        with self._lock:
            if carried not in self._under_way:
                return
            # All ranks have begun what comes before it in its group, but a thread of gloo may be late in ending that.
            for each in self._under_way[: self._under_way.index(carried)]:
                if each.group_id == carried.group_id is not None:
                    each.hear()
            for each in [c for c in self._under_way if c is carried or c.has_heard()]:
                self._occupy(each)
                self._under_way.remove(each)

    def claim(self, carried: Carried) -> None:
        """Schedule a message that leaves: its sender need not hear from anybody."""
        with self._lock:
            self._occupy(carried)

    def _occupy(self, carried: Carried) -> None:
        if carried.done_s is not None:
            return
        lanes = {"send": ("out",), "recv": ("in",)}.get(carried.op, ("out", "in"))
        start_s = carried.start_s()
        for lane in lanes:
            self._free_s[lane] = max(start_s, self._free_s[lane]) + carried.seconds()
        carried.done_s = max(self._free_s[lane] for lane in lanes)


class Carried(dist._Work):
    """A collective or message on a slow link: done when gloo is done and the link has brought it."""

    def __init__(self, link: Link, group: dist.ProcessGroup, op: str, nbytes: float, args: tuple) -> None:
        super().__init__()
        self.link, self.op = link, op
        self.work: dist.Work | None = None
        self.done_s: float | None = None  #: on this process's monotonic clock
        self.group_id = None if op in ("send", "recv") else id(group)  #: of a collective, which keeps its group's order
        self._asked_s = time.monotonic()
        self._messages, busiest_bytes = busiest_link(op, nbytes, group.size())
        self._bits = 8 * busiest_bytes * (FRAMING if op in _ONE_WAY else _ACKNOWLEDGED)
        self._future: Future | None = None
        self._has_waited = False
        # Another host's monotonic clock began at another time; the wall clock is the same.
        self._stamp = torch.tensor([time.time(), 1e-6 / link.rate_mbit_s], dtype=torch.float64)
        self._heard: dist.Work | None = self._exchange(group.inner, args)

    def _exchange(self, inner: dist.ProcessGroup, args: tuple) -> dist.Work | None:
        peer, tag = (*args[1:3], 0, 0)[:2] if self.op in ("send", "recv") else (0, 0)
        if self.op == "send":
            self.link.claim(self)
            self._stamp[0] += self.done_s - self.seconds() - self._asked_s  # it may have to queue here first
            return inner.send([self._stamp], peer, _STAMP_TAG + tag)
        if self.op == "recv":
            self._from_anybody = (inner, args[1]) if len(args) < 3 else None
            return None if self._from_anybody else inner.recv([self._stamp], peer, _STAMP_TAG + tag)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        return inner.allreduce([self._stamp], options)

    def hear(self) -> None:
        """Wait until it is known when the transfer began."""
        if self._heard is None:
            inner, tag = self._from_anybody
            self._heard = inner.recv([self._stamp], self.work._source_rank(), _STAMP_TAG + tag)
        if not self._has_waited:  # gloo would wait for a second message of the kind
            self._heard.wait()
            self._has_waited = True

    def has_heard(self) -> bool:
        """Whether `hear` would return at once."""
        return self._heard is not None and self._heard.is_completed()

    def start_s(self) -> float:
        """When the last rank joined in, on this process's monotonic clock."""
        now_s = time.monotonic()
        # Hosts whose clocks differ must not make it start before it was asked for, or in the future.
        return max(self._asked_s, min(now_s, self._stamp[0].item() - (time.time() - now_s)))

    def seconds(self) -> float:
        """How long it keeps the link busy."""
        return self._messages * self.link.latency_s + self._bits * self._stamp[1].item()

    def _arrival_s(self) -> float:
        if self.done_s is None or self.op == "send":
            self.link.schedule(self)
        return self.done_s

    def wait(self, timeout=None) -> bool:
        done = self.work.wait(timeout) if timeout else self.work.wait()
        time.sleep(max(0.0, self._arrival_s() - time.monotonic()))
        return done

    def is_completed(self) -> bool:
        return self.work.is_completed() and self.has_heard() and self._arrival_s() <= time.monotonic()

    def get_future(self) -> Future:
        if self._future is None:
            result, gate = self.work.get_future(), Future()
            # Through `then`, because an error must reach C++ callers such as DDP as an error.
            self._future = gate.then(lambda _: result.value())
            result.add_done_callback(lambda done: self._open(gate, done))
        return self._future

    def _open(self, gate: Future, done: Future) -> None:
        try:
            done.value()
            arrival_s = self._arrival_s()
        except Exception:
            arrival_s = 0.0  # nothing will arrive: whoever waits must know now
        _ALARM.at(arrival_s, gate)

    def _source_rank(self) -> int:
        return self.work._source_rank()

    def source_rank(self) -> int:
        return self.work.source_rank()

    def result(self) -> list[torch.Tensor]:
        return self.work.result()

    def is_success(self) -> bool:
        return self.work.is_success()

    def exception(self):
        return self.work.exception()

    def synchronize(self) -> None:
        self.wait()


class _Alarm:
    """Completes futures at their times, in a thread that starts with the first of them.

    What hangs on a future runs in this thread, and may itself wait for a later one (torch's PowerSGD hook does). So a
    thread that has something to run first sees to it that another one watches the clock.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[float, int, Future]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._watchers = 0

    def at(self, when_s: float, future: Future) -> None:
        """Complete `future` at `when_s` of the monotonic clock."""
        with self._changed:
            heapq.heappush(self._waiting, (when_s, next(self._numbers), future))
            self._keep_watch()
            self._changed.notify()

    def _keep_watch(self) -> None:
        if not self._watchers:
            self._watchers += 1
            threading.Thread(target=self._watch, name="aiscale link", daemon=True).start()

    def _watch(self) -> None:
        while True:
            with self._changed:
                while not self._waiting or (left_s := self._waiting[0][0] - time.monotonic()) > 0:
                    self._changed.wait(left_s if self._waiting else None)
                future = heapq.heappop(self._waiting)[2]
                self._watchers -= 1
                if self._waiting:
                    self._keep_watch()
            future.set_result(None)
            del future
            with self._changed:
                if self._watchers > 1:
                    return
                self._watchers += 1


_ALARM = _Alarm()
