"""Bytes that a DDP step with compressed gradients sends and keeps: Radius, top-k, PowerSGD.

    gradient_traffic(run, 4)               # {("all_reduce", "world"): ...} of a sparse step
    gradient_traffic(run, 4, dense=True)   # of a dense step: in the warm-up, then every interval-th

    wire density of Radius = ((T - 1) (sum of k + b) + N) / (T N)

with N parameters, b of them biases, and the interval T.

Published rule of Radius (its artifact appendix): k = max(floor(density x numel), 1) of each tensor,
biases exempt. Sparse steps of the others, with e bytes per entry on the wire and n ranks (dense
steps are those of method none):

    top-k       all_gather n (4 + e) sum of k, indices and values; all_reduce e b
    powersgd    all_reduce e ((rows + columns) r for a matrix if that is less than half of it, all
                else whole)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import prod

from aiscale.errors import ConfigError
from aiscale.plan.config import Run
from aiscale.plan.cost.memory import WIDE
from aiscale.plan.cost.parameters import parameter_count, parameter_shapes

INDEX_BYTES = 4

Traffic = dict[tuple[str, str], int]  #: payload bytes by (collective, group)


def is_exempt(name: str) -> bool:
    """Whether the parameter `name` is always sent whole: biases are, also those of norms."""
    return name.endswith("bias")


def kept_entries(density: float, numel: int) -> int:
    """k, the number of entries sent of a tensor of `numel`."""
    return max(math.floor(density * numel), 1)


def sent_entries(run: Run) -> tuple[int, int]:
    """(entries of non-exempt parameters that a sparse step sends, entries of biases: all sent)."""
    shapes, vectors_too = parameter_shapes(run.model), run.compression.whole == "vectors"
    sizes = {name: prod(shape) for name, shape in shapes.items()}
    masked = [
        sizes[name]
        for name, shape in shapes.items()
        if not (is_exempt(name) or (vectors_too and len(shape) < 2))
    ]
    if run.compression.range:
        raise ConfigError(
            f"compression.range {run.compression.range}: how many neighbours coincide is "
            "known only when entries are chosen: measure what is sent (world.traffic), or set "
            "range=0"
        )
    kept = sum(kept_entries(run.compression.density, size) for size in masked)
    return kept, sum(sizes.values()) - sum(masked)


def gradient_traffic(run: Run, world_size: int, *, dense: bool = False) -> Traffic:
    """Payload bytes of one optimizer step by (collective, group); method none: always dense."""
    if world_size == 1:
        return {}
    config, each = run.compression, wire_entry_bytes(run)
    if dense or config.method == "none" or config.interval == 1:
        return {("all_reduce", "world"): each * parameter_count(run.model)}
    if config.method == "powersgd":
        shapes = parameter_shapes(run.model).values()
        entries = (_factor_entries(shape, config.rank) or prod(shape) for shape in shapes)
        return {("all_reduce", "world"): each * sum(entries)}
    chosen, whole = sent_entries(run)
    if config.method == "top-k":
        indexed = world_size * (INDEX_BYTES + each) * chosen
        return {("all_gather", "world"): indexed, ("all_reduce", "world"): each * whole}
    return {("all_reduce", "world"): each * (chosen + whole)}


def mean_payload_bytes(run: Run) -> float:
    """Payload bytes of a step of Radius, the mean of one dense step and T - 1 sparse ones."""
    dense, sparse = (sum(gradient_traffic(run, 2, dense=dense).values()) for dense in (True, False))
    return (dense + (run.compression.interval - 1) * sparse) / run.compression.interval


def radius_held(run: Run) -> int:
    """Bytes that a rank keeps between steps: one mask byte per entry, and a residual, if any."""
    residual = 0 if run.compression.residual == "none" else WIDE[run.loop.precision]
    return (1 + residual) * parameter_count(run.model)


def wire_entry_bytes(run: Run) -> int:
    return 2 if run.compression.wire == "bf16" else WIDE[run.loop.precision]


def rivals_held(run: Run) -> int:
    each = WIDE[run.loop.precision]
    if run.compression.method == "powersgd":
        shapes = parameter_shapes(run.model).values()
        factors = sum(_factor_entries(shape, run.compression.rank) for shape in shapes)
        return each * (parameter_count(run.model) + factors)
    return each * sum(
        prod(shape) for name, shape in parameter_shapes(run.model).items() if not is_exempt(name)
    )


def _factor_entries(shape: Sequence[int], rank: int) -> int:
    """Entries of PowerSGD's two factors of a gradient of this shape; 0 if it is sent whole."""
    rows, columns = shape[0], prod(shape[1:])
    entries = (rows + columns) * min(rows, columns, rank)
    return entries if 2 * entries < rows * columns else 0
