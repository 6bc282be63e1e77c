"""Promise: a slow link between ranks can be emulated on one machine: every rank gets a network card of so many Mbit/s.

    world.link.rate_mbit_s = 100          # on every rank, between two steps; 0: as fast as the machine is
    with world.link.at(100): ...          # for a while
    aiscale train --recipe laptop --nproc 4 --set parallel.strategy=ddp --set loop.link_mbit_s=100

A card is a queue of bytes. What a rank asks for waits until the card has sent what came before and then its own bytes,
at the rate; beyond its bytes each message (a collective is several) takes `world.link.latency_s`. Only then gloo gets
it, and it ends when the last rank's card has come so far. The rank computes meanwhile, so a gradient bucket that is on
its way during the backward pass costs nothing until somebody waits for it.

Left out: gloo's own time comes on top, a dead rank is noticed when the bytes have been sent (the launcher sees it at
once), and messages from two ranks to a third arrive as fast as from one. Bookkeeping (`world.control()`) and barriers
take no time on the link, but stay behind what was asked for before them. `aiscale bench link` compares all this with
links that the Linux kernel has slowed.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist
from torch.futures import Future

from aiscale.config import ConfigError
from aiscale.cost import all_reduce_wire_bytes, collective_terms, gloo_reduce_wire_bytes

#: Of 1514 bytes that Ethernet carries, 14 are its own, 20 IP's and 32 TCP's: that is what a shaped interface counts.
FRAMING = 1514 / 1448
#: What a message takes beyond its bytes on cards that the kernel slows: `bench link` found 0.65 to 1.1 ms at 118 to 255
#: Mbit/s, where frames are handed on in pieces of 0.4 ms. Without it, small buckets would seem up to 13 % too fast.
LATENCY_S = 0.8e-3


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
    return messages, busiest_bytes


class Link:
    """This rank's network card. `connect` makes it; groups hand it what they send."""

    def __init__(self, refusal: str = "") -> None:
        self.latency_s = LATENCY_S  #: of one message, on a slowed link
        self._refusal = refusal  #: why it cannot be slowed
        self._rate_mbit_s = 0.0
        self._free_s = 0.0  #: when the card has sent all that it was given, on the monotonic clock
        self._queue: queue.SimpleQueue[tuple[float, Delayed]] = queue.SimpleQueue()
        self._queued = 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def rate_mbit_s(self) -> float:
        """Megabits a second, as the interface counts them (with frames); 0: not slowed."""
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

    def seconds(self, op: str, nbytes: float, world: int) -> float:
        """How long a collective or message keeps the card busy; 0 where the link is not slowed."""
        if not self.rate_mbit_s or world == 1:
            return 0.0
        messages, busiest_bytes = busiest_link(op, nbytes, world)
        return messages * self.latency_s + 8e-6 * FRAMING * busiest_bytes / self.rate_mbit_s

    def carry(self, seconds: float, start: Callable[..., dist.Work], *args, **kwargs) -> dist.Work:
        """`start(*args, **kwargs)`, which keeps the card busy for `seconds`, once the card has sent it."""
        if not seconds and not self._queued:
            return start(*args, **kwargs)
        # Everything stays in the order in which it was asked for: ranks pair what a group does by that order.
        with self._lock:
            delayed = Delayed(lambda: start(*args, **kwargs))
            self._free_s = max(time.monotonic(), self._free_s) + seconds
            self._queue.put((self._free_s, delayed))
            self._queued += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._send, name="aiscale link", daemon=True)
                self._thread.start()
        return delayed

    def _send(self) -> None:
        while True:
            when_s, delayed = self._queue.get()
            time.sleep(max(0.0, when_s - time.monotonic()))
            delayed.begin()
            with self._lock:
                self._queued -= 1


class Delayed(dist._Work):
    """A collective or message that gloo gets later."""

    def __init__(self, start: Callable[[], dist.Work]) -> None:
        super().__init__()
        self._start: Callable[[], dist.Work] | None = start
        self._work: dist.Work | None = None
        self._error: Exception | None = None
        self._begun = threading.Event()
        self._lock = threading.Lock()
        self._future: Future | None = None

    def begin(self) -> None:
        """Hand it to gloo."""
        try:
            self._work = self._start()
        except Exception as error:  # whoever waits shall have it
            self._error = error
        self._start = None  # and with it what it would send
        self._begun.set()

    def _gloos(self) -> dist.Work:
        self._begun.wait()
        if self._error is not None:
            raise self._error
        return self._work

    def wait(self, timeout=None) -> bool:
        return self._gloos().wait(timeout) if timeout else self._gloos().wait()

    def is_completed(self) -> bool:
        return self._begun.is_set() and (self._error is not None or self._work.is_completed())

    def get_future(self) -> Future:
        with self._lock:
            if self._future is None:
                ended = Future()
                # Through `then`, because an error must reach C++ callers such as DDP as an error.
                self._future = ended.then(lambda _: self._gloos().get_future().value())
                # In a thread of its own: what hangs on the future runs there, and may itself wait for a later
                # collective (torch's PowerSGD hook does).
                threading.Thread(target=self._end, args=(ended,), name="aiscale link", daemon=True).start()
        return self._future

    def _end(self, ended: Future) -> None:
        with suppress(Exception):  # the future has it, too
            self._gloos().get_future().wait()
        ended.set_result(None)
