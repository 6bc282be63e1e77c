"""Starts the ranks of one machine, names a dead one within 20 s, and leaves none running after the launcher.

    launch(4, ["-m", "aiscale", "train", "--recipe", "laptop"])      # aiscale train --nproc 4, without torchrun

The rendezvous store lives in the parent, on a port that the system chose, so two jobs on one machine never fight over
a port and no rank has to start first. When a rank dies, the parent stops the others and says which one it was. When the
parent dies, the kernel kills the ranks (Linux). Ranks are forked from the parent if that is safe.
"""

from __future__ import annotations

import atexit
import functools
import gc
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from aiscale.distributed.failing import HANG_STATUS, LOST_STATUS
from aiscale.distributed.rendezvous import listen, serve
from aiscale.processes import die_with, usable_cores

if TYPE_CHECKING:
    import torch.distributed as dist

BAD_INPUT_STATUS = 2  #: exit status of `aiscale` after a one-line refusal
_INTERRUPTED_STATUS = 130  #: of a rank that was told to stop, and has saved


def rank_environment(rank: int, size: int) -> dict[str, str]:
    """The environment variables of rank `rank` of `size` on this machine, with its share of the cores."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, len(usable_cores()) // size)),
    }


def launch(
    nproc: int,
    argv: Sequence[str],
    env: Mapping[str, str] | None = None,
    *,
    warm_up: Callable[[], None] | None = None,
) -> int:
    """Run `python ARGV` as `nproc` connected ranks and wait; returns the exit status, 0 only if every rank's was 0.
    `warm_up` imports what ranks that run `-m MODULE` need; if it is safe, they are then forked from this process. In
    that case `env` must not hold variables that a library reads at import."""
    ranks, store = start_ranks(nproc, argv, env, warm_up=warm_up)
    interrupted = False
    with _passing_on_sigterm(ranks):
        while True:
            try:
                status = _wait(ranks, quiet=interrupted)
                del store
                return status
            except KeyboardInterrupt:
                # The terminal sends the signal to every rank as well; they finish their step and save. After a second
                # one they remove what they were writing, unless they wait for each other.
                if interrupted:
                    _stop(ranks, grace_s=1, first=signal.SIGINT)
                    return _INTERRUPTED_STATUS
                interrupted = True


def start_ranks(
    nproc: int, argv: Sequence[str], env: Mapping[str, str] | None = None, *, warm_up: Callable[[], None] | None = None
) -> tuple[list[subprocess.Popen | Forked], dist.TCPStore]:
    """The processes of `launch`, and the store at which they meet: keep it as long as they run."""
    listener, rendezvous = listen()
    start = _start_from_nothing
    if warm_up is not None and can_fork():
        warm_up()
        start = Forked if can_fork() else start  # an import may have started a thread
    base = {"AISCALE_LAUNCHER": "aiscale", **rendezvous, **(env or {})}
    ranks = [start(argv, {**base, **rank_environment(rank, nproc)}) for rank in range(nproc)]
    return ranks, serve(listener)  # after the forks: it starts a thread


def _start_from_nothing(argv: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, *argv], env={**os.environ, **env}, preexec_fn=functools.partial(die_with, os.getpid())
    )


@contextmanager
def _passing_on_sigterm(ranks: list[subprocess.Popen | Forked]) -> Iterator[None]:
    """A scheduler, or `timeout`, signals only the parent: pass it on to the ranks, so that they save."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals belong to the main thread
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: [process.send_signal(number) for process in ranks])
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _wait(ranks: list[subprocess.Popen | Forked], *, quiet: bool) -> int:
    """Wait for all ranks; at the first failure stop the others and name the rank."""
    try:
        while True:
            codes = [process.poll() for process in ranks]
            first = {rank for rank, code in enumerate(codes) if code}
            if first:
                codes = _settle(ranks)
                code, rank = culprit(codes, first)
                # Bad input, which fails all ranks alike, a stop that was asked for, or a hang: a rank has explained it.
                explained = set(codes) in ({BAD_INPUT_STATUS}, {_INTERRUPTED_STATUS}) or code == HANG_STATUS
                if not quiet and not explained:
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


