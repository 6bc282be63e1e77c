"""Emulates a slow link between ranks on one machine: every rank has a card with a given rate.

    world.link.rate_mbit_s = 100          # on every rank, between two steps; 0: not slowed

A card is a queue of bytes. It has sent a collective when it has sent the earlier ones and then its
own bytes at the rate, plus `latency_s` per message. gloo gets the collective just before that, by
the shortest time that gloo itself took for such a one so far. The rank computes meanwhile. Limits:
a dead rank is noticed only when the bytes have been sent, and messages from two ranks to a third
arrive as fast as from one. Bookkeeping and barriers take no time.
"""

from __future__ import annotations

import functools
import math
import queue
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist
from torch.futures import Future

from aiscale.errors import ConfigError
from aiscale.plan.cost import collective_terms

#: A shaped interface counts whole frames: of 1514 bytes, 14 are Ethernet's, 20 IP's and 32 TCP's.
FRAMING = 1514 / 1448
#: Latency per message, measured as 0.65 to 1.1 ms on cards that the kernel slowed to 118 to 255
#: Mbit/s, where frames are passed on in pieces of 0.4 ms.
LATENCY_S = 0.8e-3


class Link:
    """This rank's network card."""

    def __init__(self, refusal: str = "") -> None:
        self.latency_s = LATENCY_S  #: of one message, on a slowed link
        self._refusal = refusal  #: why it cannot be slowed
        self._rate_mbit_s = 0.0
        #: when the card will have sent everything so far, on the monotonic clock
        self._free_s = 0.0
        self._start_s = 0.0  #: when gloo gets the latest call
        #: kind of call -> the shortest time that gloo itself took
        self._own_s: dict[Hashable, float] = {}
        self._queue: queue.SimpleQueue[tuple[float, Delayed, Hashable]] = queue.SimpleQueue()
        self._queued = 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def rate_mbit_s(self) -> float:
        """Megabits per second, as the interface counts them (with frames); 0: not slowed."""
        return self._rate_mbit_s

    @rate_mbit_s.setter
    def rate_mbit_s(self, rate_mbit_s: float) -> None:
        if not (math.isfinite(rate_mbit_s) and rate_mbit_s >= 0):
            raise ConfigError(
                f"the link's rate is {rate_mbit_s} Mbit/s: it must be at least 0 (0: not slowed)"
            )
        if rate_mbit_s and self._refusal:
            raise ConfigError(
                f"a link of {rate_mbit_s:g} Mbit/s was requested, but {self._refusal}"
            )
        self._rate_mbit_s = float(rate_mbit_s)

    @contextmanager
    def at(self, rate_mbit_s: float) -> Iterator[None]:
        """Slowed to `rate_mbit_s` inside; all ranks enter it."""
        before = self.rate_mbit_s
        self.rate_mbit_s = rate_mbit_s
        try:
            yield
        finally:
            self.rate_mbit_s = before

    def seconds(self, op: str, nbytes: float, world: int) -> float:
        if not self.rate_mbit_s or world == 1:
            return 0.0
        messages, busiest_bytes = collective_terms(op, nbytes, world, "gloo")
        return messages * self.latency_s + 8e-6 * FRAMING * busiest_bytes / self.rate_mbit_s

    def carry(
        self,
        seconds: float,
        start: Callable[..., dist.Work],
        *args,
        kind: Hashable = None,
        **kwargs,
    ) -> dist.Work:
        """Call `start(*args, **kwargs)`, to end when the card has been busy with it for `seconds`.

        Calls of one `kind` take gloo equally long.
        """
        if not seconds and not self._queued:
            return start(*args, **kwargs)
        # Keep everything in order: a group's ranks match their calls by order.
        with self._lock:
            self._free_s = max(time.monotonic(), self._free_s) + seconds
            self._start_s = max(self._start_s, self._free_s - self._own_s.get(kind, 0.0))
            delayed = Delayed(lambda: start(*args, **kwargs), self._free_s)
            self._queue.put((self._start_s, delayed, kind))
            self._queued += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._send, name="aiscale link", daemon=True)
                self._thread.start()
        return delayed

    def _send(self) -> None:
        while True:
            when_s, delayed, kind = self._queue.get()
            _sleep_until(when_s)
            delayed.begin(functools.partial(self._note, kind))
            with self._lock:
                self._queued -= 1

    def _note(self, kind: Hashable, seconds: float) -> None:
        self._own_s[kind] = min(seconds, self._own_s.get(kind, math.inf))


def _sleep_until(moment_s: float) -> None:
    time.sleep(max(0.0, moment_s - time.monotonic()))


class Delayed(dist._Work):
    """A collective or message that gloo gets later, and that does not end before `sent_s`."""

    def __init__(self, start: Callable[[], dist.Work], sent_s: float) -> None:
        super().__init__()
        self._start: Callable[[], dist.Work] | None = start
        self._sent_s = sent_s
        self._work: dist.Work | None = None
        self._error: Exception | None = None
        self._begun = threading.Event()
        self._lock = threading.Lock()
        self._future: Future | None = None

    def begin(self, tell: Callable[[float], None]) -> None:
        """Start it; `tell` gets the seconds that it took by itself."""
        begun_s = time.monotonic()
        try:
            self._work = self._start()
        except Exception as error:  # raised to whoever waits
            self._error = error
        if self._work is not None:
            with suppress(RuntimeError):  # messages have no future
                self._work.get_future().add_done_callback(
                    lambda _: tell(time.monotonic() - begun_s)
                )
        self._start = None  # frees the tensors that it would send
        self._begun.set()

    def _gloos(self) -> dist.Work:
        self._begun.wait()
        if self._error is not None:
            raise self._error
        return self._work

    def wait(self, timeout=None) -> bool:
        done = self._gloos().wait(timeout) if timeout else self._gloos().wait()
        _sleep_until(self._sent_s)
        return done

    def is_completed(self) -> bool:
        if not self._begun.is_set() or self._error is not None:
            return self._begun.is_set()
        return self._work.is_completed() and time.monotonic() >= self._sent_s

    def get_future(self) -> Future:
        with self._lock:
            if self._future is None:
                ended = Future()
                # Through `then`, because an error must reach C++ callers such as DDP as an error.
                self._future = ended.then(lambda _: self._gloos().get_future().value())
                # In a separate thread: the future's callbacks run there, and may wait for a later
                # collective (torch's PowerSGD hook does).
                threading.Thread(
                    target=self._end, args=(ended,), name="aiscale link", daemon=True
                ).start()
        return self._future

    def _end(self, ended: Future) -> None:
        with suppress(Exception):  # the future raises it, too
            self._gloos().get_future().wait()
            _sleep_until(self._sent_s)
        ended.set_result(None)
