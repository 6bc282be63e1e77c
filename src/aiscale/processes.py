"""Processes of the operating system: their start, cores, parents and markers.

Only the standard library and no module of ours: scripts that must start in 10 ms import it.
Importing what training needs takes three seconds of a core. So `start_python` forks:
multiprocessing's forkserver, a process without threads, imports it once. Environment, folder and
output are those of the caller all the same.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

#: Libraries read these when they are loaded, and start that many threads.
THREAD_VARIABLES = [f"{library}_NUM_THREADS" for library in ("OMP", "MKL", "OPENBLAS", "NUMEXPR")]
THREAD_VARIABLES += ["VECLIB_MAXIMUM_THREADS"]

INTERRUPTED_STATUS = 130  #: exit status of a process that Ctrl-C has ended
#: A process that has used one of these, or on macOS one of Apple's frameworks, cannot be forked.
GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
_OF_RANKS = {signal.SIGINT, signal.SIGTERM}  #: signals on which ranks save
_starting = threading.Lock()

# At import: a forked child should load nothing.
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def usable_cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def die_with(parent: int) -> None:
    """On Linux ask the kernel to kill this process when `parent` dies, even by SIGKILL."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # the parent is already dead


def marked(variable: str, value: str) -> list[int]:
    """The user's processes that inherited `variable` with `value`; no zombies, nor this process."""
    mark = f"{variable}={value}"
    if not os.path.isdir("/proc/self"):  # macOS: ps shows the environment of one's own processes
        listing = subprocess.run(
            ["ps", "-Ewwax", "-o", "pid=,command="], capture_output=True, text=True
        ).stdout
        pids = [int(line.split(None, 1)[0]) for line in listing.splitlines() if mark in line]
    else:
        pids = [
            int(name)
            for name in os.listdir("/proc")
            if name.isdigit() and _carries(name, mark.encode())
        ]
    return [pid for pid in pids if pid != os.getpid()]


def _carries(pid: str, mark: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as environ:  # empty for a zombie
            return mark in environ.read().split(b"\0")
    except OSError:  # it has ended, or belongs to somebody else
        return False


def kill_marked(variable: str, value: str, timeout_s: float = 5.0) -> bool:
    """Kill all marked processes; True when none is left.

    Repeats, because a process may fork while it is killed.
    """
    deadline = time.monotonic() + timeout_s
    while pids := marked(variable, value):
        for pid in pids:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def pss_bytes(pid: int) -> int:
    """The proportional set size of a process: of a page that n processes share it counts 1/n.

    0 if the process has ended. Linux alone knows it.
    """
    with suppress(OSError), open(f"/proc/{pid}/smaps_rollup") as rollup:
        for line in rollup:
            name, value, *_ = line.split()
            if name == "Pss:":
                return 1024 * int(value)
    return 0


# `python ARGV`, forked from a process that has imported what it needs ----------------------------


def start_python(
    argv: Sequence[str],
    env: Mapping[str, str] | None = None,
    *,
    preload: Sequence[str] = (),
    name: str = "python",
    cwd: str | os.PathLike = ".",
    stdout: int = 1,
    stderr: int = 2,
) -> BaseProcess:
    """Start `python ARGV` (-m MODULE, -c CODE or a file) without input.

    It ends when this process does. It is forked from a server, which this process's first call
    starts with that call's environment, and which imports that call's `preload`. Without `preload`,
    on macOS and on a machine with GPUs it is a new Python. `env` is its whole environment, by
    default this process's. `name` is shown above its traceback. `stdout`, `stderr`: descriptors.
    """
    import multiprocessing  # takes 20 ms, which the cleaner of a cluster need not spend

    env = dict(os.environ if env is None else env)
    process = multiprocessing.get_context(start_method(preload)).Process(
        target=_become,
        name=name,
        args=([*argv], env, os.path.abspath(cwd), [_sent(stdout), _sent(stderr)]),
    )
    with _ready_for(env):
        process.start()
    return process


def warm_up(preload: Sequence[str], env: Mapping[str, str]) -> None:
    """Start the server of `start_python`, and do not wait until it has imported `preload`."""
    from multiprocessing import forkserver

    if start_method(preload) == "forkserver":
        with _ready_for(env):
            forkserver.ensure_running()


def end_server() -> None:
    """End the server of `start_python`, which holds 0.2 GB, with all that it has forked.

    The next call then starts another one.
    """
    from multiprocessing import forkserver

    server = forkserver._forkserver
    if server._forkserver_pid:
        with suppress(ProcessLookupError):
            os.kill(server._forkserver_pid, signal.SIGKILL)
        server._stop()  # waits for its end


def give_back_memory() -> None:
    """Hand what this process has freed to the system: glibc keeps it, hundreds of MB after tensors
    of many sizes."""
    gc.collect()
    if hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)


