"""When an FSDP forward pass gathers what, and what gathering ahead hides.

    prefetch_timeline(6, gather_s=0.02, block_s=0.02, ahead=1)      # events for plots.timeline

The wire carries one gather at a time, in the order of asking. A block computes when it is gathered and the one before
it has computed; it is asked for when the block `ahead` places before it begins to compute, or, with 0, when its turn
has come. L blocks, gathered in g seconds and computed in c, take L (g + c) without prefetch, and L max(g, c) plus a
start and an end with it.
"""

from __future__ import annotations

from aiscale.cost.data_parallel import Event


def prefetch_timeline(n_blocks: int, gather_s: float, block_s: float, ahead: int, rank: int = 0) -> list[Event]:
    """Events of the root unit (gathered in gather_s, no computation), then of blocks 0 to n_blocks - 1."""
    gathers: dict[int, Event] = {}
    events, wire_free_s, now = [], 0.0, 0.0
    for unit in range(-1, n_blocks):  # -1 is the root
        for wanted in range(unit, min(n_blocks, unit + 1 + ahead)):
            if wanted in gathers:
                continue
            asked_s = now if wanted == unit else max(now, gathers[unit].end_s)
            name = "root" if wanted < 0 else f"gather {wanted}"
            start_s = max(asked_s, wire_free_s)
            wire_free_s = start_s + gather_s
            gathers[wanted] = Event(rank, name, start_s, wire_free_s, "communication")
        now = max(now, gathers[unit].end_s)
        if unit >= 0:
            events.append(Event(rank, str(unit), now, now + block_s, "forward"))
            now += block_s
    return sorted([*gathers.values(), *events], key=lambda event: event.start_s)
