"""DeepSpeed's ZeRO and torch's FSDP (fully_shard): exact bytes that a step sends and a rank holds.

ZeRO: n parameters, N ranks, m micro-batches per rank and step; w bytes of a weight in the model
(fp32 4, bf16 2):

    stage 0    all_reduce w n
    stage 1    all_reduce w n, all_gather w n of the new weights: not the paper's reduce_scatter
    stage 2    all_reduce w n in every micro-batch: a rank keeps its share of the sum, no more
    stage 3    all_gather w n twice in every micro-batch (forward, backward) and reduce_scatter w n

all padded, plus a few numbers once a step (overflow and norm). From stage 1 on, the optimizer
updates fp32 masters of the rank's weights, even if the model is in fp32.

FSDP: each block is one unit; the rest (embeddings, last norm, head) is the root unit. A parameter
of d0 rows is cut into ceil(d0 / n) rows a rank, n the ranks that share one copy.

    all_gather       in every micro-batch every unit forward, and blocks again backward if freed
    reduce_scatter   once a step every unit's gradients (kept whole until the last micro-batch)
    all_reduce       with copies of the model (hybrid sharding): each rank's share of the sums, over
                     the copies
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, prod

from aiscale.plan.config import Run
from aiscale.plan.cost.memory import MOMENTS, NARROW, WIDE, counter_bytes, optimizer_bytes, round_up
from aiscale.plan.cost.parameters import Shape, block_shapes, optimizer_groups, parameter_shapes

FP32 = 4  # ZeRO's masters and moments

# ZeRO --------------------------------------------------------------------------------------------


def zero_traffic(run: Run, world_size: int, rank: int) -> dict[tuple[str, str], int]:
    if world_size == 1:
        return {}
    stage, numbers = run.parallel.zero_stage, _numbers(run)
    n_micro, _ = run.loop.micro_batches(world_size)
    weight = _weight_bytes(run)
    if stage == 3:
        whole = weight * sum(round_up(n, world_size) for n in numbers)
        again = weight * sum(round_up(n, world_size) for n in _recomputed(run))
        return {
            ("all_gather", "world"): n_micro * (2 * whole + again),
            ("reduce_scatter", "world"): n_micro * whole,
            ("all_reduce", "world"): _few_numbers(run),
        }
    times = n_micro if stage == 2 else 1
    sent = {("all_reduce", "world"): weight * sum(numbers) * times + _few_numbers(run)}
    if stage:
        sent["all_gather", "world"] = weight * sum(_padded_groups(run, world_size))
    return sent


def zero_held(run: Run, world_size: int, rank: int) -> dict[str, int]:
    """Bytes of one rank: between steps, but of gradients before the update."""
    stage, numbers, weight = run.parallel.zero_stage, _numbers(run), _weight_bytes(run)
    moments = MOMENTS[run.optimizer.name]
    if stage == 0:
        masters = FP32 if weight < FP32 else 0
        parameters, gradients = weight * sum(numbers), weight * sum(numbers)
        states, updated = (masters + moments * FP32) * sum(numbers), len(numbers)
    elif stage == 3:
        own = sum(ceil(n / world_size) for n in numbers)
        parameters, gradients = weight * own, weight * own
        states, updated = (1 + moments) * FP32 * own, len(optimizer_groups(run.model))
    else:
        padded = _padded_groups(run, world_size)
        parameters = weight * sum(padded)
        gradients = weight * (sum(numbers) if stage == 1 else _touched(run, world_size, rank))
        states, updated = (1 + moments) * FP32 * sum(padded) // world_size, len(padded)
    states += counter_bytes(run.optimizer.name, updated)
    return {"parameters": parameters, "gradients": gradients, "optimizer states": states}


def _recomputed(run: Run) -> list[int]:
    """Sizes of the weights that activation checkpointing gathers again to recompute blocks.

    All but the last layer, since torch stops recomputing once it has that layer's input.
    """
    if not run.model.activation_checkpointing:
        return []
    shapes = block_shapes(run.model)
    last = list(shapes)[-1].rpartition(".")[0]
    block = [prod(shape) for name, shape in shapes.items() if not name.startswith(last)]
    return block * run.model.n_layer


def _weight_bytes(run: Run) -> int:
    return min(FP32, NARROW[run.loop.precision])  # DeepSpeed has no fp64


def _numbers(run: Run) -> list[int]:
    return [prod(shape) for shape in parameter_shapes(run.model).values()]


def _padded_groups(run: Run, ranks: int) -> list[int]:
    """Each group's numbers, rounded up to a multiple of 2 N: shards are aligned to 4 bytes."""
    groups = optimizer_groups(run.model)
    return [round_up(sum(map(prod, group.values())), 2 * ranks) for group in groups]