@contextmanager
def _ready_for(env: Mapping[str, str]) -> Iterator[None]:
    """What a child or the server is to take from this process."""
    from multiprocessing import resource_tracker

    with _starting:
        resource_tracker.ensure_running()  # with this process's environment, for it lives as long
        main, before = sys.modules["__main__"], {key: os.environ.get(key) for key in env}
        # Or the child would first run the caller's script again.
        sys.modules["__main__"] = types.ModuleType("__main__")
        # Blocked until the child can take them, and in the server for ever: a signal to the whole
        # group (Ctrl-C, `timeout`) is for the ranks, which would die with it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_RANKS)
        os.environ.update(env)
        try:
            yield
        finally:
            for key, value in before.items():
                os.environ.pop(key) if value is None else os.environ.update({key: value})
            sys.modules["__main__"] = main
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def start_method(preload: Sequence[str]) -> str:
    from multiprocessing import forkserver

    if not preload or sys.platform != "linux" or any(map(os.path.exists, GPU_DEVICES)):
        return "spawn"
    if forkserver.get_inherited_fds() is None:
        forkserver.set_forkserver_preload(["aiscale.uncollected", *preload])
        return "forkserver"
    for module in preload:  # the server has forked this process, which can fork, too
        with suppress(ImportError):  # who needs it reports it
            importlib.import_module(module)
    return "fork"


def _sent(number: int) -> Connection:
    """A copy of a file descriptor that multiprocessing hands to a child, however it starts it."""
    from multiprocessing.connection import Connection

    return Connection(os.dup(number))


def _become(argv: list[str], env: dict[str, str], cwd: str, files: list[Connection]) -> None:
    """Run `python ARGV` in this child as a new Python would."""
    import multiprocessing.forkserver

    # The server lives as long as a process holds this end of its pipe. Ours would keep it alive
    # when the caller is killed; without it the server ends, and with the server its children.
    server = multiprocessing.forkserver._forkserver
    if (
        multiprocessing.get_start_method() == "forkserver"
        and server._forkserver_alive_fd is not None
    ):
        os.close(server._forkserver_alive_fd)
    die_with(os.getppid())
    atexit._clear()  # what a parent would do at its end
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _OF_RANKS)
    multiprocessing.set_start_method(None, force=True)
    for number, file in enumerate(files, 1):
        os.dup2(file.fileno(), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules and env.get("OMP_NUM_THREADS", "").isdigit():
        sys.modules["torch"].set_num_threads(int(env["OMP_NUM_THREADS"]))
    gc.freeze()  # keeps the collector from touching, and so copying, memory that is shared
    gc.enable()  # see uncollected.py
    try:
        _run(argv, cwd)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED_STATUS)
    finally:
        atexit._run_exitfuncs()


def _run(argv: list[str], cwd: str) -> None:
    """As python's command line does."""
    what, *rest = argv
    home = cwd if what in ("-m", "-c") else os.path.dirname(os.path.join(cwd, what))
    sys.path[:0] = [home, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv = rest if what == "-m" else ["-c", *rest[1:]] if what == "-c" else argv
    if what == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif what == "-c":
        exec(rest[0], {"__name__": "__main__"})
    else:
        runpy.run_path(what, run_name="__main__")
