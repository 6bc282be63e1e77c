"""Starts the ranks of one machine, names a dead one within seconds, leaves none running after it.

The ranks meet at a file in a folder of this user alone. This module imports no torch: the ranks are
forked from a process that has.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import connection
from multiprocessing.process import BaseProcess

from aiscale import private
from aiscale.processes import INTERRUPTED_STATUS, start_python, usable_cores

#: Exit status of a rank that fails only because it lost its connection to another one.
LOST_STATUS = 75
#: Exit status of the rank that has printed which ranks did not arrive (`train/watch.py`).
HANG_STATUS = 76
_BAD_INPUT_STATUS = 2  #: of `aiscale` after a one-line refusal


def rank_environment(rank: int, size: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS")
        or str(max(1, len(usable_cores()) // size)),
    }


def launch(
    nproc: int,
    argv: Sequence[str],
    env: Mapping[str, str] | None = None,
    *,
    preload: Sequence[str] = (),
    stdout: int = 1,
) -> int:
    """Run `python ARGV` as `nproc` connected ranks and wait.

    Returns the exit status, 0 only if every rank's was 0. `env` is added to this process's
    environment. `preload`: modules that the ranks need; `stdout`: where they print
    (`processes.start_python`).
    """
    interrupted = False
    started = start_ranks(nproc, argv, env, preload=preload, stdout=stdout)
    with started as ranks, _passing_on_signals(ranks):
        while True:
            try:
                return _wait(ranks, quiet=interrupted)
            except KeyboardInterrupt:
                # The terminal sends the signal to every rank as well; they finish their step and
                # save. After a second one they remove what they were writing, unless they wait for
                # each other.
                if interrupted:
                    stop(ranks, grace_s=1, first=signal.SIGINT)
                    return INTERRUPTED_STATUS
                interrupted = True


@contextmanager
def start_ranks(
    nproc: int,
    argv: Sequence[str],
    env: Mapping[str, str] | None = None,
    *,
    preload: Sequence[str] = (),
    stdout: int = 1,
) -> Iterator[list[BaseProcess]]:
    """The processes of `launch`, for as long as the `with` block runs."""
    store = private.new_store()
    env = {**os.environ, "AISCALE_LAUNCHER": "aiscale", private.STORE: str(store), **(env or {})}
    for name in ("MASTER_ADDR", "MASTER_PORT"):  # of a job in which this process runs
        env.pop(name, None)
    ranks: list[BaseProcess] = []
    try:
        for rank in range(nproc):
            its_env = env | rank_environment(rank, nproc)
            started = start_python(
                argv, its_env, preload=preload, name=f"rank {rank}", stdout=stdout
            )
            ranks.append(started)
        yield ranks
    finally:
        stop(ranks)
        store.unlink(missing_ok=True)


#: A scheduler, or `timeout`, sends these to the parent alone; ranks save on them.
_PASSED_ON = (signal.SIGTERM, signal.SIGUSR1)


@contextmanager
def _passing_on_signals(ranks: list[BaseProcess]) -> Iterator[None]:
    """Signals to this process reach its ranks. Signals that were blocked until now come at once."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals belong to the main thread
        return

    def pass_on(number: int, frame) -> None:
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(rank.pid, number)

    before = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    # The ranks have started with this process's mask: what was blocked here waits in them for
    # `fit`.
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(ranks: list[BaseProcess], *, quiet: bool) -> int:
    """Wait for all ranks; at the first failure stop the others and name the rank."""
    while not any(codes := [rank.exitcode for rank in ranks]):
        if None not in codes:
            return 0
        connection.wait(
            [rank.sentinel for rank, code in zip(ranks, codes, strict=True) if code is None]
        )
    first = {rank for rank, code in enumerate(codes) if code}
    codes = _settle(ranks)
    code, rank = culprit(codes, first)
    # Bad input, which fails all ranks alike, a stop that was asked for, or a hang: a rank has
    # explained it.
    explained = _is_asked_for(codes) or code == HANG_STATUS
    if not quiet and not explained:
        others = sum(c is None for c in codes)
        stopped = f"; stopping the other {others}" if others else ""
        died = (
            f"died: signal {-code} ({signal.Signals(-code).name})"
            if code < 0
            else f"failed with exit status {code}"
        )
        print(f"aiscale: rank {rank} of {len(ranks)} {died}{stopped}", file=sys.stderr)
    stop(ranks)
    return code if code > 0 else 128 - code


def _settle(ranks: list[BaseProcess]) -> list[int | None]:
    """The exit statuses, after ranks that are about to fail had time to print why."""
    began = time.monotonic()
    while True:
        codes = [rank.exitcode for rank in ranks]
        limit_s = 15.5 if _is_asked_for(set(codes) - {None}) else 0.5
        if None not in codes or time.monotonic() - began > limit_s:
            return codes
        time.sleep(0.05)


def _is_asked_for(codes: Sequence[int | None] | set[int]) -> bool:
    return set(codes) in ({_BAD_INPUT_STATUS}, {INTERRUPTED_STATUS})


def culprit(codes: Sequence[int | None], first: set[int]) -> tuple[int, int]:
    """(status, rank) of the rank to name.

    First one that reported a hang, then one that was killed (it explains the others' broken
    connections), last one that only lost a connection; among equals one in `first`, which failed
    first.
    """
    failed = [(code, rank) for rank, code in enumerate(codes) if code]

    def order(it: tuple[int, int]) -> tuple:
        code, rank = it
        return code != HANG_STATUS, code > 0, code == LOST_STATUS, rank not in first, it

    return min(failed, key=order)


def stop(ranks: list[BaseProcess], grace_s: float = 3.0, first: int = signal.SIGTERM) -> None:
    """End the ranks by a signal, and by SIGKILL those that hang and do not answer."""
    for rank in ranks:
        with suppress(ProcessLookupError):
            if rank.exitcode is None:
                os.kill(rank.pid, first)
    deadline = time.monotonic() + grace_s
    for rank in ranks:
        rank.join(max(0.0, deadline - time.monotonic()))
        if rank.exitcode is None:
            rank.kill()
            rank.join()
