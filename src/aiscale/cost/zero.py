"""DeepSpeed's ZeRO to the byte: what a step of stage 0 to 3 sends and what a rank holds.

n parameters, N ranks, m micro-batches of a rank in a step; w bytes of a weight in the model (fp32 4, bf16 2):

    stage 0    all_reduce w n
    stage 1    all_reduce w n, all_gather w n of the new weights: not the reduce_scatter of the paper
    stage 2    all_reduce w n in every micro-batch: a rank keeps its own share of the sum and forgets the rest
    stage 3    all_gather w n twice in every micro-batch (forward, backward) and reduce_scatter w n

all padded, and on top a few numbers once a step (overflow and norm). Rajbhandari et al. 2020 count 2 n numbers for
stages 1 and 2 and 3 n for stage 3, sent: the all_reduce above is 2 of their n. Offloading changes nothing on the wire.

The optimizer updates fp32 masters of the weights that a rank owns, from stage 1 on also where the model is in fp32: so
on N ranks bf16 takes the paper's 2 + 2 + 12 bytes a parameter, divided as it says, and fp32 4 + 4 + 12.
"""

from __future__ import annotations

from math import prod

from aiscale.config import Run
from aiscale.cost.parameters import block_shapes, parameter_shapes

FP32 = 4  # masters and moments


def zero_traffic(run: Run, world_size: int, rank: int) -> dict[tuple[str, str], int]:
    """Payload bytes of one optimizer step, by (collective, group)."""
    if world_size == 1:
        return {}
    stage, numbers = run.parallel.zero_stage, _numbers(run)
    n_micro, _ = run.loop.micro_batches(world_size)
    weight = _weight_bytes(run)
    if stage == 3:
        whole = weight * sum(world_size * _share(n, world_size) for n in numbers)
        again = weight * sum(world_size * _share(n, world_size) for n in _recomputed(run))
        return {
            ("all_gather", "world"): n_micro * (2 * whole + again),
            ("reduce_scatter", "world"): n_micro * whole,
            ("all_reduce", "world"): _few_numbers(run),
        }
    sent = {("all_reduce", "world"): weight * sum(numbers) * (n_micro if stage == 2 else 1) + _few_numbers(run)}
    if stage:
        sent["all_gather", "world"] = weight * sum(_padded_groups(run, world_size))
    return sent


def zero_held(run: Run, world_size: int, rank: int) -> dict[str, int]:
    """Bytes of one rank: weights and optimizer states between steps, gradients as the update finds them."""
    stage, numbers, weight = run.parallel.zero_stage, _numbers(run), _weight_bytes(run)
    moments = 2 if run.optimizer.name == "adamw" else 1
    if stage == 0:
        masters = FP32 if weight < FP32 else 0
        parameters, gradients = weight * sum(numbers), weight * sum(numbers)
        states, updated = (masters + moments * FP32) * sum(numbers), len(numbers)
    elif stage == 3:
        own = sum(_share(n, world_size) for n in numbers)
        parameters, gradients = weight * own, weight * own
        if run.parallel.offload != "none":  # kept a second time, beside the masters that they update
            gradients += FP32 * own
        states, updated = (1 + moments) * FP32 * own, len(_groups(run))
    else:
        padded = _padded_groups(run, world_size)
        parameters = weight * sum(padded)
        gradients = weight * (sum(numbers) if stage == 1 else _touched(run, world_size, rank))
        if run.parallel.offload != "none":  # exactly its share, as the masters want it; at stage 1 besides
            gradients = FP32 * sum(padded) // world_size + (gradients if stage == 1 else 0)
        states, updated = (1 + moments) * FP32 * sum(padded) // world_size, len(padded)
    counters = FP32 * updated if run.optimizer.name == "adamw" else 0
    return {"parameters": parameters, "gradients": gradients, "optimizer states": states + counters}


def _recomputed(run: Run) -> list[int]:
    """The sizes of what activation checkpointing gathers once more, to compute blocks again: all but their last layer,
    where torch stops computing again as soon as it has that layer's input, so that it is not let go in between."""
    if not run.model.activation_checkpointing:
        return []
    shapes = block_shapes(run.model)
    last = list(shapes)[-1].rpartition(".")[0]
    block = [prod(shape) for name, shape in shapes.items() if not name.startswith(last)]
    return block * run.model.n_layer


def _weight_bytes(run: Run) -> int:
    return 2 if run.loop.precision in ("bf16", "fp16") else 4


def _numbers(run: Run) -> list[int]:
    return [prod(shape) for shape in parameter_shapes(run.model).values()]


def _groups(run: Run) -> list[list[int]]:
    """The sizes of the tensors in each of the optimizer's groups: matrices decay, vectors do not."""
    shapes = parameter_shapes(run.model).values()
    groups = [[prod(s) for s in shapes if len(s) >= 2], [prod(s) for s in shapes if len(s) < 2]]
    return [group for group in groups if group]


def _share(numbers: int, ranks: int) -> int:
    return -(-numbers // ranks)


def _padded_groups(run: Run, ranks: int) -> list[int]:
    """Each group's numbers, rounded up to a multiple of 2 N: shares are aligned to 4 bytes in 16 bits too."""
    return [2 * ranks * _share(sum(group), 2 * ranks) for group in _groups(run)]


def _touched(run: Run, ranks: int, rank: int) -> int:
    """Numbers in the tensors of which this rank owns a part: stage 2 keeps such a tensor's gradient whole."""
    touched = 0
    for group, padded in zip(_groups(run), _padded_groups(run, ranks), strict=True):
        share, begin = padded // ranks, 0
        for numbers in group:
            if begin < (rank + 1) * share and begin + numbers > rank * share:
                touched += numbers
            begin += numbers
        if rank == ranks - 1:
            touched += padded - sum(group)
    return touched


def _few_numbers(run: Run) -> int:
    """Bytes of what tells the ranks how large the gradients are together, a number for each group of the optimizer's,
    and in 16 bits whether they are finite."""
    stage, is_wide, groups = run.parallel.zero_stage, _weight_bytes(run) == FP32, len(_groups(run))
    if stage == 0:
        return 4 if is_wide and run.optimizer.clip_norm > 0 else 0
    if stage == 3:
        return groups * (8 if run.parallel.offload == "none" else 4)
    return groups * 4 + (0 if is_wide else 1)
