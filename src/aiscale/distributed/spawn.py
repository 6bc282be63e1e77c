"""Starting ranks on this machine: `aiscale train --nproc 4` without torchrun.

    launch(4, ["-m", "aiscale", "train", "--recipe", "laptop"])

The rendezvous store lives in the parent, on a port that the system chose, so that two jobs on one machine never fight
over a port and no rank has to be the first. When a rank dies, the others are stopped and the parent says which one it
was. When the parent dies, the kernel takes the ranks with it (Linux). Where it is safe, ranks are forked from the
parent, which has then imported for all of them (`forking`).
"""

from __future__ import annotations

import datetime
import functools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from aiscale.distributed.failing import HANG_STATUS, LOST_STATUS
from aiscale.distributed.forking import Forked, can_fork, die_with

Process = subprocess.Popen | Forked
LOOPBACK = "127.0.0.1"
RENDEZVOUS = "AISCALE_RENDEZVOUS"  #: a name for it: its address may have been an earlier one's, of other ranks
BAD_INPUT_STATUS = 2  #: with which `aiscale` ends after a one-line refusal
_INTERRUPTED_STATUS = 130  #: of a rank that was told to stop, and has saved


def host_store(timeout_s: float = 300.0, address: str = LOOPBACK):
    """A rendezvous store in this process, and the environment by which ranks find it.

    Ranks on other machines need an `address` that they can reach. Returns (TCPStore, dict): keep the store alive as
    long as the ranks live.
    """
    listener, env = _listen(address)
    return _serve(listener, timeout_s), env


def _listen(address: str = LOOPBACK) -> tuple[socket.socket, dict[str, str]]:
    """A socket for the store, and the environment by which ranks find it, even before anybody answers there."""
    # Left to itself the store listens on every network of this machine, to anybody: hand it a socket that does not.
    listener = socket.create_server((address, 0), backlog=1024)
    port = listener.getsockname()[1]
    return listener, {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        RENDEZVOUS: uuid.uuid4().hex,
    }


def _serve(listener: socket.socket, timeout_s: float = 300.0):
    from torch.distributed import TCPStore

    address, port = listener.getsockname()
    return TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


def rank_environment(rank: int, size: int, threads: int = 0) -> dict[str, str]:
    """The variables that make a process rank `rank` of `size` on this machine, with its share of the cores."""
    share = threads or max(1, len(_usable_cores()) // size)
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
    listener, rendezvous = _listen()
    start = _start_from_nothing
    if warm_up is not None and can_fork():
        warm_up()
        start = Forked if can_fork() else start  # what was imported may have started a thread
    base = {"AISCALE_LAUNCHER": "aiscale", **rendezvous, **(env or {})}
    ranks = [start(argv, {**base, **rank_environment(rank, nproc)}) for rank in range(nproc)]
    store = _serve(listener)  # after the forks: it has a thread
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
                code, rank = _culprit(codes, first)
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


def _culprit(codes: Sequence[int | None], first: set[int]) -> tuple[int, int]:
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


def _usable_cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
