"""The answer for a layout on a machine: time, memory by stage, rates, days to a token budget."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from aiscale.plan.constants import CONSTANTS, SCOREBOARD
from aiscale.plan.hardware import Platform
from aiscale.plan.layout import Layout, Shape
from aiscale.plan.memory import (
    capacity_bytes,
    checkpoint_bytes,
    host_bytes,
    needed_bytes,
    stage_memory,
)
from aiscale.plan.stalls import Neighbourhood, neighbourhood
from aiscale.plan.step import Step, step_seconds


@dataclass(frozen=True)
class Answer:
    """What a layout costs. Rates are per device as torch counts them."""

    shape: Shape
    layout: Layout
    platform: Platform
    step: Step
    memory_gb: float  #: 10^9 bytes of the fullest stage
    capacity_gb: float

    @property
    def fits(self) -> bool:
        return self.memory_gb <= self.capacity_gb

    @cached_property
    def host_gb(self) -> dict[str, float]:
        """10^9 bytes of a node's host memory, by when its ranks need them."""
        ranks = min(self.layout.gpus, self.platform.gpus_per_node)
        needed = host_bytes(self.shape, self.layout)
        return {when: ranks * nbytes / 1e9 for when, nbytes in needed.items()}

    @property
    def host_capacity_gb(self) -> float | None:
        return self.platform.machine.node.host_gb

    @property
    def fits_host(self) -> bool | None:
        """None: the machine's figure is unknown."""
        have = self.host_capacity_gb
        return None if have is None else max(self.host_gb.values()) <= have

    @property
    def checkpoint_gb(self) -> float:
        """10^9 bytes on disk of one checkpoint."""
        return checkpoint_bytes(self.shape, self.layout) / 1e9

    @property
    def stalls(self) -> Neighbourhood | None:
        """Published runs of the same program with such a layout, if some stalled."""
        return neighbourhood(self.layout, self.platform)

    @property
    def tokens_per_s(self) -> float:
        """Per device."""
        return self.layout.global_batch * self.shape.seq / self.step.total_s / self.layout.gpus

    @property
    def tflops(self) -> float:
        """Model FLOP/s per device, 10^12, without recomputation.

        6 for each parameter that a token meets, and the whole score matrix.
        """
        return self.shape.flops_per_token() * self.tokens_per_s / 1e12

    @property
    def mfu(self) -> float:
        return self.tflops * 1e12 / self.platform.peak(self.layout.precision)

    @property
    def hfu(self) -> float:
        """With what is computed twice."""
        once = max(1e-12, self.step.compute_s - self.step.recompute_s)
        return self.mfu * (1 + self.step.recompute_s / once)

    @property
    def nodes(self) -> float:
        return self.layout.gpus / self.platform.gpus_per_node

    def days(self, tokens: float) -> float:
        return tokens / (self.tokens_per_s * self.layout.gpus) / 86400

    def node_hours(self, tokens: float) -> float:
        return self.days(tokens) * 24 * self.nodes

    def energy_kwh(self, tokens: float) -> float | None:
        """Of the devices, at the power of their boards: at most.

        FORGE-L's took two thirds of it (`forge_facts`).
        """
        watts = self.platform.machine.node.accelerator.watts
        return watts and self.days(tokens) * 24 * self.layout.gpus * watts / 1000

    @property
    def kind(self) -> str:
        program = self.layout.software.program or "a program that was not fitted"
        return ("one node, " if self.nodes <= 1 else "many nodes, ") + program

    def band(self, value: float, what: str = "") -> list[float]:
        """Between which 8 of 10 published runs of this kind would be measured.

        what: memory, or else seconds and what grows with them. Where no published run is like this
        one, the band holds what was left out of the fit and is most like it (`_doubts`).
        """
        bands = SCOREBOARD["bands"]
        rows = bands["seen" if self.layout.software.program else "unseen"]
        what = what or ("one_node" if self.nodes <= 1 else "many_nodes")
        ends = [rows[what], *(bands["doubts"][f"{doubt}_{what}"] for doubt in self._doubts(what))]
        low, high = min(end[0] for end in ends), max(end[1] for end in ends)
        return [_digits(value * low), _digits(value * high)]

    def _doubts(self, what: str) -> list[str]:
        """Which wider bands hold, too: of experts, of newer chips, of RCCL between nodes."""
        device = self.platform.machine.node.accelerator
        doubts = ["experts"] if self.shape.experts else []
        if what == "memory":
            return doubts
        if self.platform.name not in SCOREBOARD["witnesses"]:
            doubts.append("newer")
        if device.library == "rccl" and self.nodes > 1:
            doubts.append("rccl")
        return doubts

    @property
    def cautions(self) -> list[str]:
        """What a reader should know before trusting the numbers, a sentence each."""
        said = []
        if self.stalls and self.stalls.stalled:
            said.append(self.stalls.sentence())
        doubts = self._doubts("")
        if "newer" in doubts:
            said.append(
                f"no published run on {self.platform.name} was read: "
                "the range is that of newer chips, whose runs were left out of the fit"
            )
        if "rccl" in doubts:
            said.append(
                "published runs on AMD's GPUs over several nodes took longer than predicted, and "
                "the range holds them; by how much RCCL falls behind at scale is unknown (on 2,048 "
                "GCDs another library was up to 168 times as fast: Singh et al., arXiv:2504.18658)"
            )
        if self.shape.experts:
            said.append(
                "only one published run with experts has its memory: "
                "its range is assumed, twice as wide"
            )
        if self.layout.ep > 1:
            ways = {
                "by node": "once to each node, and is copied there (DeepEP)",
                "alltoall": "once to each of its experts (all-to-all)",
            }
            said.append(f"assumed: a token is sent {ways[self.layout.software.dispatch]}")
        return said

    @cached_property
    def stages(self) -> list[dict[str, float]]:
        """Bytes by category of each pipeline stage."""
        return stage_memory(self.shape, self.layout, CONSTANTS)

    def to_dict(self) -> dict:
        step, total = self.step, self.step.total_s
        seconds = {
            "compute": step.compute_s,
            "of it recomputation": step.recompute_s,
            "bubble": step.bubble_s,
        }
        seconds |= step.parts | {"optimizer and fixed": step.optimizer_s}
        numbers = {
            "step_time_s": total,
            "tokens_per_s_per_gpu": self.tokens_per_s,
            "tflops_per_gpu": self.tflops,
            "mfu_pct": 100 * self.mfu,
            "hfu_pct": 100 * self.hfu,
            "memory_GB": self.memory_gb,
            "capacity_GB": self.capacity_gb,
            "bubble_fraction": step.bubble_s / total,
            "exposed_comm_fraction": min(1.0, sum(step.parts.values()) / total),
        }
        host = {when: _digits(gb) for when, gb in self.host_gb.items()}
        host |= {"capacity": self.host_capacity_gb, "fits": self.fits_host}
        about = {
            "layout": self.layout.name(),
            "option": self.layout.option(),
            "gpus": self.layout.gpus,
            "kind": self.kind,
            "params_B": round(self.shape.parameters / 1e9, 4),
            "active_params_B": round(self.shape.active_parameters / 1e9, 4),
            "fits": self.fits,
            "launch_bound": step.launch_bound,
            "step_time_s_band": self.band(total),
            "memory_GB_band": self.band(self.memory_gb, "memory"),
            "checkpoint_GB": _digits(self.checkpoint_gb),
            "stalled_share": round(self.stalls.share, 3) if self.stalls else None,
            "cautions": self.cautions,
            "seconds": {name: _digits(value) for name, value in seconds.items()},
            "host_GB_a_node": host,
        }
        return about | {name: _digits(value) for name, value in numbers.items()}


def _digits(value: float) -> float:
    return float(f"{value:.5g}")


def plan(shape: Shape, layout: Layout, platform: Platform, c=CONSTANTS) -> Answer:
    """Raises ConfigError if the pieces do not fit together; too little memory is an answer."""
    layout.check(shape)
    return predict(shape, layout, platform, c)


def predict(shape: Shape, layout: Layout, platform: Platform, c=CONSTANTS) -> Answer:
    """`plan` without the checks, for layouts that are known to be sound."""
    needed, holds = needed_bytes(shape, layout, c), capacity_bytes(platform, layout, c)
    step = step_seconds(shape, layout, platform, c)
    return Answer(shape, layout, platform, step, needed / 1e9, holds / 1e9)