def _settle(ranks: list[subprocess.Popen | Forked]) -> list[int | None]:
    """The exit statuses, after ranks that are about to fail had time to print why."""
    deadline = time.monotonic() + 0.5
    while True:
        codes = [process.poll() for process in ranks]
        alike = {code for code in codes if code is not None}
        has_time = alike in ({BAD_INPUT_STATUS}, {_INTERRUPTED_STATUS})
        if None not in codes or time.monotonic() > deadline + (15.0 if has_time else 0.0):
            return codes
        time.sleep(0.05)


def culprit(codes: Sequence[int | None], first: set[int]) -> tuple[int, int]:
    """(status, rank) of the rank to name: first one that reported a hang, then one that was killed (it explains the
    others' broken connections), last one that only lost a connection; among equals one in `first`, which failed
    first."""
    failed = [(code, rank) for rank, code in enumerate(codes) if code]
    order = lambda it: (it[0] != HANG_STATUS, it[0] > 0, it[0] == LOST_STATUS, it[1] not in first, it)  # noqa: E731
    return min(failed, key=order)


def _describe(code: int) -> str:
    if code < 0:
        return f"died: signal {-code} ({signal.Signals(-code).name})"
    return f"failed with exit status {code}"


def _stop(ranks: list[subprocess.Popen | Forked], grace_s: float = 3.0, first: int = signal.SIGTERM) -> None:
    # SIGKILL after a short grace: a rank that hangs in a collective does not answer the first signal.
    for process in ranks:
        if process.poll() is None:
            process.send_signal(first)
    deadline = time.monotonic() + grace_s
    for process in ranks:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


# Forking --------------------------------------------------------------------------------------------------------------
# Importing torch takes a second per rank, DeepSpeed or Megatron-Core two more. Forked ranks import nothing, and share
# the libraries' memory. Only the forking thread survives a fork, so `can_fork` refuses if there is a second thread, off
# Linux, and once CUDA is in use: then `launch` starts every rank as a new Python.


def can_fork() -> bool:
    """Whether a fork of this process is safe."""
    if sys.platform != "linux" or len(os.listdir("/proc/self/task")) > 1:
        return False
    torch = sys.modules.get("torch")
    if torch is None:
        return True
    # Some ways of asking for GPUs start CUDA, and so does asking whether it was started; a child can tell. Where the
    # answer was "none" (a login node, DeepSpeed's import), nothing has started.
    probe = os.fork()
    if probe == 0:
        os._exit(torch.cuda._is_in_bad_fork())
    return os.waitpid(probe, 0)[1] == 0 or torch.cuda.device_count() == 0


class Forked:
    """`python -m MODULE ARGUMENTS` in a forked child; the part of `subprocess.Popen` that `launch` uses."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        self.returncode: int | None = None
        sys.stdout.flush()  # or both processes would write what is buffered
        sys.stderr.flush()
        gc.freeze()  # keeps the collector from touching, and so copying, the parent's objects
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _become(argv, env, parent)

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while the process runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process to end; raises subprocess.TimeoutExpired."""
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.01)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _become(argv: Sequence[str], env: Mapping[str, str], parent: int) -> NoReturn:
    """Run `-m MODULE ...` in this child as a new Python would, and exit."""
    code = 1
    try:
        die_with(parent)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.update(env)
        _differ()
        flag, module, *arguments = argv
        assert flag == "-m", argv
        sys.argv = [module, *arguments]
        code = _run(module)
        threading._shutdown()  # waits for non-daemon threads
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _run(module: str) -> int:
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return 0
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
    except KeyboardInterrupt:
        return 130
    except BaseException:
        traceback.print_exc()
    return 1


def _differ() -> None:
    """Reseed and set threads as a new process would; do not delete the parent's temporary folders at exit."""
    for finalizer in weakref.finalize._registry:
        finalizer.atexit = False
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules and os.environ.get("OMP_NUM_THREADS", "").isdigit():
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
