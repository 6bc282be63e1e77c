"""Promise: ranks on this machine end together. A dead one is named within 20 s, and none outlives its launcher.

    launch(4, ["-m", "aiscale", "train", "--recipe", "laptop"])      # aiscale train --nproc 4, without torchrun

The rendezvous store lives in the parent, on a port that the system chose, so that two jobs on one machine never fight
over a port and no rank has to be the first. When a rank dies, the others are stopped and the parent says which one it
was. When the parent dies, the kernel takes the ranks with it (Linux). Where it is safe, ranks are forked from the
parent, which has then imported for all of them (`forking`).
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from aiscale.distributed.failing import HANG_STATUS, LOST_STATUS
from aiscale.distributed.forking import Forked, can_fork
from aiscale.distributed.rendezvous import listen, serve
from aiscale.processes import die_with, usable_cores

Process = subprocess.Popen | Forked
BAD_INPUT_STATUS = 2  #: with which `aiscale` ends after a one-line refusal
_INTERRUPTED_STATUS = 130  #: of a rank that was told to stop, and has saved


def rank_environment(rank: int, size: int, threads: int = 0) -> dict[str, str]:
    """The variables that make a process rank `rank` of `size` on this machine, with its share of the cores."""
    share = threads or max(1, len(usable_cores()) // size)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(share)) if not threads else str(threads),
    }


def launch(
    nproc: int,
    argv: Sequence[str],
    env: Mapping[str, str] | None = None,
    *,
    warm_up: Callable[[], None] | None = None,
) -> int:
    """Run `python ARGV` as `nproc` joined ranks and wait; returns the exit status, 0 only if every rank's was 0.

    `warm_up` imports what ranks that run `-m MODULE` need: where it is safe they are then forked from this process.
    With it, put into `env` nothing that a library reads when it is imported.
    """
    listener, rendezvous = listen()
    start = _start_from_nothing
    if warm_up is not None and can_fork():
        warm_up()
        start = Forked if can_fork() else start  # what was imported may have started a thread
    base = {"AISCALE_LAUNCHER": "aiscale", **rendezvous, **(env or {})}
    ranks = [start(argv, {**base, **rank_environment(rank, nproc)}) for rank in range(nproc)]
    store = serve(listener)  # after the forks: it has a thread
    interrupted = False
    with _passing_on_sigterm(ranks):
        while True:
            try:
                status = _wait(ranks, quiet=interrupted)
                del store
                return status
            except KeyboardInterrupt:
                # The terminal has sent the signal to every rank as well; they finish their step and save.
                if interrupted:
                    _stop(ranks, grace_s=0)
                    return 130
                interrupted = True


def _start_from_nothing(argv: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, *argv], env={**os.environ, **env}, preexec_fn=functools.partial(die_with, os.getpid())
    )


@contextmanager
def _passing_on_sigterm(ranks: list[Process]) -> Iterator[None]:
    """A scheduler, or `timeout`, ends the parent alone: let the ranks know, so that they save."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals belong to the main thread
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: [process.send_signal(number) for process in ranks])
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _wait(ranks: list[Process], *, quiet: bool) -> int:
    """Wait for all; at the first failure stop the others and say who it was."""
    try:
        while True:
            codes = [process.poll() for process in ranks]
            first = {rank for rank, code in enumerate(codes) if code}
            if first:
                codes = _settle(ranks)
                code, rank = culprit(codes, first)
                # Bad input, over which all ranks fail alike, or a hang: one of them has said all there is to say.
                if not quiet and set(codes) != {BAD_INPUT_STATUS} and code != HANG_STATUS:
                    others = sum(c is None for c in codes)
                    stopped = f"; stopping the other {others}" if others else ""
                    print(f"aiscale: rank {rank} of {len(ranks)} {_describe(code)}{stopped}", file=sys.stderr)
                _stop(ranks)
                return code if code > 0 else 128 - code
            if all(code == 0 for code in codes):
                return 0
            time.sleep(0.05)
    except BaseException as error:
        if not isinstance(error, KeyboardInterrupt):
            _stop(ranks)
        raise


def _settle(ranks: list[Process]) -> list[int | None]:
    """The exit statuses, after the ranks that are about to fail as well had time to say why."""
    deadline = time.monotonic() + 0.5
    while True:
        codes = [process.poll() for process in ranks]
        alike = {code for code in codes if code is not None}
        has_time = alike in ({BAD_INPUT_STATUS}, {_INTERRUPTED_STATUS})
        if None not in codes or time.monotonic() > deadline + (15.0 if has_time else 0.0):
            return codes
        time.sleep(0.05)


def culprit(codes: Sequence[int | None], first: set[int]) -> tuple[int, int]:
    """(status, rank) of the rank to name: one that has explained a hang; one that was killed explains the others'
    broken connections, and one that only lost a connection explains nothing; otherwise the one in `first`, who were
    seen to fail first."""
    failed = [(code, rank) for rank, code in enumerate(codes) if code]
    order = lambda it: (it[0] != HANG_STATUS, it[0] > 0, it[0] == LOST_STATUS, it[1] not in first, it)  # noqa: E731
    return min(failed, key=order)


def _describe(code: int) -> str:
    if code < 0:
        return f"died: signal {-code} ({signal.Signals(-code).name})"
    return f"failed with exit status {code}"


def _stop(ranks: list[Process], grace_s: float = 3.0) -> None:
    # SIGKILL after a short grace: a rank that waits in a collective for a dead one does not answer SIGTERM.
    for process in ranks:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + grace_s
    for process in ranks:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
