"""Runs a program as connected ranks, and says how it ended: done, failed, or hanging, and where each rank stands.

    job = start("mine/01_files.py", ranks=2, seed=7)
    job.losses      # [(step, loss), ...] as rank 0 printed them
    job.ranks[1]    # what rank 1 read and computed, see witness.py

Ranks are forked from a process that has imported torch, so that a job takes a second.
"""

import contextlib
import json
import os
import random
import re
import signal
import socket
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from aiscale.processes import start_python

sys.path.insert(0, str(Path(__file__).parent))  # for witness.py and model.py
os.environ["OMP_NUM_THREADS"] = "1"

NEEDED = ["torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "torch.nn.parallel", "torch._dynamo"]
IDLE_S = 4  # no rank has computed for so long: the job hangs
LIMIT_S = 120


class Unmended(Exception):
    """Why a program is not mended yet: what a check found, and what speaks for it."""


@dataclass
class Job:
    folder: Path
    codes: list  # each rank's exit status, None for those that hang
    stacks: list  # of a job that hangs: each rank's position in the program, and in torch

    def said(self, rank, name="out"):
        return (self.folder / f"rank{rank}.{name}").read_text()

    @property
    def ranks(self):
        files = [self.folder / f"rank{rank}.json" for rank in range(len(self.codes))]
        return [json.loads(file.read_text()) if file.exists() else {"steps": []} for file in files]

    def logged(self, what, rank=0):
        """The numbers that a rank printed after a word: [(step, number), ...]."""
        found = re.findall(rf"step (\d+) .*?\b{what} (\S+)", self.said(rank))
        return [(int(step), float(number)) for step, number in found]

    @property
    def losses(self):
        return self.logged("loss")

    def trouble(self):
        """How a job failed, in a line; empty if it did not."""
        if None in self.codes:
            return "it hangs: " + "; ".join(f"rank {rank} stands in {at}" for rank, at in enumerate(self.stacks))
        failed = [rank for rank, code in enumerate(self.codes) if code and code != -signal.SIGTERM]
        errors = {rank: (self.said(rank, "err").strip().splitlines() or ["no message"])[-1] for rank in failed}
        # A rank that only lost its connection explains nothing.
        first = [rank for rank in failed if not re.search("onnection|peer", errors[rank])] or failed
        begun = ", ".join(f"rank {rank} {seen['begun']}" for rank, seen in enumerate(self.ranks) if "begun" in seen)
        return f"rank {first[0]} fails: {errors[first[0]][:200]} (steps begun: {begun})" if failed else ""


def start(program, ranks, folder=None, **arguments):
    """Run a program on some ranks; arguments become options: steps=3 is --steps 3."""
    folder = Path(folder or tempfile.mkdtemp(prefix="clinic-"))
    words = [word for name, value in arguments.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
    }
    envs = [{**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    argv = ["-m", "witness", str(program), *words]
    jobs = [start_python(argv, env, preload=NEEDED, cwd=folder) for env in envs]
    try:
        stacks = _watch(jobs, folder)
        return Job(folder, [job.exitcode for job in jobs], stacks)
    finally:
        for job in jobs:
            job.kill()
            job.join()


def _free_port():
    """A port below those that Linux gives to connections, so that none takes it before rank 0 listens."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", port))
            return port


def _watch(jobs, folder):
    """Wait for the ranks; if they hang, return where each of them stands."""
    begin, failed, past = time.monotonic(), None, deque()
    while None in (codes := [job.exitcode for job in jobs]):
        time.sleep(0.05)
        now = time.monotonic()
        past.append((now, *_activity([job.pid for job, code in zip(jobs, codes, strict=True) if code is None])))
        failed = failed or (now if any(codes) else None)
        if failed and now > failed + 1:
            break  # as torchrun, which ends the others when one has failed
        while past[0][0] < now - IDLE_S:
            past.popleft()
        # gloo's own threads wake up now and then. On a busy machine a rank that computes may wait for a core: it is
        # "busy" all the same.
        quiet = sum(busy for _, busy, _ in past) < len(past) / 4 and past[-1][2] - past[0][2] < 0.1
        if (now > begin + IDLE_S and quiet) or now > begin + LIMIT_S:
            return [_ask(job, folder / f"rank{rank}.err") for rank, job in enumerate(jobs)]
    for job in jobs:
        job.terminate()
        job.join(10)
    return []


def _activity(pids):
    """(whether a thread of these processes is running or wants to, their CPU seconds)."""
    busy, ticks = False, 0
    for pid in pids:
        for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue  # the thread has ended
            busy, ticks = busy or fields[0] in "RD", ticks + int(fields[11]) + int(fields[12])
    return busy, ticks / os.sysconf("SC_CLK_TCK")


def _ask(job, file):
    """Where a rank stands, as py-spy would say it: the program's own line, and what it called."""
    if job.exitcode is not None:
        return "no line: it has ended"
    os.kill(job.pid, signal.SIGUSR1)
    time.sleep(0.5)
    frames = re.findall(r'File "(.*)", line (\d+) in (\S+)', file.read_text().rpartition("most recent call first")[2])
    inner = "C++"
    for path, line, name in frames:
        if "/site-packages/" not in path and Path(path).name != "witness.py":
            return f"{inner}, called by line {line} ({name})"
        inner = name if name != "wrapper" else inner
    return inner
