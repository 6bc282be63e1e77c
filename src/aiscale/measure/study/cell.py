"""One rank of a study's cell: a trainer runs as a script, and what it takes is written down.

    python -m aiscale.measure.study.cell SPEC.json src/aiscale/train/ddp.py --steps 129 ...

As in Turing Technical Report 3: two epochs, of which the second is timed. An epoch is as many steps
as it takes to read the text once. Three steps come before. The first ends the time to get ready.
The memory that counts is the third's: then an optimizer has its states and DDP its buckets. On a
CPU torch's profiler sums all that the process allocates; the trainer is not asked what it holds.

SPEC.json: {"out": FOLDER, "epoch": its steps, "precision": "fp32", "limit_s": seconds}. Each rank
writes FOLDER/RANK.json, also where it fails.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import signal
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch

from aiscale.measure.study.grid import WARM_UP

STARTED_S = time.perf_counter()


class Meter:
    """Is called after each step."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch  #: its steps
        self.on_gpu = torch.cuda.is_available()
        self.figures: dict = {"steps": epoch}
        self.steps = 0
        self.marks: list[
            float
        ] = []  #: seconds at which steps ended, from the last one before the epochs
        self.counted_from_ns = 0
        self.profile = torch.autograd.profiler.profile(profile_memory=True)
        if not self.on_gpu:
            self.profile.__enter__()

    def after_step(self) -> None:
        self.steps += 1
        done = self.steps - WARM_UP  # of both epochs
        if done <= 0 or done % self.epoch == 0:
            self.synchronize()
        now_s = time.perf_counter()
        if self.steps == 1:
            self.figures["ready_s"] = now_s - STARTED_S
        if self.steps == WARM_UP - 1:
            self.begin_counting()
        if self.steps == WARM_UP:
            self.figures["peak_bytes"] = self.peak_bytes()
            now_s = time.perf_counter()
        if done >= 0:
            self.marks.append(now_s)
        if done == 2 * self.epoch:
            self.end()

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def begin_counting(self) -> None:
        self.counted_from_ns = time.time_ns()
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        """The most that was allocated at a time since `begin_counting`."""
        if self.on_gpu:
            return torch.cuda.max_memory_allocated()
        self.profile.__exit__(None, None, None)
        changes = []
        for event in self.profile.kineto_results.events():
            if event.name() == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU:
                changes.append((event.start_ns(), event.nbytes()))
        held = peak = 0
        for at_ns, nbytes in sorted(changes):
            held += nbytes
            peak = max(peak, held) if at_ns >= self.counted_from_ns else held
        return peak

    def end(self) -> None:
        first, second = self.marks[: self.epoch + 1], self.marks[self.epoch :]
        self.figures["first_epoch_s"] = first[-1] - first[0]
        self.figures["epoch_s"] = second[-1] - second[0]
        self.figures["step_s"] = statistics.median(b - a for a, b in pairwise(second))


def run_measured(script: str, epoch: int, precision: str) -> dict:
    """The figures of a trainer, which reads its options from sys.argv."""
    if precision == "tf32":  # no option of a trainer: torch multiplies so where it may
        if not torch.cuda.is_available():
            raise RuntimeError("tf32 is a precision of GPUs, and torch sees none here")
        torch.set_float32_matmul_precision("high")
    meter = Meter(epoch)
    from aiscale.train import (  # after sys.argv is the trainer's: it reads its name there
        job,
        record,
    )

    log = job.Job.log

    def log_and_mark(*arguments):
        log(*arguments)
        meter.after_step()

    job.Job.log = log_and_mark
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # Ctrl-C is no result of this cell
    signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + 15))
    runpy.run_path(script, run_name="__main__")
    machine, versions = record.machine(), record.versions()
    device = machine["processor"] if machine["device"] == "cpu" else machine["device"]
    facts = {"device": device, "cores": machine["cores"]}
    return meter.figures | facts | {name: versions[name] for name in ("python", "torch")}


def main(spec_file: str, script: str, *options: str) -> None:
    spec = json.loads(Path(spec_file).read_text())
    signal.setitimer(signal.ITIMER_REAL, spec["limit_s"])  # ends the rank, whatever it waits for
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or the profiler says when it starts and stops
    sys.argv = [script, *options]
    heard = io.StringIO()  # warnings of libraries, and the line in which a trainer refuses
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            with contextlib.redirect_stderr(heard):
                result = run_measured(script, spec["epoch"], spec["precision"])
    except (Exception, SystemExit) as error:
        result = {"status": "failed", "error": f"{type(error).__name__}: {error}"}
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate" in str(error):
            result["status"] = "out of memory"
        if isinstance(error, SystemExit):
            result["error"] = heard.getvalue().rpartition("aiscale: ")[2].strip()
    Path(spec["out"], f"{os.environ['RANK']}.json").write_text(json.dumps(result))
    if "status" in result:
        print(heard.getvalue(), end="", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
