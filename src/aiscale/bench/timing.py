"""Fair timing on a busy machine: contenders take turns, and their ratio is taken round by round.

    timing = paired({"ours": step_a, "theirs": step_b}, rounds=10)
    timing.median_s("ours"), timing.ratio("theirs", "ours")      # 1.2: theirs takes 1.2 times as long

Two programs that run one after the other see two different machines: another job starts, the processor warms up.
Within one round they see almost the same one. So the ratio is taken per round, and the result is the median of the
ratios. With repeats=2, a measurement during which other programs used more than a tenth of the processor is repeated,
at most twice, and the least disturbed one counts: it is chosen by the load of others, never by its own time.
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

import psutil
import torch

from aiscale.meter import has_bf16_instructions
from aiscale.train import records

DISTURBED = 0.1  #: share of all cores' time used by other programs above which a measurement is repeated


@dataclass(frozen=True, kw_only=True)
class Paired:
    seconds: dict[str, list[float]]
    disturbed: float = 0.0  #: share of the measurements that stayed disturbed after all repeats

    def median_s(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def ratio(self, name: str, base: str) -> float:
        """How many times as long as `base` it takes: the median of the rounds' ratios."""
        return statistics.median(self.ratios(name, base))

    def ratios(self, name: str, base: str) -> list[float]:
        return [a / b for a, b in zip(self.seconds[name], self.seconds[base], strict=True)]


def paired(contenders: dict[str, Callable[[], object]], rounds: int, *, warmup: int = 1, repeats: int = 0) -> Paired:
    """Run all contenders in turn, `rounds` times, rotating their order; the first `warmup` rounds, in which caches
    fill and libraries load, do not count. Leave repeats at 0 where all ranks must make the same number of steps."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    disturbed = 0
    for round_index in range(-warmup, rounds):
        order = list(contenders) if round_index % 2 == 0 else list(reversed(contenders))
        for name in order:
            others, elapsed_s = _undisturbed(contenders[name], 0 if round_index < 0 else repeats)
            if round_index >= 0:
                seconds[name].append(elapsed_s)
                disturbed += others > DISTURBED
    return Paired(seconds=seconds, disturbed=disturbed / (rounds * len(contenders)))


def _undisturbed(step: Callable[[], object], repeats: int) -> tuple[float, float]:
    """(others' share, seconds) of the least disturbed of up to 1 + repeats runs."""
    measurements = []
    for _ in range(1 + repeats):
        measurements.append(_measure(step))
        if measurements[-1][0] <= DISTURBED:
            break
    return min(measurements)


def _measure(step: Callable[[], object]) -> tuple[float, float]:
    """Run it once: (share of all cores' time used by other programs meanwhile, seconds)."""
    busy_s, own_s, start = _busy_s(), time.process_time(), time.perf_counter()
    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    elapsed_s = time.perf_counter() - start
    others_s = _busy_s() - busy_s - (time.process_time() - own_s)
    # The system counts in hundredths of a second: over a shorter time the share would be noise.
    share = others_s / (elapsed_s * (os.cpu_count() or 1)) if elapsed_s > 0.2 else 0.0
    return max(0.0, share), elapsed_s


def _busy_s() -> float:
    """Busy seconds of all cores together, including steal time (other virtual machines on this host)."""
    times = psutil.cpu_times()._asdict()
    return sum(times.get(kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq", "steal"))


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
