"""torch's pipelines to the byte: what a step of `parallel.pipeline` sends and what a rank holds.

Between two pieces of the model on different ranks travel, for every micro-batch, its residual stream (B T D numbers, in
the precision of the weights) and back the stream's gradient. Once a step gradients are averaged over dp, and those of a
tied embedding are added up between the first and the last piece. Which rank has which piece: `pipeline.stage_ranks`.
"""

from __future__ import annotations

from math import prod

from aiscale.config import Run
from aiscale.cost.parameters import parameter_shapes
from aiscale.cost.pipeline import stage_ranks


def _ranks_of_pieces(run: Run) -> list[int]:
    layout = run.parallel
    return stage_ranks(layout.schedule, layout.pp, layout.virtual_stages)


def pipeline_traffic(run: Run, world_size: int, rank: int) -> dict[tuple[str, str], int]:
    """Payload bytes of one optimizer step, by (collective, group)."""
    pieces = _ranks_of_pieces(run)
    dp = world_size // run.parallel.pp
    pp_rank = rank // dp  # ranks are numbered pp x dp
    n_micro, size = run.loop.micro_batches(dp)
    wide = 8 if run.loop.precision == "fp64" else 4
    message = size * run.loop.seq_len * run.model.d_model * wide
    # Each boundary between this rank and another: the stream passes one way, its gradient the other.
    boundaries = sum((a == pp_rank) + (b == pp_rank) for a, b in zip(pieces, pieces[1:], strict=False) if a != b)
    # An axis of the mesh that has all ranks is the world.
    neighbours, copies = ("pp" if dp > 1 else "world"), ("dp" if run.parallel.pp > 1 else "world")
    sent = {(op, neighbours): n_micro * message * boundaries for op in ("send", "recv")}
    if dp > 1:
        sent["all_reduce", copies] = wide * sum(prod(shape) for shape in _shapes(run, pp_rank))
    ends = {pieces[0], pieces[-1]}
    if run.model.tied and len(ends) == 2 and pp_rank in ends:
        sent["all_reduce", "embedding"] = wide * run.model.vocab_size * run.model.d_model
    return sent


def pipeline_held(run: Run, world_size: int, rank: int) -> dict[str, int]:
    """Bytes of one rank between steps: of its pieces alone, as serial holds them."""
    shapes = _shapes(run, rank // (world_size // run.parallel.pp))
    numbers = sum(prod(shape) for shape in shapes)
    wide = 8 if run.loop.precision == "fp64" else 4
    adam = run.optimizer.name == "adamw"
    return {
        "parameters": wide * numbers,
        "gradients": wide * numbers,
        "optimizer states": wide * (2 if adam else 1) * numbers + (4 * len(shapes) if adam else 0),
    }


def _shapes(run: Run, pp_rank: int) -> list[tuple[int, ...]]:
    """The tensors of one pipeline rank; one that is the first and the last has a tied embedding once."""
    pieces, shapes = _ranks_of_pieces(run), parameter_shapes(run.model)
    layers = run.model.n_layer // len(pieces)
    own = []
    for name, shape in shapes.items():
        if name.startswith("blocks."):
            ranks = {pieces[int(name.split(".")[1]) // layers]}
        elif name.startswith(("norm.", "head.")):
            ranks = {pieces[-1]}
        else:
            ranks = {pieces[0]} | ({pieces[-1]} if name.startswith("token") and run.model.tied else set())
        if pp_rank in ranks:
            own.append(shape)
    return own
