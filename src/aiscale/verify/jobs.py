"""Runs of `fit` that tests start; they go with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from aiscale.processes import start_python

TIMEOUT_S = 180
_NEEDED = ["torch._dynamo", "aiscale.train", *(f"aiscale.parallel.{name}" for name in ("ddp", "fsdp", "pipeline"))]


def train(arguments: list[str], log: Path) -> int:
    """The exit status of `aiscale ARGUMENTS`, whose output goes to `log`; raises subprocess.TimeoutExpired."""
    argv = ["-m", "aiscale", *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("ab") as file:
        job = start_python(argv, env, preload=_NEEDED, stdout=file.fileno(), stderr=file.fileno())
        job.join(TIMEOUT_S)
        if job.exitcode is None:
            job.kill()  # its ranks end with it
            raise subprocess.TimeoutExpired([sys.executable, *argv], TIMEOUT_S)
    return job.exitcode
