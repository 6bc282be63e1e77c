"""Bytes that one rank sends in an optimizer step and holds after it, for every strategy, exactly.

    step_traffic(run, world_size)         # payload: {("all_reduce", "world"): 3_253_248}
    held_bytes(run, world_size, rank=0)   # {"parameters": ..., "gradients": ..., ...}
    step_bytes(run, world_size, rank=0)   # also "activations" and "logits", at the peak of a step

The payload is the whole buffer of a collective, summed over the calls of a step, without groups of
one rank and bookkeeping (the mean loss, our own gradient norm: `measure.beside` has those of the
trainers). Groups are named as in `world.traffic`: world, dp, tp, pp, and the axes of a device mesh.
`aiscale.measure.bytes` measures the same. A new strategy needs two functions of (run, world_size,
rank) in _STRATEGIES.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from aiscale.errors import ConfigError
from aiscale.plan.config import ModelConfig, Run
from aiscale.plan.cost.compression import Traffic, gradient_traffic, radius_held, rivals_held
from aiscale.plan.cost.megatron import (
    Place,
    megatron_activation_bytes_by_part,
    megatron_held,
    megatron_logit_bytes,
    megatron_traffic,
)
from aiscale.plan.cost.memory import (
    WIDE,
    activation_bytes_by_part,
    model_state_bytes,
    optimizer_bytes,
)
from aiscale.plan.cost.parameters import (
    check_dense,
    optimizer_groups,
    parameter_count,
    parameter_shapes,
)
from aiscale.plan.cost.schedules import in_flight, stage_ranks
from aiscale.plan.cost.sharded import fsdp_held, fsdp_traffic, zero_held, zero_traffic

Held = dict[str, int]


def step_traffic(run: Run, world_size: int, rank: int = 0) -> Traffic:
    """Payload bytes of one optimizer step of `rank`, by (collective, group)."""
    _check(run, world_size)
    traffic, _ = _STRATEGIES[run.parallel.strategy]
    return {key: int(nbytes) for key, nbytes in traffic(run, world_size, rank).items() if nbytes}


def held_bytes(run: Run, world_size: int, rank: int = 0) -> Held:
    """Bytes that `rank` holds after a step; of compressed gradients too, "compression"."""
    _check(run, world_size)
    _, formula = _STRATEGIES[run.parallel.strategy]
    return {category: int(nbytes) for category, nbytes in formula(run, world_size, rank).items()}


def step_bytes(run: Run, world_size: int, rank: int = 0) -> Held:
    """held_bytes of `rank` with its activations and the logits.

    Activations are those of all micro-batches in flight on its stages. Not counted: T x T scores,
    gathered weights, weight casts, buffers.
    """
    state, layout = held_bytes(run, world_size, rank), run.parallel
    n_micro, size = run.loop.micro_batches(layout.data_parallel(world_size))
    if layout.strategy == "megatron":
        place = Place(run, world_size, rank)
        parts = megatron_activation_bytes_by_part(run, world_size, rank)
        logits = megatron_logit_bytes(place)
        flying = in_flight(layout.schedule, layout.pp, n_micro, layout.virtual_stages)
        kept = sum(parts.values()) - parts["scores"] - logits
        return {
            **state,
            "activations": int(flying[place.pp_rank] * kept),
            "logits": logits,
        }
    parts = activation_bytes_by_part(run.model, size, run.loop.seq_len, run.loop.precision)
    if layout.strategy == "pipeline":
        pieces = stage_ranks(layout.pp, layout.virtual_stages)
        pp_rank = rank // (world_size // layout.pp)
        flying = in_flight(layout.schedule, layout.pp, n_micro, layout.virtual_stages)[pp_rank]
        last = pp_rank == pieces[-1]
        ends = {"embeddings": pp_rank == pieces[0], "head": last, "logits": last}
        parts = {
            part: flying * nbytes * ends.get(part, 1 / layout.pp) for part, nbytes in parts.items()
        }
    logits = int(parts.pop("logits"))
    return {**state, "activations": int(sum(parts.values())), "logits": logits}


def _check(run: Run, world_size: int) -> None:
    if not isinstance(run.model, ModelConfig):
        raise ConfigError(
            "the byte formulas know the tensors of our own GPT, not those of Hugging Face's "
            "models: measure them instead (world.traffic, meter.held_bytes)"
        )
    check_dense(run.model)
    run.check_world(world_size)


# serial, ddp -------------------------------------------------------------------------------------


def _ddp(run: Run, world_size: int, rank: int) -> Traffic:
    """One all-reduce of every gradient, for any number of micro-batches.

    With sharded optimizer states also the owners' new weights. With compression: a sparse step;
    dense steps are those of method none.
    """
    sent = gradient_traffic(run, world_size)
    if run.parallel.distributed_optimizer and world_size > 1:
        sent["broadcast", "world"] = WIDE[run.loop.precision] * parameter_count(run.model)
    return sent


def _whole_model(run: Run, world_size: int, rank: int) -> Held:
    states = model_state_bytes(run.model, run.optimizer.name, run.loop.precision)
    held = ("parameters", "gradients", "optimizer states")
    return {category: states[category] for category in held}


def _ddp_held(run: Run, world_size: int, rank: int) -> Held:
    state = _whole_model(run, world_size, rank)
    if run.parallel.distributed_optimizer:
        mine, wide = _owned(run, world_size, rank), WIDE[run.loop.precision]
        state["optimizer states"] = optimizer_bytes(run.optimizer.name, mine, wide)
    if run.compression.method != "none":
        held = radius_held if run.compression.method == "radius" else rivals_held
        state["compression"] = held(run)
    return state


def _owned(run: Run, world_size: int, rank: int) -> dict[str, tuple[int, ...]]:
    """The parameters whose optimizer states are on `rank`.

    torch's ZeroRedundancyOptimizer assigns first matrices, then vectors, each from the largest on,
    to the rank that has least.
    """
    owned, sizes = [{} for _ in range(world_size)], [0] * world_size
    for group in optimizer_groups(run.model, run.optimizer.name):
        for name, shape in sorted(group.items(), key=lambda item: -prod(item[1])):
            owner = sizes.index(min(sizes))
            owned[owner][name] = shape
            sizes[owner] += prod(shape)
    return owned[rank]


# pipeline ----------------------------------------------------------------------------------------


def _pipeline_traffic(run: Run, world_size: int, rank: int) -> Traffic:
    """Between stages the residual stream and its gradient, over dp gradients.

    Per micro-batch, adjacent pieces on different ranks exchange the residual stream (B T D numbers,
    in the precision of the weights) and its gradient. Once a step gradients are averaged over dp,
    and those of a tied embedding are summed between the first and the last piece.
    """
    pieces = stage_ranks(run.parallel.pp, run.parallel.virtual_stages)
    dp = world_size // run.parallel.pp
    pp_rank = rank // dp  # ranks are numbered pp x dp
    n_micro, size = run.loop.micro_batches(dp)
    wide = WIDE[run.loop.precision]
    message = size * run.loop.seq_len * run.model.d_model * wide
    # At each boundary with another rank this rank sends either the stream or its gradient.
    boundaries = sum(
        (a == pp_rank) + (b == pp_rank) for a, b in zip(pieces, pieces[1:], strict=False) if a != b
    )
    # A mesh axis with all ranks is called world.
    neighbours, copies = ("pp" if dp > 1 else "world"), ("dp" if run.parallel.pp > 1 else "world")
    sent = {(op, neighbours): n_micro * message * boundaries for op in ("send", "recv")}
    if dp > 1:
        sent["all_reduce", copies] = wide * sum(map(prod, _shapes(run, pp_rank).values()))
    ends = {pieces[0], pieces[-1]}
    if run.model.tied and len(ends) == 2 and pp_rank in ends:
        sent["all_reduce", "embedding"] = wide * run.model.vocab_size * run.model.d_model
    return sent


def _pipeline_held(run: Run, world_size: int, rank: int) -> Held:
    """As in serial, but only the rank's pieces."""
    shapes = _shapes(run, rank // (world_size // run.parallel.pp))
    numbers = sum(map(prod, shapes.values()))
    wide = WIDE[run.loop.precision]
    return {
        "parameters": wide * numbers,
        "gradients": wide * numbers,
        "optimizer states": optimizer_bytes(run.optimizer.name, shapes, wide),
    }


def _shapes(run: Run, pp_rank: int) -> dict[str, tuple[int, ...]]:
    """The tensors of one pipeline rank; one that is first and last has a tied embedding once."""
    pieces = stage_ranks(run.parallel.pp, run.parallel.virtual_stages)
    shapes = parameter_shapes(run.model)
    layers = run.model.n_layer // len(pieces)
    own = {}
    for name, shape in shapes.items():
        if name.startswith("blocks."):
            ranks = {pieces[int(name.split(".")[1]) // layers]}
        elif name.startswith(("norm.", "head.")):
            ranks = {pieces[-1]}
        else:
            also_last = name.startswith("token") and run.model.tied
            ranks = {pieces[0], pieces[-1]} if also_last else {pieces[0]}
        if pp_rank in ranks:
            own[name] = shape
    return own


_Sends = Callable[[Run, int, int], Traffic]
_Holds = Callable[[Run, int, int], Held]
_STRATEGIES: dict[str, tuple[_Sends, _Holds]] = {
    "serial": (lambda run, world_size, rank: {}, _whole_model),
    "ddp": (_ddp, _ddp_held),
    "zero": (zero_traffic, zero_held),
    "fsdp": (fsdp_traffic, fsdp_held),
    "pipeline": (_pipeline_traffic, _pipeline_held),
    "megatron": (megatron_traffic, megatron_held),
}
