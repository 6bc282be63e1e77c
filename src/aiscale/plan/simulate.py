"""The pipeline of a layout as a discrete-event simulation: every stage with its own times, in the schedule's order.

    run = simulate(shape, layout, platform)
    run.total_s, run.events          # events for plots.timeline
    run.idle                         # each stage's idle over busy time

The closed form of `step` assumes that stages wait for the slowest only; this shows where that holds and where not.
`cost.schedule_order` says what each rank does in which order.
"""

from __future__ import annotations

from dataclasses import dataclass

from aiscale import cost
from aiscale.config import ConfigError
from aiscale.plan.constants import CONSTANTS
from aiscale.plan.hardware import Platform
from aiscale.plan.layout import Layout
from aiscale.plan.shapes import Shape
from aiscale.plan.step import message_of_stage, stage_seconds


@dataclass(frozen=True)
class Simulated:
    total_s: float
    events: list[cost.Event]

    @property
    def idle(self) -> list[float]:
        return cost.idle_share(self.events)


def simulate(shape: Shape, layout: Layout, platform: Platform, c=CONSTANTS) -> Simulated:
    """Forward and backward passes of one step, without optimizer and data-parallel exchange."""
    layout.check(shape)
    p, v = layout.pp, layout.virtual_stages
    orders = cost.schedule_order(layout.schedule, p, layout.micro_batches, v)
    ranks = cost.stage_ranks(layout.schedule, p, v)
    seconds, message = stage_seconds(shape, layout, platform, c), message_of_stage(shape, layout, platform, c)
    halves = 2 if layout.schedule == "zero-bubble" else 1
    share = {"forward": 1 / 3, "backward": 2 / 3 / halves, "weights": 1 / 3}
    done: dict[cost.Work, float] = {}
    free, at, events = [0.0] * p, [0] * p, []
    left = sum(map(len, orders))
    while left:
        before = left
        for rank, order in enumerate(orders):
            while at[rank] < len(order):
                work = order[at[rank]]
                needs = _needs(work, len(ranks))
                if any(need not in done for need in needs):
                    break
                arrivals = [done[need] + (message if ranks[need.piece] != rank else 0.0) for need in needs]
                start = max([free[rank], *arrivals])
                free[rank] = done[work] = start + seconds[rank] * share[work.kind] / v
                events.append(cost.Event(rank, cost.event_name(work, p, v), start, free[rank], work.kind))
                at[rank] += 1
                left -= 1
        if left == before:
            raise ConfigError(f"schedule {layout.schedule} with pp {p} and {layout.micro_batches} waits for itself")
    return Simulated(max(free), sorted(events, key=lambda event: event.start_s))


def _needs(work: cost.Work, pieces: int) -> list[cost.Work]:
    kind, piece, i = work
    if kind == "weights":
        return [cost.Work("backward", piece, i)]
    if kind == "forward":
        return [cost.Work(kind, piece - 1, i)] if piece else []
    after = [cost.Work(kind, piece + 1, i)] if piece < pieces - 1 else []
    return [cost.Work("forward", piece, i), *after]
