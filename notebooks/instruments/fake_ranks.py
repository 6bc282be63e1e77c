"""What one of many ranks that do not exist sends in a step and holds after it. Lesson 11.

with fake_world(1024, rank=3) as world:
    rows = compared(planned("fsdp", "--batch 1024 --micro-batch 1"), world, step)
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.distributed.tensor import DTensor

from aiscale.measure.distributed import World
from aiscale.measure.meter import held_bytes
from aiscale.plan import cost
from aiscale.plan.config import Run

ONE_NUMBER_BYTES = 8


def compared(run: Run, world: World, step: Callable, owners: int = 1) -> list[tuple]:
    """Rows (what, calls or "held", bytes counted, bytes predicted).

    step() returns weights, gradients and Adam's state of each tensor, which `owners` ranks share.
    Messages of one number, such as the mean loss and the gradient norm, are left out.
    """
    add = world.traffic.add

    def add_tensors(op, group, nbytes):
        if nbytes > ONE_NUMBER_BYTES:
            add(op, group, nbytes)

    before = world.traffic.groups()
    world.traffic.add = add_tensors
    weights, gradients, states = step()
    moments = [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]
    kinds = {"weights": weights, "gradients": gradients, "Adam's moments": moments}
    held = held_bytes({what: map(local, tensors) for what, tensors in kinds.items()})
    counts = world.traffic.groups_since(before).items()
    sent = {(op, group.name): count for (op, group), count in counts if len(group.ranks) > 1}
    said = cost.step_traffic(run, world.size, world.rank)
    said = {cell: nbytes for cell, nbytes in said.items() if nbytes > ONE_NUMBER_BYTES}
    assert sent.keys() == said.keys(), f"sent {sent.keys()}, predicted {said.keys()}"
    rows = [(" ".join(cell), n.calls, n.payload_bytes, said[cell]) for cell, n in sent.items()]
    state = cost.held_bytes(run, world.size, world.rank)
    predicted = (state["parameters"], state["gradients"], 2 * state["gradients"] // owners)
    pairs = zip(held.items(), predicted, strict=True)
    return rows + [(what, "held", nbytes, formula) for (what, nbytes), formula in pairs]


def local(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
