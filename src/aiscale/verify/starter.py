"""A process that has imported a strategy's libraries and forks the jobs of the rungs that use them.

    python -m aiscale.verify.starter megatron < jobs.jsonl

Every job is a fresh process, `aiscale train ...` as a user starts it, that need not import: twenty jobs cost the
imports of one. It reads {"job": number, "arguments": [...], "log": path} or {"kill": number}, a line each, and writes
{"job": number, "status": exit status} when one has ended. When its input ends, it ends, and with it all jobs.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import aiscale.train  # noqa: F401  for every job
from aiscale.distributed.forking import Forked, can_fork
from aiscale.parallel import preload


def main(strategies: list[str]) -> None:
    """Serve until standard input ends."""
    for strategy in strategies:
        preload(strategy)
    jobs: dict[int, Forked | subprocess.Popen] = {}
    for order in _orders():
        if order and "kill" in order:
            if order["kill"] in jobs:
                jobs[order["kill"]].kill()  # its ranks die with it
        elif order:
            jobs[order["job"]] = _start(["-m", "aiscale", *order["arguments"]], Path(order["log"]))
        for number in [number for number, job in jobs.items() if job.poll() is not None]:
            print(json.dumps({"job": number, "status": jobs.pop(number).returncode}), flush=True)


def _orders() -> Iterator[dict | None]:
    """The lines of standard input as they come; None now and then, to look after the jobs."""
    waiting, rest = selectors.DefaultSelector(), b""
    waiting.register(0, selectors.EVENT_READ)
    while True:
        if not waiting.select(timeout=0.02):
            yield None
            continue
        read = os.read(0, 65536)
        if not read:
            return
        *lines, rest = (rest + read).split(b"\n")
        yield from map(json.loads, lines)


def _start(argv: list[str], log: Path) -> Forked | subprocess.Popen:
    if can_fork():
        return Forked(argv, {}, log)
    with log.open("ab") as file:
        return subprocess.Popen([sys.executable, *argv], stdin=subprocess.DEVNULL, stdout=file, stderr=file)


if __name__ == "__main__":
    main(sys.argv[1:])
