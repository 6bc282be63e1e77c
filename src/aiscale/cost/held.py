"""What a rank holds between steps: bytes of parameters, gradients, optimizer states, for every strategy, exactly.

    held_bytes(run, world_size, rank=0)     # {"parameters": ..., "gradients": ..., "optimizer states": ...}

`model_state_bytes` says how many bytes a parameter takes, this module which parameters a rank has, and which copies the
libraries keep. `meter.held_bytes(engine.held())` measures the same, and `aiscale bench bytes` sets both side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from aiscale.config import Run
from aiscale.cost.compression import radius_held
from aiscale.cost.fsdp import fsdp_held
from aiscale.cost.megatron import megatron_held
from aiscale.cost.memory import model_state_bytes
from aiscale.cost.parameters import parameter_shapes
from aiscale.cost.rivals import rivals_held
from aiscale.cost.stages import pipeline_held
from aiscale.cost.traffic import check_own_model
from aiscale.cost.zero import zero_held

Held = dict[str, int]


def held_bytes(run: Run, world_size: int, rank: int = 0) -> Held:
    """Bytes that `rank` holds after a step, by category; with compressed gradients also "compression"."""
    check_own_model(run)
    run.check_world(world_size)
    held = _STRATEGIES[run.parallel.strategy](run, world_size, rank)
    return {category: int(nbytes) for category, nbytes in held.items()}


def _whole_model(run: Run, world_size: int, rank: int) -> Held:
    states = model_state_bytes(run.model, run.optimizer.name, run.loop.precision)
    return {category: states[category] for category in ("parameters", "gradients", "optimizer states")}


def _ddp(run: Run, world_size: int, rank: int) -> Held:
    held = _whole_model(run, world_size, rank)
    if run.parallel.distributed_optimizer:
        mine = _owned(run, world_size, rank)
        share = model_state_bytes(float(sum(mine)), run.optimizer.name, run.loop.precision)["optimizer states"]
        held["optimizer states"] = share + (4 * len(mine) if run.optimizer.name == "adamw" else 0)
    if run.compression.method != "none":
        held["compression"] = radius_held(run) if run.compression.method == "radius" else rivals_held(run)
    return held


def _owned(run: Run, world_size: int, rank: int) -> list[int]:
    """The sizes of the parameters whose optimizer states are on `rank`: torch's ZeroRedundancyOptimizer takes first the
    optimizer's matrices, then its vectors, each from the largest on, and gives each to the rank that has least."""
    shapes = parameter_shapes(run.model).values()
    owned: list[list[int]] = [[] for _ in range(world_size)]
    for group in ([s for s in shapes if len(s) >= 2], [s for s in shapes if len(s) < 2]):
        for size in sorted(map(prod, group), reverse=True):
            min(owned, key=sum).append(size)
    return owned[rank]


_STRATEGIES: dict[str, Callable[[Run, int, int], Held]] = {
    "serial": _whole_model,
    "mpi": _whole_model,
    "ddp": _ddp,
    "zero": zero_held,
    "fsdp": fsdp_held,
    "pipeline": pipeline_held,
    "megatron": megatron_held,
}
