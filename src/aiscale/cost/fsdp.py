"""FSDP (torch's fully_shard) to the byte: what a step sends and what a rank holds.

Each block is one unit, what remains (embeddings, last norm, head) another, the root. A parameter of d0 rows is cut into
ceil(d0 / n) rows a rank, so a unit's buffers are padded to n ceil(d0 / n) rows of each of its tensors.

    all_gather       in every micro-batch every unit for the forward pass, and blocks again for the backward pass if
                     they were freed between
    reduce_scatter   once a step every unit's gradients (kept whole until the last micro-batch)
    all_reduce       with copies of the model (hybrid sharding): each rank's share of the sums, over the copies

n is the number of ranks that share one copy. With P bytes of parameters, one micro-batch and no padding that is 3 P
where DDP's all-reduce, a reduce-scatter and an all-gather, moves 2 P: one and a half times as much.
"""

from __future__ import annotations

from math import ceil, prod

from aiscale.config import Run
from aiscale.cost.parameters import block_shapes, parameter_shapes

Shapes = list[tuple[int, ...]]


def fsdp_traffic(run: Run, world_size: int, rank: int) -> dict[tuple[str, str], int]:
    """Payload bytes of one optimizer step, by (collective, group)."""
    layout, loop = run.parallel, run.loop
    replicas = layout.replicas
    ranks = world_size // replicas
    n_micro, _ = loop.micro_batches(world_size)
    wide = 8 if loop.precision == "fp64" else 4
    gathered = 2 if loop.precision == "bf16" else wide
    blocks, root = units(run)
    whole = padded(blocks, ranks) + padded(root, ranks)
    again = padded(blocks, ranks) if layout.reshard_after_forward else 0
    # An axis of the mesh that has all ranks is the world.
    shard, copies = ("world" if replicas == 1 else "shard"), ("world" if ranks == 1 else "replicate")
    sent = {}
    if ranks > 1:
        sent["all_gather", shard] = n_micro * gathered * (whole + again)
        sent["reduce_scatter", shard] = wide * whole
    if replicas > 1:
        sent["all_reduce", copies] = wide * whole // ranks
    return sent


def fsdp_held(run: Run, world_size: int, rank: int) -> dict[str, int]:
    """Bytes of one rank between steps. Weights, gradients and moments stay in fp32 (fp64) whatever is gathered."""
    ranks = world_size // run.parallel.replicas
    place = rank % ranks
    wide = 8 if run.loop.precision == "fp64" else 4
    shapes = list(parameter_shapes(run.model).values())
    padding_included = wide * padded(shapes, ranks) // ranks
    own = sum(shard_rows(shape[0], ranks, place) * prod(shape[1:]) for shape in shapes)
    moments = 2 if run.optimizer.name == "adamw" else 1
    counters = 4 * len(shapes) if run.optimizer.name == "adamw" else 0
    return {
        "parameters": padding_included,
        "gradients": padding_included,
        "optimizer states": wide * moments * own + counters,
    }


def units(run: Run) -> tuple[Shapes, Shapes]:
    """(the tensors of all blocks, the tensors of the root unit)."""
    shapes = parameter_shapes(run.model)
    blocks = list(block_shapes(run.model).values()) * run.model.n_layer
    return blocks, [shape for name, shape in shapes.items() if not name.startswith("blocks.")]


def shard_rows(rows: int, ranks: int, place: int) -> int:
    """The rows of a tensor of `rows` rows that the rank at `place` has."""
    each = ceil(rows / ranks)
    return max(0, min(each, rows - place * each))


def padded(shapes: Shapes, ranks: int) -> int:
    """Numbers in the tensors of `shapes` when their rows are padded to a multiple of `ranks`."""
    return sum(ranks * ceil(shape[0] / ranks) * prod(shape[1:]) for shape in shapes)
