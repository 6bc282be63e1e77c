"""Processes that need not import torch: a starter imports it once, and tests' commands are forked from it.

    done = run(["-m", "aiscale", "train"], cwd=folder, env=env, timeout=60)

Importing what training needs takes 3 s of a core, with DeepSpeed 4 and with Megatron-Core 5, and the tests start some
hundred commands. In the list of processes a forked command has its starter's line and environment: a test that looks
there starts a fresh Python, and so does one that is about starting.
"""

from __future__ import annotations

import atexit
import functools
import importlib
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

from aiscale.distributed.forking import Forked, can_fork

TORCH = ("torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.pipelining", "safetensors.torch")
#: Strategies whose libraries change torch as they are imported, and so have a starter of their own.
APART = ("zero", "megatron")
#: Variables that decide something while Python or a library is imported; PYTHONPATH is seen to.
READ_EARLY = ("PYTHON", "LD_", "OPENBLAS_", "MKL_", "TORCH_", "DS_", "HF_", "CUDA_", "HIP_", "ROCR_")

AT_FIRST = dict(os.environ)


def run(
    argv: Sequence[str],
    *,
    timeout: float,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    strategy: str = "",
) -> subprocess.CompletedProcess:
    """Run `python -m MODULE ...` as `subprocess.run` does, with captured text. `strategy`: what it will train with."""
    cwd, env = os.path.abspath(cwd or "."), dict(os.environ if env is None else env)
    if sys.platform != "linux" or _read_early(env) != _read_early(AT_FIRST):
        command = [sys.executable, *argv]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=cwd, env=env)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        order = {"argv": [*argv], "cwd": cwd, "env": env}
        status = _ask(_starter(strategy if strategy in APART else ""), order, (out, err), timeout)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    if status is None:
        raise subprocess.TimeoutExpired(argv, timeout, *texts)
    return subprocess.CompletedProcess(argv, status, *texts)


def _read_early(env: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in env.items() if key.startswith(READ_EARLY) and key != "PYTHONPATH"}


def _ask(starter: socket.socket, order: dict, files: Sequence, timeout: float) -> int | None:
    """The exit status of a command; None where it had to be killed."""
    answers, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with answers, its:
        socket.send_fds(starter, [json.dumps(order).encode()], [*(file.fileno() for file in files), its.fileno()])
        its.close()
        pid = json.loads(answers.recv(32))
        answers.settimeout(timeout)
        try:
            return json.loads(answers.recv(32))
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)  # what it started dies with it
            answers.settimeout(None)
            answers.recv(32)
            return None


@functools.cache
def _starter(strategy: str) -> socket.socket:
    """The connection to a starter, which ends when this process does."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # an order is one message
    with its:
        env = {**AT_FIRST, "OPENBLAS_NUM_THREADS": "1"}  # numpy's threads would forbid forking
        command = [sys.executable, __file__, str(its.fileno()), strategy]
        process = subprocess.Popen(command, pass_fds=[its.fileno()], env=env)
    atexit.register(lambda: (ours.close(), process.wait()))
    return ours


def _serve(orders: socket.socket) -> None:
    """Start what is asked for, and tell whoever asked its process id and, in the end, its exit status."""
    jobs, own = {}, [os.dup(1), os.dup(2)]
    while True:
        if select.select([orders], [], [], 0.02 if jobs else None)[0]:
            message, files, _, _ = socket.recv_fds(orders, 2**20, 3)
            if not message:
                return
            *outputs, answers = files
            job = _start(json.loads(message), outputs, own)
            jobs[job] = socket.socket(fileno=answers)
            jobs[job].send(str(job.pid).encode())
        for job in [job for job in jobs if job.poll() is not None]:
            with jobs.pop(job) as answers:
                answers.send(str(job.returncode).encode())


def _start(order: dict, outputs: list[int], own: list[int]) -> Forked | subprocess.Popen:
    """Fork a command that has its own folder, environment, path of modules and output."""
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    sys.path[:] = [order["cwd"], *filter(None, order["env"].get("PYTHONPATH", "").split(os.pathsep)), *PATH]
    for file, number in zip(outputs, (1, 2), strict=True):
        os.dup2(file, number)
        os.close(file)
    try:
        return Forked(order["argv"], {}) if can_fork() else subprocess.Popen([sys.executable, *order["argv"]])
    finally:
        for file, number in zip(own, (1, 2), strict=True):
            os.dup2(file, number)


if __name__ == "__main__":
    PATH = sys.path[1:]
    for name in TORCH:
        importlib.import_module(name)
    if sys.argv[2]:
        from aiscale.parallel import preload

        preload(sys.argv[2])
    _serve(socket.socket(fileno=int(sys.argv[1])))
