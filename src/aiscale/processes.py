"""Processes of the operating system: their cores, parents, markers and networks.

    usable_cores()                          # [0, 1]: those that this process may use
    die_with(os.getppid())                  # in a child: never outlive the parent
    kill_marked("AISCALE_CLUSTER", "3fa9")  # all processes that inherited this variable with this value
    network_namespace()                     # (["unshare", "--net"], ""), or ([], why there is none)

Only the standard library and no module of ours: scripts that must start in 10 ms import it.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import subprocess
import sys
import time

#: Libraries read these when they are loaded, and start that many threads.
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # at import: a forked child should load nothing
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def usable_cores() -> list[int]:
    """The numbers of the cores that this process may run on, in order."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when `parent` dies, even by SIGKILL. Does nothing off Linux."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # the parent is already dead


def marked(variable: str, value: str) -> list[int]:
    """The user's processes that inherited `variable` with `value`, without zombies and this process."""
    mark = f"{variable}={value}"
    if not os.path.isdir("/proc/self"):  # macOS: ps shows the environment of one's own processes
        listing = subprocess.run(["ps", "-Ewwax", "-o", "pid=,command="], capture_output=True, text=True).stdout
        pids = [int(line.split(None, 1)[0]) for line in listing.splitlines() if mark in line]
    else:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit() and _carries(name, mark.encode())]
    return [pid for pid in pids if pid != os.getpid()]


def _carries(pid: str, mark: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as environ:  # empty for a zombie
            return mark in environ.read().split(b"\0")
    except OSError:  # it has ended, or belongs to somebody else
        return False


def kill_marked(variable: str, value: str, timeout_s: float = 5.0) -> bool:
    """Kill all marked processes; True when none is left. Repeats, because a process may fork while it is killed."""
    deadline = time.monotonic() + timeout_s
    while pids := marked(variable, value):
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@functools.cache
def network_namespace() -> tuple[list[str], str]:
    """(command that runs a program in a new network namespace, ""), or ([], why there is none)."""
    why = "no unshare here"
    for command in (["unshare", "--net"], ["unshare", "--map-root-user", "--net"]):
        try:
            done = subprocess.run([*command, "true"], capture_output=True, text=True, timeout=20)
        except OSError:
            break
        if done.returncode == 0:
            return command, ""
        why = f"network namespaces are not allowed here: {done.stderr.strip()}"
    return [], why
