"""When a rank fails, the others do not wait for it, and the error is printed once.

    raise alike(error)                          # on all ranks at once, after they have agreed on it
    alone = not failed_alike(error, world)      # did all ranks fail, as with a wrong setting?
    end_now(status)                             # if not: exit without waiting for the ranks that still work

A normal exit may hang: MPI_Finalize, which runs when Python ends, is a collective.
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct
import sys
import termios
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from aiscale.distributed.connect import World

#: Exit status of a rank that fails only because it lost its connection to another one.
LOST_STATUS = 75
#: Exit status of the rank that has printed which ranks did not arrive (`hangs`).
HANG_STATUS = 76
_LOST = (
    "closed by peer",
    "reset by peer",
    "Broken pipe",
    "Socket closed",
    "Timed out waiting",
    "remote process exited",
)


def lost_another_rank(error: BaseException) -> bool:
    """Whether `error` is what gloo or NCCL says when another rank has died or does not answer."""
    text = str(error)
    return isinstance(error, RuntimeError) and ("gloo" in text or "NCCL" in text) and tells_of_another_rank(text)


def tells_of_another_rank(message: str) -> bool:
    """Whether a rank's message is only that another one did not come, or has gone: it is not the cause."""
    return any(words in message for words in _LOST)


def alike(error: Exception) -> Exception:
    """Mark `error` as raised on all ranks, so that `failed_alike` need not wait for the others."""
    error.failed_alike = True
    return error


def failed_alike(error: BaseException, world: World, timeout_s: float = 5.0) -> bool:
    """Whether all ranks call this within `timeout_s`: then none has to be ended, and rank 0 may report for all. An
    error marked by `alike` answers at once."""
    if world.size == 1 or getattr(error, "failed_alike", False):
        return True
    if lost_another_rank(error) or world.store is None:
        return False
    deadline = time.monotonic() + timeout_s
    try:
        failed = world.store.add("aiscale/failed", 1)
        while failed < world.size and time.monotonic() < deadline:
            time.sleep(0.05)
            failed = world.store.add("aiscale/failed", 0)
        return failed >= world.size
    except RuntimeError:
        return True  # the store lives in rank 0, which leaves early only when it has seen that all failed


def end_now(status: int) -> NoReturn:
    """End this process, and under MPI its whole job, without waiting for any other rank."""
    sys.stdout.flush()
    sys.stderr.flush()
    MPI = getattr(sys.modules.get("mpi4py"), "MPI", None)
    if MPI is not None and MPI.Is_initialized() and not MPI.Is_finalized():
        # mpiexec drops unread output when a job aborts: let the message through first.
        _wait_until_read()
        time.sleep(0.5)
        MPI.COMM_WORLD.Abort(status)
    os._exit(status)


def _wait_until_read(timeout_s: float = 15.0) -> None:
    """Wait until the reader of this process's output pipes has read everything."""
    deadline = time.monotonic() + timeout_s
    for fd in (1, 2):
        with suppress(OSError):
            while stat.S_ISFIFO(os.fstat(fd).st_mode) and time.monotonic() < deadline:
                (waiting,) = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))
                if not waiting:
                    break
                time.sleep(0.02)


def end_job_on_uncaught_error() -> None:
    """From now on an uncaught exception ends the MPI job instead of leaving the other ranks hanging."""
    show = sys.excepthook

    def show_and_end(kind, error, trace) -> None:
        show(kind, error, trace)
        if sys.excepthook is show_and_end:  # else a later hook called us, and has yet to print
            end_now(1)

    sys.excepthook = show_and_end
