"""Predicted timelines of a data-parallel step and of an FSDP step, events for plots.timeline."""

from __future__ import annotations

from typing import NamedTuple

from aiscale.plan.cost.communication import AlphaBeta


class Event(NamedTuple):
    """An interval of one rank's work; a bar of plots.timeline."""

    rank: int
    name: str
    start_s: float
    end_s: float
    kind: str  #: forward, backward, communication, optimizer


def ddp_timeline(
    forward_s: float,
    backward_s: float,
    gradient_bytes: float,
    world: int,
    link: AlphaBeta,
    *,
    bucket_bytes: float = 25 * 2**20,
) -> list[Event]:
    """The events of rank 0 (all ranks are alike) in a step before the update.

    The one that ends last is at the end. Assumes that communication does not slow down computation.
    """
    events = [
        Event(0, "forward", 0.0, forward_s, "forward"),
        Event(0, "backward", forward_s, forward_s + backward_s, "backward"),
    ]
    sent, free = 0.0, 0.0
    while world > 1 and sent < gradient_bytes:
        size = min(bucket_bytes, gradient_bytes - sent)
        sent += size
        ready = forward_s + backward_s * sent / gradient_bytes
        start = max(ready, free)
        free = start + link.seconds("all_reduce", size, world)
        events.append(Event(0, f"all-reduce {len(events) - 1}", start, free, "communication"))
    return events


def prefetch_timeline(n_blocks: int, gather_s: float, block_s: float, ahead: int) -> list[Event]:
    """Events of an FSDP step's forward pass: the root unit, then blocks 0 to n - 1.

    Collectives run one at a time, in the order of their requests. A block is requested when the
    block `ahead` places before it starts to compute, or, with 0, when the block before it is done.
    """
    events: list[Event] = []
    gathered: dict[int, float] = {}
    wire_free_s, now = 0.0, 0.0
    order = [-1, *range(n_blocks)]  # -1 is the root
    for at, unit in enumerate(order):
        for wanted in order[at : at + 1 + ahead]:
            if wanted not in gathered:
                start_s = max(now if wanted == unit else max(now, gathered[unit]), wire_free_s)
                gathered[wanted] = wire_free_s = start_s + gather_s
                name = "root" if wanted < 0 else f"gather {wanted}"
                events.append(Event(0, name, start_s, wire_free_s, "communication"))
        now = max(now, gathered[unit])
        if unit >= 0:
            events.append(Event(0, str(unit), now, now + block_s, "forward"))
            now += block_s
    return sorted(events, key=lambda event: event.start_s)
