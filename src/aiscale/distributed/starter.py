"""Runs many `python -m` commands without importing torch each time: one process imports it, each command is a fork.

    with Starter("import aiscale.train") as starter:
        done = starter.run(["-m", "aiscale", "train"], cwd=folder, env=env, timeout=60)    # as subprocess.run

Importing what training needs takes 3 s of a core, with DeepSpeed 4 and with Megatron-Core 5. Off Linux every command is
a new Python. `ps` shows a forked command with its starter's command line and environment: a test that looks at either,
or at starting itself, needs a new Python.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from aiscale.distributed.spawn import Forked, can_fork

#: Prefixes of variables that are read while Python or a library is imported; PYTHONPATH is handled by `_start`.
READ_EARLY = ("PYTHON", "LD_", "OPENBLAS_", "MKL_", "TORCH_", "DS_", "HF_", "CUDA_", "HIP_", "ROCR_")


class StarterError(RuntimeError):
    """The forking process has ended; the message is one line."""


class Starter:
    """The caller's side. Its methods may be called from several threads."""

    def __init__(
        self,
        warm_up: str,
        *,
        env: Mapping[str, str] | None = None,
        python: Sequence[str] = (sys.executable,),
        stderr: IO | None = None,
    ) -> None:
        """warm_up: code that imports what commands will need, and starts no thread. env: the environment at import;
        a command with other READ_EARLY variables gets a new Python. python: how one is started. stderr: the starter's
        own."""
        self.env, self._python, self._process = dict(os.environ if env is None else env), [*python], None
        if sys.platform != "linux":
            return
        self._orders, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # one packet per command
        with its:
            self._process = subprocess.Popen(
                [*python, "-m", "aiscale.distributed.starter", str(its.fileno()), warm_up],
                pass_fds=[its.fileno()],
                env={**self.env, "OPENBLAS_NUM_THREADS": "1"},  # numpy's threads would prevent forking
                stdin=subprocess.DEVNULL,
                stderr=stderr,
            )

    def __enter__(self) -> Starter:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        if self._process:
            self._orders.close()
            self._process.wait()

    def run(
        self, argv: Sequence[str], *, timeout: float, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess:
        """Run `python -m MODULE ...` as `subprocess.run` does, with captured text."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:

            def texts() -> list[str]:
                return [(file.seek(0), file.read())[1].decode() for file in (out, err)]

            try:
                status = self.call(argv, stdout=out, stderr=err, timeout=timeout, cwd=cwd, env=env)
            except subprocess.TimeoutExpired:
                raise subprocess.TimeoutExpired(argv, timeout, *texts()) from None
            return subprocess.CompletedProcess(argv, status, *texts())

    def call(
        self,
        argv: Sequence[str],
        *,
        stdout: IO,
        stderr: IO,
        timeout: float,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> int:
        """The exit status of `python -m MODULE ...`, as `subprocess.call`; killed after `timeout` seconds."""
        cwd, env = os.path.abspath(cwd or "."), dict(self.env if env is None else env)
        if self._process is None or _read_early(env) != _read_early(self.env):
            files = {"stdin": subprocess.DEVNULL, "stdout": stdout, "stderr": stderr}
            return subprocess.call([*self._python, *argv], timeout=timeout, cwd=cwd, env=env, **files)
        order = json.dumps({"python": self._python, "argv": [*argv], "cwd": cwd, "env": env}).encode()
        answers, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with answers, its:
            try:
                socket.send_fds(self._orders, [order], [stdout.fileno(), stderr.fileno(), its.fileno()])
            except OSError:
                raise StarterError(f"the starter has ended with status {self._process.wait()}") from None
            its.close()
            pid = self._number(answers)
            answers.settimeout(timeout)
            try:
                return self._number(answers)
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)  # its children die with it
                answers.settimeout(None)
                self._number(answers)
                raise subprocess.TimeoutExpired(argv, timeout) from None

    def _number(self, answers: socket.socket) -> int:
        if answer := answers.recv(32):
            return int(answer)
        raise StarterError(f"the starter has ended with status {self._process.wait()}")


def _read_early(env: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in env.items() if key.startswith(READ_EARLY) and key != "PYTHONPATH"}


def _serve(orders: socket.socket) -> None:
    """Start each command asked for, and send back its process id and, later, its exit status."""
    jobs, own, path = {}, [os.dup(1), os.dup(2)], sys.path[1:]
    while True:
        if select.select([orders], [], [], 0.02 if jobs else None)[0]:
            message, files, _, _ = socket.recv_fds(orders, 2**20, 3)
            if not message:
                return
            *outputs, answers = files
            job = _start(json.loads(message), outputs, own, path)
            jobs[job] = socket.socket(fileno=answers)
            _answer(jobs[job], job.pid)
        for job in [job for job in jobs if job.poll() is not None]:
            with jobs.pop(job) as answers:
                _answer(answers, job.returncode)


def _answer(answers: socket.socket, number: int) -> None:
    try:
        answers.send(str(number).encode())
    except OSError:
        pass  # the caller has stopped waiting


def _start(order: dict, outputs: list[int], own: list[int], path: list[str]) -> Forked | subprocess.Popen:
    """Fork a command with its own folder, environment, module path and output."""
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    sys.path[:] = [order["cwd"], *filter(None, order["env"].get("PYTHONPATH", "").split(os.pathsep)), *path]
    for file, number in zip(outputs, (1, 2), strict=True):
        os.dup2(file, number)
        os.close(file)
    try:
        return Forked(order["argv"], {}) if can_fork() else subprocess.Popen([*order["python"], *order["argv"]])
    finally:
        for file, number in zip(own, (1, 2), strict=True):
            os.dup2(file, number)


if __name__ == "__main__":
    exec(sys.argv[2])  # as `python -c` does
    _serve(socket.socket(fileno=int(sys.argv[1])))
