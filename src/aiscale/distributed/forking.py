"""Forks ranks from a process that has imported their libraries; each behaves as a new Python would.

    if can_fork():
        warm_up()                                           # imports, but starts no thread
        ranks = [Forked(argv, env) for env in environments]

Importing torch takes a second per rank, DeepSpeed or Megatron-Core two more: eight ranks on two cores would spend a
quarter of a minute on it. Forked ranks import nothing and share the libraries' memory.

Only the forking thread survives a fork, so `can_fork` refuses if there is a second thread, off Linux, and once CUDA is
in use (CUDA does not survive a fork). Then `launch` starts every rank as a new Python.
"""

from __future__ import annotations

import atexit
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
from collections.abc import Mapping, Sequence
from typing import NoReturn

from aiscale.processes import die_with


def can_fork() -> bool:
    """Whether a fork of this process is safe."""
    if sys.platform != "linux" or len(os.listdir("/proc/self/task")) > 1:
        return False
    torch = sys.modules.get("torch")
    if torch is None:
        return True
    # Some ways of asking for GPUs start CUDA, and so does asking whether it was started; a child can tell.
    probe = os.fork()
    if probe == 0:
        os._exit(torch.cuda._is_in_bad_fork())
    return os.waitpid(probe, 0)[1] == 0


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
