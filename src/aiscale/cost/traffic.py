"""What one optimizer step sends: payload bytes by (collective, process group), for every strategy, to the byte.

    step_traffic(run, world_size)            # {("all_reduce", "world"): 3_253_248}
    step_traffic(run, world_size, rank=3)    # where ranks differ: stages of a pipeline

The payload is the whole buffer of a collective (`communication`), summed over the calls of a step; groups of one rank
send nothing and are left out. Bookkeeping (the mean loss, the gradient norm where our own code takes it) is not part of
it. The groups have the names that `dist.traffic` gives them: world, dp, tp, pp, and the axes of a device mesh.

These are the steps as the libraries take them, so each strategy's function says what is sent when, and why it is more
than the paper's formula where it is. `aiscale bench bytes` measures the same.
"""

from __future__ import annotations

from collections.abc import Callable

from aiscale.config import ConfigError, ModelConfig, Run
from aiscale.cost.compression import radius_traffic
from aiscale.cost.fsdp import fsdp_traffic
from aiscale.cost.megatron import megatron_traffic
from aiscale.cost.parameters import parameter_count
from aiscale.cost.rivals import rivals_traffic
from aiscale.cost.stages import pipeline_traffic
from aiscale.cost.zero import zero_traffic

Traffic = dict[tuple[str, str], int]

WIDE = {"fp32": 4, "tf32": 4, "bf16": 4, "fp16": 4, "fp64": 8}  # bytes of a weight, a gradient, a moment


def check_own_model(run: Run) -> None:
    """Raise ConfigError for a model whose tensors these formulas do not know."""
    if not isinstance(run.model, ModelConfig):
        raise ConfigError(
            "the byte formulas know the tensors of our own GPT, not those of Hugging Face's models: "
            "measure them instead (world.traffic, meter.held_bytes)"
        )


def step_traffic(run: Run, world_size: int, rank: int = 0) -> Traffic:
    """Payload bytes of one optimizer step of `rank`, by (collective, group)."""
    check_own_model(run)
    run.check_world(world_size)
    sent = _STRATEGIES[run.parallel.strategy](run, world_size, rank)
    return {key: int(nbytes) for key, nbytes in sent.items() if nbytes}


def _serial(run: Run, world_size: int, rank: int) -> Traffic:
    return {}


def _replicated(run: Run, world_size: int, rank: int) -> Traffic:
    """mpi and ddp: every gradient in one all-reduce, however many micro-batches there are. With a method of
    compression, a sparse step: dense ones send what method none does."""
    if run.compression.method in ("none", "radius"):
        return radius_traffic(run, world_size)
    return rivals_traffic(run, world_size)


def _ddp(run: Run, world_size: int, rank: int) -> Traffic:
    """The gradients, or what stands for them; with divided optimizer states the owners' new weights as well."""
    sent = _replicated(run, world_size, rank)
    if run.parallel.distributed_optimizer and world_size > 1:
        sent["broadcast", "world"] = WIDE[run.loop.precision] * parameter_count(run.model)
    return sent


_STRATEGIES: dict[str, Callable[[Run, int, int], Traffic]] = {
    "serial": _serial,
    "mpi": _replicated,
    "ddp": _ddp,
    "zero": zero_traffic,
    "fsdp": fsdp_traffic,
    "pipeline": pipeline_traffic,
    "megatron": megatron_traffic,
}
