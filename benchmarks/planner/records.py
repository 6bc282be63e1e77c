"""What the tables are read into: a published run as the planner's input."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from aiscale.plan.hardware import Platform, platform
from aiscale.plan.layout import Layout, Shape


@dataclass(frozen=True, kw_only=True)
class Run:
    """One published run, and what was measured."""

    id: str
    shape: Shape
    layout: Layout
    platform: Platform
    step_s: float | None = None
    memory_bytes: float | None = None
    ran: bool = True
    model: str = ""  #: layouts of one model are ranked among each other
    #: what it recomputes, and how it holds fp8 weights, is published: then that it fitted says much
    memory_known: bool = True
    first_stage: bool = False  #: memory is that of the first stage, not of the fullest


@lru_cache(maxsize=64)
def node(name: str, gbit: float, devices: int = 8) -> Platform:
    return platform(name, gpus_per_node=devices, node_gbit_s=gbit)
