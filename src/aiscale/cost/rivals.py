"""What Radius's competitors send and keep, to the byte: random-k, top-k and PowerSGD.

    rivals_traffic(run, world_size)                # of a sparse step
    rivals_traffic(run, world_size, sparse=False)  # of a dense one: the warm-up
    rivals_held(run)                               # what compression adds to a rank's memory

e bytes of an entry on the wire, n ranks, k = max(floor(density x numel), 1) of each tensor, b entries of biases, which
go whole:

    random-k    all_reduce e (sum of k + b)
    top-k       all_gather n (4 + e) sum of k, indices and values; all_reduce e b
    powersgd    all_reduce e ((rows + columns) r of a matrix that this makes less than half, all else whole)
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from aiscale.config import Run
from aiscale.cost.compression import is_exempt, sent_entries, wire_entry_bytes
from aiscale.cost.parameters import parameter_count, parameter_shapes

INDEX_BYTES = 4
_WIDE = {"fp64": 8}  # bytes of a gradient; else 4


def rivals_traffic(run: Run, world_size: int, *, sparse: bool = True) -> dict[tuple[str, str], int]:
    """Payload bytes of one optimizer step, by (collective, group)."""
    if world_size == 1:
        return {}
    each = wire_entry_bytes(run)
    if not sparse:
        return {("all_reduce", "world"): each * parameter_count(run.model)}
    if run.compression.method == "powersgd":
        return {("all_reduce", "world"): each * sum(_powersgd_entries(run))}
    chosen, whole = sent_entries(run)
    if run.compression.method == "random-k":
        return {("all_reduce", "world"): each * (chosen + whole)}
    return {
        ("all_gather", "world"): world_size * (INDEX_BYTES + each) * chosen,
        ("all_reduce", "world"): each * whole,
    }


def rivals_held(run: Run) -> int:
    """Bytes that a rank keeps between steps to compress its gradients."""
    each = _WIDE.get(run.loop.precision, 4)
    if run.compression.method == "powersgd":
        shapes = parameter_shapes(run.model).values()
        factors = sum(_factor_entries(shape, run.compression.rank) for shape in shapes)
        return each * (parameter_count(run.model) + factors)
    numbers = {"none": 0, "sum": each, "mean": each + INDEX_BYTES}[run.compression.residual]  # an age beside the sum
    return numbers * sum(prod(shape) for name, shape in parameter_shapes(run.model).items() if not is_exempt(name))


def powersgd_rank(shape: Sequence[int], rank: int) -> int:
    """r of the factors that stand for a gradient of this shape, 0 where it goes whole."""
    rows, columns = shape[0], prod(shape[1:])
    r = min(rows, columns, rank)
    return r if (rows + columns) * r * 2 < rows * columns else 0


def _factor_entries(shape: Sequence[int], rank: int) -> int:
    return (shape[0] + prod(shape[1:])) * powersgd_rank(shape, rank)


def _powersgd_entries(run: Run) -> list[int]:
    shapes = parameter_shapes(run.model).values()
    return [_factor_entries(shape, run.compression.rank) or prod(shape) for shape in shapes]
