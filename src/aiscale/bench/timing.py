"""Fair timing on a busy machine: contenders take turns, and their ratio is taken round by round.

    timing = paired({"ours": step_a, "theirs": step_b}, rounds=10)
    timing.median_s("ours"), timing.ratio("theirs", "ours")      # 1.2: theirs takes 1.2 times as long

Two programs that run one after the other see two different machines: another job starts, the processor warms up.
Within one round they see almost the same one. So the ratio is taken per round, and the result is the median of the
ratios.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from aiscale.meter import has_bf16_instructions
from aiscale.train import records


@dataclass(frozen=True, kw_only=True)
class Paired:
    seconds: dict[str, list[float]]

    def median_s(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def ratio(self, name: str, base: str) -> float:
        """How many times as long as `base` it takes: the median of the rounds' ratios."""
        return statistics.median(self.ratios(name, base))

    def ratios(self, name: str, base: str) -> list[float]:
        return [a / b for a, b in zip(self.seconds[name], self.seconds[base], strict=True)]


def paired(contenders: dict[str, Callable[[], object]], rounds: int, *, warmup: int = 1) -> Paired:
    """Run all contenders in turn, `rounds` times, rotating their order; the first `warmup` rounds, in which caches
    fill and libraries load, do not count."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for round_index in range(-warmup, rounds):
        for name in list(contenders) if round_index % 2 == 0 else list(reversed(contenders)):
            start = time.perf_counter()
            contenders[name]()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if round_index >= 0:
                seconds[name].append(time.perf_counter() - start)
    return Paired(seconds=seconds)


def machine_facts() -> dict:
    """Machine and versions of a measurement."""
    here, installed = records.machine(torch.device("cpu")), records.versions()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "processor": here["processor"],
        "cores": os.cpu_count(),
        "memory_bytes": here["memory_bytes"],
        "accelerators": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "bf16_instructions": has_bf16_instructions(),
        "system": here["system"],
        "python": installed["python"],
        "torch": torch.__version__,
        "transformers": installed.get("transformers"),
        "threads": here["threads_per_rank"],
        "load_average": round(os.getloadavg()[0], 2),
    }