def _touched(run: Run, ranks: int, rank: int) -> int:
    """Numbers in all tensors that overlap this rank's shard: stage 2 keeps all their gradients."""
    touched = 0
    for group, padded in zip(optimizer_groups(run.model), _padded_groups(run, ranks), strict=True):
        share, begin = padded // ranks, 0
        for numbers in map(prod, group.values()):
            if begin < (rank + 1) * share and begin + numbers > rank * share:
                touched += numbers
            begin += numbers
        if rank == ranks - 1:
            touched += padded - begin
    return touched


def _few_numbers(run: Run) -> int:
    """Bytes of the gradient norm, a number of each optimizer group; in 16 bits an overflow flag."""
    stage, is_wide = run.parallel.zero_stage, _weight_bytes(run) == FP32
    groups = len(optimizer_groups(run.model))
    if stage == 0:
        return 4 if is_wide and run.optimizer.clip_norm > 0 else 0
    if stage == 3:
        return groups * 8
    return groups * 4 + (0 if is_wide else 1)


# FSDP --------------------------------------------------------------------------------------------


def fsdp_traffic(run: Run, world_size: int, rank: int) -> dict[tuple[str, str], int]:
    layout, loop = run.parallel, run.loop
    replicas = layout.replicas
    ranks = world_size // replicas
    n_micro, _ = loop.micro_batches(world_size)
    wide = WIDE[loop.precision]
    gathered = NARROW[loop.precision]
    shapes = parameter_shapes(run.model)
    whole = padded(shapes.values(), ranks)
    blocks = (shape for name, shape in shapes.items() if name.startswith("blocks."))
    again = padded(blocks, ranks) if layout.reshard_after_forward else 0
    # A mesh axis with all ranks is called world.
    shard = "world" if replicas == 1 else "shard"
    copies = "world" if ranks == 1 else "replicate"
    sent = {}
    if ranks > 1:
        sent["all_gather", shard] = n_micro * gathered * (whole + again)
        sent["reduce_scatter", shard] = wide * whole
        if run.optimizer.name == "muon":  # orthogonalizes whole matrices
            matrices = optimizer_groups(run.model, "muon")[0]
            sent["all_gather", shard] += wide * padded(matrices.values(), ranks)
    if replicas > 1:
        sent["all_reduce", copies] = wide * whole // ranks
    return sent


def fsdp_held(run: Run, world_size: int, rank: int) -> dict[str, int]:
    """Bytes of one rank between steps.

    Weights, gradients and moments are in fp32 (fp64) even if bf16 is gathered.
    """
    ranks = world_size // run.parallel.replicas
    place = rank % ranks
    wide = WIDE[run.loop.precision]
    shapes = parameter_shapes(run.model)
    padding_included = wide * padded(shapes.values(), ranks) // ranks
    own = {}
    for name, (rows, *rest) in shapes.items():
        each = ceil(rows / ranks)
        own[name] = (max(0, min(each, rows - place * each)), *rest)
    states = optimizer_bytes(run.optimizer.name, own, wide)
    return {
        "parameters": padding_included,
        "gradients": padding_included,
        "optimizer states": states,
    }


def padded(shapes: Iterable[Shape], ranks: int) -> int:
    """Numbers in the tensors of `shapes` when their rows are padded to a multiple of `ranks`."""
    return sum(round_up(shape[0], ranks) * prod(shape[1:]) for shape in shapes)
