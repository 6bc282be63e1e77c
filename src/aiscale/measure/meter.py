"""Measures what a step really took: bytes held and sent, seconds, tokens per second, MFU.

meter = Meter(world, flops_per_token=cost.flops_per_token(model, seq_len), precision="fp32")
with meter.step():
    engine.step(...)
meter.record(tokens)
# -> {"step_s": ..., "tokens_per_s": ..., "mfu": ..., "payload_bytes": {...}, ...}
"""

from __future__ import annotations

import itertools
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

from aiscale.measure.distributed import World
from aiscale.measure.distributed.counter import Count, Group
from aiscale.plan import cost, machines

_DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
_DTYPES["fp64"] = torch.float64


def held_bytes(categories: Mapping[str, Iterable[torch.Tensor]]) -> dict[str, int]:
    """Bytes by category of tensors; a storage that several share counts once, in the first."""
    seen: set[int] = set()
    totals = {}
    for category, tensors in categories.items():
        total = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            # data_ptr() is 0 for all tensors without memory (distributed.fake).
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                total += storage.nbytes()
        totals[category] = total
    return totals


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory of this process: the allocator's peak on a GPU, the resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def allocated_bytes(work: Callable[[], object]) -> tuple[list[float], list[int]]:
    """(seconds, bytes): what `work()` holds on the CPU after each allocation and release.

    From its start. Measured by torch's profiler, so it includes memory outside our tensors:
    workspaces.
    """
    # Or the profiler logs its start and stop on stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        work()
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    on_cpu = [event for event in events if event.device_type() == torch.autograd.DeviceType.CPU]
    changes = sorted((event.start_ns(), event.nbytes()) for event in on_cpu)
    seconds = [(start_ns - changes[0][0]) / 1e9 for start_ns, _ in changes]
    return seconds, list(itertools.accumulate(nbytes for _, nbytes in changes))


def step_peak_bytes(
    step: Callable[[], object],
    tensors: Callable[[], Mapping[str, Iterable[torch.Tensor]]],
    device: torch.device,
) -> dict[str, int]:
    """Peak memory of one optimizer step after the first, by category; `tensors()` is an engine's.
    What lives through the step has its own category; `within the step` are activations, workspaces
    and gradients."""
    before = held_bytes(tensors())
    lasting = {category: nbytes for category, nbytes in before.items() if category != "gradients"}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        step()
        peak = torch.cuda.max_memory_allocated(device)
    else:
        # Count from what the engine holds: the process has other tensors, too.
        peak = sum(before.values()) + max(0, *allocated_bytes(step)[1])
    return {**lasting, "within the step": peak - sum(lasting.values())}


def peak_flops(world: World, precision: str, seconds: float = 0.1) -> tuple[float, str]:
    """(peak FLOP/s of one rank, source of the figure).

    A GPU's is from its data sheet. A CPU's is measured by multiplying matrices, on all ranks at
    once because they share the cores.
    """
    if world.device.type == "cuda":
        name = torch.cuda.get_device_name(world.device)
        device = machines.find_device(name)
        if device is not None and (flops := device.peak_flops(precision)):
            return flops, f"data sheet of {device.name}"
    dtype = _DTYPES[precision]
    n = 512 if world.device.type == "cpu" else 4096
    a, b = (torch.randn(n, n, device=world.device).to(dtype) for _ in range(2))
    world.barrier()
    a @ b
    best, start = float("inf"), time.perf_counter()
    while time.perf_counter() - start < seconds:
        t = time.perf_counter()
        a @ b
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - t)
    rate = world.sum(2 * n**3 / best) / world.size
    return rate, f"measured: {n} x {n} matrix product"


def traffic_rows(counts: Mapping[tuple[str, Group], Count], backend: str = "gloo") -> list[dict]:
    """One rank's calls, payload and wire bytes: a row per collective and group in `counts`.

    `counts` is Traffic.groups.
    """
    algorithm = "gloo" if backend == "gloo" else "ring"
    return [
        {
            "collective": op,
            "group": group.name,
            "group_ranks": list(group.ranks),
            "calls": count.calls,
            "payload_bytes": count.payload_bytes,
            "wire_bytes": round(
                cost.wire_bytes(op, count.payload_bytes, len(group.ranks), algorithm)
            ),
        }
        for (op, group), count in sorted(counts.items())
        if len(group.ranks) > 1
    ]


class Meter:
    def __init__(self, world: World, *, flops_per_token: float, precision: str) -> None:
        self.world = world
        self.flops_per_token = flops_per_token
        self.precision = precision
        self.peak_flops, self.peak_source = 0.0, ""
        self.measure_peak()
        self._step_s = 0.0
        self._total_s, self._total_tokens = 0.0, 0
        self._traffic: list[dict] = []  #: of the last step

    def measure_peak(self) -> None:
        """Measure the peak again and keep the best: a measurement on a busy machine is too low."""
        peak, source = peak_flops(self.world, self.precision)
        if peak > self.peak_flops:
            self.peak_flops, self.peak_source = peak, source

    def overall(self) -> dict:
        """MFU of all steps so far, with the best peak known now, and that peak."""
        rate = self._total_tokens / self._total_s if self._total_s else 0.0
        return {
            "mfu": rate * self.flops_per_token / (self.peak_flops * self.world.size),
            "peak_flops": self.peak_flops,
            "peak_source": self.peak_source,
        }

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time what runs inside and count what it communicates."""
        traffic = self.world.traffic
        before = traffic.groups()
        self._synchronize()
        start = time.perf_counter()
        yield
        self._synchronize()
        self._step_s = time.perf_counter() - start
        self._traffic = traffic_rows(traffic.groups_since(before), self.world.backend)

    def record(self, tokens: int) -> dict:
        """The measures of the last step, in which all ranks together read `tokens` tokens."""
        rate = tokens / self._step_s
        self._total_s += self._step_s
        self._total_tokens += tokens
        reached = rate * self.flops_per_token / self.world.size
        if reached > self.peak_flops and self.peak_source.startswith("measured"):
            self.peak_flops = reached
            self.peak_source = "measured: a training step, faster than a matrix product was"
        payload: Counter[str] = Counter()
        for row in self._traffic:
            payload[row["collective"]] += row["payload_bytes"]
        return {
            "step_s": self._step_s,
            "tokens_per_s": rate,
            "mfu": reached / self.peak_flops,
            "payload_bytes": dict(payload),
            "wire_bytes": sum(row["wire_bytes"] for row in self._traffic),
        }

    def rank_report(self, categories: Mapping[str, Iterable[torch.Tensor]]) -> dict:
        """What this rank sent in the last step, by collective and group, and what it holds."""
        return {
            "rank": self.world.rank,
            "traffic": self._traffic,
            "held_bytes": held_bytes(categories),
            "peak_memory_bytes": peak_memory_bytes(self.world.device),
        }

    def _synchronize(self) -> None:
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)
