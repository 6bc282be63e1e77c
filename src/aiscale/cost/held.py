"""What a rank holds between steps: bytes of parameters, gradients, optimizer states, for every strategy, exactly.

    held_bytes(run, world_size, rank=0)     # {"parameters": ..., "gradients": ..., "optimizer states": ...}

`model_state_bytes` says how many bytes a parameter takes, this module which parameters a rank has, and which copies the
libraries keep. `meter.held_bytes(engine.held())` measures the same, and `aiscale bench bytes` sets both side by side.
"""

from __future__ import annotations

from collections.abc import Callable

from aiscale.config import Run
from aiscale.cost.fsdp import fsdp_held
from aiscale.cost.megatron import megatron_held
from aiscale.cost.memory import model_state_bytes
from aiscale.cost.stages import pipeline_held
from aiscale.cost.traffic import check_own_model
from aiscale.cost.zero import zero_held

Held = dict[str, int]


def held_bytes(run: Run, world_size: int, rank: int = 0) -> Held:
    """Bytes that `rank` holds after a step, by category."""
    check_own_model(run)
    run.check_world(world_size)
    held = _STRATEGIES[run.parallel.strategy](run, world_size, rank)
    return {category: int(nbytes) for category, nbytes in held.items()}


def _whole_model(run: Run, world_size: int, rank: int) -> Held:
    states = model_state_bytes(run.model, run.optimizer.name, run.loop.precision)
    return {category: states[category] for category in ("parameters", "gradients", "optimizer states")}


_STRATEGIES: dict[str, Callable[[Run, int, int], Held]] = {
    "serial": _whole_model,
    "mpi": _whole_model,
    "ddp": _whole_model,
    "zero": zero_held,
    "fsdp": fsdp_held,
    "pipeline": pipeline_held,
    "megatron": megatron_held,
}
