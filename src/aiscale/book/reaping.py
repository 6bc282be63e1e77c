"""Ending everything that a notebook started, by a marker in the environment that all of it inherits.

Kernels, engines and ranks live in sessions of their own, so a signal to a process group does not reach them.
"""

from __future__ import annotations

import contextlib
import time

import psutil

MARKER = "AISCALE_BOOK"


def marked(run_id: str) -> list[psutil.Process]:
    """The living processes that carry the marker of a run."""
    return [process for process in psutil.process_iter() if _carries(process, run_id)]


def _carries(process: psutil.Process, run_id: str) -> bool:
    try:
        return process.environ().get(MARKER) == run_id and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, OSError):  # gone, or somebody else's
        return False


def reap(run_id: str, grace_s: float = 0.0) -> int:
    """Wait `grace_s` for the processes of a run to end by themselves, kill the rest; returns how many those were."""
    deadline = time.monotonic() + grace_s
    while (left := marked(run_id)) and time.monotonic() < deadline:
        time.sleep(0.05)
    killed = len(left)
    give_up = time.monotonic() + 5
    # Repeated, because a process may fork while it is being killed.
    while left and time.monotonic() < give_up:
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=0.2)
        left = marked(run_id)
    return killed
