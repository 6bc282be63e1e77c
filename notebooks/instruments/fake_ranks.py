"""What one rank of many that do not exist sends in a step and holds after it, beside the formulas. Lesson 11.

with fake_world(1024, rank=3) as world:
    rows = compared(planned("fsdp", "--batch 1024 --micro-batch 1"), world, step)
"""

from __future__ import annotations

from collections.abc import Callable

from aiscale import cost
from aiscale.config import Run
from aiscale.distributed import World
from aiscale.meter import held_bytes

ONE_NUMBER_BYTES = 8


def compared(run: Run, world: World, step: Callable, owners: int = 1) -> list[tuple]:
    """Rows (what, calls or "held", bytes counted, bytes predicted).

    step() returns weights, gradients and Adam's moments; owners: ranks that share these moments.
    Messages of one number, such as the mean loss and the gradient norm, are left out.
    """
    add = world.traffic.add

    def add_tensors(op, group, nbytes):
        if nbytes > ONE_NUMBER_BYTES:
            add(op, group, nbytes)

    before = world.traffic.groups()
    world.traffic.add = add_tensors
    held = held_bytes(dict(zip(("weights", "gradients", "Adam's moments"), step(), strict=True)))
    counts = world.traffic.groups_since(before).items()
    sent = {(op, group.name): count for (op, group), count in counts if len(group.ranks) > 1}
    said = cost.step_traffic(run, world.size, world.rank)
    said = {cell: nbytes for cell, nbytes in said.items() if nbytes > ONE_NUMBER_BYTES}
    assert sent.keys() == said.keys(), f"sent {sent.keys()}, predicted {said.keys()}"
    rows = [(" ".join(cell), n.calls, n.payload_bytes, said[cell]) for cell, n in sent.items()]
    state = cost.held_bytes(run, world.size, world.rank)
    moments = 2 * state["gradients"] // owners
    predicted = (state["parameters"], state["gradients"], moments)
    pairs = zip(held.items(), predicted, strict=True)
    return rows + [(what, "held", nbytes, formula) for (what, nbytes), formula in pairs]
