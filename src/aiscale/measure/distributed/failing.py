"""When a rank fails, the others do not wait for it, and the error is printed once.

A normal exit may hang: MPI_Finalize, which runs when Python ends, is a collective.
"""

from __future__ import annotations

import os
import sys
import time
from typing import NoReturn

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
    return (
        isinstance(error, RuntimeError)
        and ("gloo" in text or "NCCL" in text)
        and tells_of_another_rank(text)
    )


def tells_of_another_rank(message: str) -> bool:
    """Whether a rank says only that another did not come, or has gone: that is not the cause."""
    return any(words in message for words in _LOST)


def alike(error: Exception) -> Exception:
    """Mark `error` as raised on all ranks: then `World.failed_alike` need not wait for others."""
    error.failed_alike = True
    return error


def end_now(status: int) -> NoReturn:
    """End this process, and under MPI its whole job, without waiting for any other rank."""
    sys.stdout.flush()
    sys.stderr.flush()
    MPI = getattr(sys.modules.get("mpi4py"), "MPI", None)
    if MPI is not None and MPI.Is_initialized() and not MPI.Is_finalized():
        time.sleep(1.0)  # mpiexec drops what it has not read when a job aborts
        MPI.COMM_WORLD.Abort(status)
    os._exit(status)


def end_job_on_uncaught_error() -> None:
    """From now on an uncaught exception ends the MPI job, so that no other rank hangs."""
    show = sys.excepthook

    def show_and_end(kind, error, trace) -> None:
        show(kind, error, trace)
        if sys.excepthook is show_and_end:  # else a later hook called us, and has yet to print
            end_now(1)

    sys.excepthook = show_and_end
