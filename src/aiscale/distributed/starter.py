"""Commands that need not import torch: one process imports it, and each command is forked from that.

    with Starter("import aiscale.train") as starter:
        done = starter.run(["-m", "aiscale", "train"], cwd=folder, env=env, timeout=60)    # as subprocess.run

Importing what training needs takes 3 s of a core, with DeepSpeed 4 and with Megatron-Core 5: twenty commands cost the
imports of one. Off Linux every command is a new Python. In the list of processes a forked command has its starter's
line and environment: whoever looks there starts a new Python, and so does a test of starting.
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

from aiscale.distributed.forking import Forked, can_fork

#: Variables that decide something while Python or a library is imported; PYTHONPATH is seen to.
READ_EARLY = ("PYTHON", "LD_", "OPENBLAS_", "MKL_", "TORCH_", "DS_", "HF_", "CUDA_", "HIP_", "ROCR_")


class StarterError(RuntimeError):
    """The process that forks has ended; the message is one line."""


class Starter:
    """This side of it. Its methods may be called from several threads."""

    def __init__(
        self,
        warm_up: str,
        *,
        env: Mapping[str, str] | None = None,
        python: Sequence[str] = (sys.executable,),
        stderr: IO | None = None,
    ) -> None:
        """warm_up: code that imports what commands will need, and starts no thread. env: what it finds while it does;
        a command with other variables of READ_EARLY is a new Python. stderr: where the starter itself writes."""
        self.env, self._process = dict(os.environ if env is None else env), None
        if sys.platform != "linux":
            return
        self._orders, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # an order is one message
        with its:
            self._process = subprocess.Popen(
                [*python, "-m", "aiscale.distributed.starter", str(its.fileno()), warm_up],
                pass_fds=[its.fileno()],
                env={**self.env, "OPENBLAS_NUM_THREADS": "1"},  # numpy's threads would forbid forking
                stdin=subprocess.DEVNULL,
                stderr=stderr,
            )

    def __enter__(self) -> Starter:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """End it, and with it the commands that still run."""
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
        """The exit status of `python -m MODULE ...`, as of `subprocess.call`: killed if it is not in time."""
        cwd, env = os.path.abspath(cwd or "."), dict(self.env if env is None else env)
        if self._process is None or _read_early(env) != _read_early(self.env):
            files = {"stdin": subprocess.DEVNULL, "stdout": stdout, "stderr": stderr}
            return subprocess.call([sys.executable, *argv], timeout=timeout, cwd=cwd, env=env, **files)
        order = json.dumps({"argv": [*argv], "cwd": cwd, "env": env}).encode()
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
                os.kill(pid, signal.SIGKILL)  # what it started dies with it
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
    """Start what is asked for, and tell whoever asked its process id and, in the end, its exit status."""
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
        pass  # whoever asked has stopped waiting


def _start(order: dict, outputs: list[int], own: list[int], path: list[str]) -> Forked | subprocess.Popen:
    """Fork a command that has its own folder, environment, path of modules and output."""
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    sys.path[:] = [order["cwd"], *filter(None, order["env"].get("PYTHONPATH", "").split(os.pathsep)), *path]
    for file, number in zip(outputs, (1, 2), strict=True):
        os.dup2(file, number)
        os.close(file)
    try:
        return Forked(order["argv"], {}) if can_fork() else subprocess.Popen([sys.executable, *order["argv"]])
    finally:
        for file, number in zip(own, (1, 2), strict=True):
            os.dup2(file, number)


if __name__ == "__main__":
    exec(sys.argv[2])  # as `python -c` does
    _serve(socket.socket(fileno=int(sys.argv[1])))
