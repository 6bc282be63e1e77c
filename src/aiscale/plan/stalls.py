"""Where published runs stalled, and whether a layout lies among them.

    found = neighbourhood(layout, platform)      # of a plan, or None: its program has no stalls
    found.sentence()                             # "19 of 24 published runs of nanotron on 64 ..."

A *stall* is a run that took over 2.5 times what the formulas say without it. Only nanotron's sweep
has any. Its stalled pipelines wait half a second for each neighbour and micro-batch, whatever the
work is; nobody has published why. On 64 nodes most of its pipelines do, so `step` counts that wait
there (`likely_wait_s`). Elsewhere a plan only says how often others stalled.
"""

from __future__ import annotations

from dataclasses import dataclass

from aiscale.plan.constants import SCOREBOARD
from aiscale.plan.hardware import Platform
from aiscale.plan.layout import Layout

#: Nodes from which more than half of a program's pipelines waited, in the sweep of nanotron.
MOST_WAIT_NODES = 64
#: Rows of the scoreboard's table begin at these nodes and data-parallel ranks.
NODES = (1, 32, 64)
REPLICAS = (1, 32)


@dataclass(frozen=True)
class Neighbourhood:
    """Published runs of one program whose layouts are alike."""

    program: str
    nodes: int  #: at least so many
    pipeline: bool
    replicas: int  #: data-parallel ranks, at least so many
    runs: int
    stalled: int

    @property
    def share(self) -> float:
        return self.stalled / self.runs

    def sentence(self) -> str:
        kind = "a pipeline" if self.pipeline else "no pipeline"
        return (
            f"{self.stalled} of {self.runs} published runs of {self.program} on {self.nodes} nodes "
            f"or more, with {kind} and dp {self.replicas} or more, stalled: "
            "they took over 2.5 times as long"
        )


def place(layout: Layout, platform: Platform) -> tuple[int, bool, int]:
    """(nodes, pipeline, replicas): which row of the table a layout belongs to."""
    nodes = layout.gpus / platform.gpus_per_node
    return (
        max(n for n in NODES if n <= max(1, nodes)),
        layout.pp > 1,
        max(n for n in REPLICAS if n <= layout.replicas),
    )


def neighbourhood(layout: Layout, platform: Platform) -> Neighbourhood | None:
    """The runs of the layout's own program that are most like it; None if none of it stalled."""
    wanted = (layout.software.program, *place(layout, platform))
    for row in SCOREBOARD.get("stalls", {}).get("rows", []):
        found = Neighbourhood(**row)
        if (found.program, found.nodes, found.pipeline, found.replicas) == wanted:
            return found
    return None


def likely_wait_s(layout: Layout, platform: Platform, c) -> float:
    """Seconds that a step waits for neighbours where most runs of its program did."""
    nodes = layout.gpus / platform.gpus_per_node
    if layout.software.program != "nanotron" or nodes < MOST_WAIT_NODES:
        return 0.0
    neighbours = min(layout.pp - 1, 2)
    return c.neighbour_wait_s * neighbours * layout.micro_batches
