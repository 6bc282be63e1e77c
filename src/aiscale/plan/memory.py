"""Bytes on each pipeline stage of a layout, by category, and whether they fit.

Letters: D hidden, F width of the MLP, V vocabulary, t tensor-parallel ranks.
"""

from __future__ import annotations

from dataclasses import replace

from aiscale.plan.hardware import Platform
from aiscale.plan.layout import Layout, Shape, StageShape

CATEGORIES = (
    "weights",
    "gradients",
    "optimizer states",
    "activations",
    "logits",
    "buffers",
    "context",
)


def stage_memory(shape: Shape, layout: Layout, c) -> list[dict[str, float]]:
    """Bytes by category of each stage, the allocator's fragments in `buffers`."""
    return [one_stage(shape, layout, index, c) for index in range(layout.pp)]


def peak_bytes(shape: Shape, layout: Layout, c, stage: int | None = None) -> float:
    """Bytes of the fullest stage, or of one."""
    stages = layout.stages(shape)
    indices = range(len(stages)) if stage is None else [stage]
    # inside, stages differ in their layers only; the earliest holds most
    if stage is None and len(stages) > 4:
        indices = {
            0,
            len(stages) - 1,
            len(stages) - 2,
            max(range(len(stages)), key=lambda i: stages[i].layers),
        }
    return max(sum(one_stage(shape, layout, i, c).values()) for i in indices)


def one_stage(shape: Shape, layout: Layout, index: int, c) -> dict[str, float]:
    software, stage = layout.software, layout.stages(shape)[index]
    parameters = stage_parameters(shape, layout, stage)
    tokens = layout.micro_batch * shape.seq / layout.cp
    weights, gradients, optimizer, live = _states(shape, layout, parameters)
    layer = layer_bytes(shape, layout, tokens, c)
    flight = in_flight(layout, index)
    stream = tokens * layout.wide * shape.hidden / (layout.tp if layout.sequence_parallel else 1)
    ends = c.ends_kept * stream if layout.pp > 1 else 0.0
    activations = flight * (stage.layers * (stream if layout.recompute == "full" else layer) + ends)
    if layout.recompute == "full":
        activations += layer * c.live_layers
    elif layout.tp > 1:
        kept = c.undivided_bytes if software.gathered_kept and layout.pp == 1 else c.gathered_bytes
        activations += kept * tokens * shape.hidden
    logits = tokens * c.logit_bytes_held * shape.vocab / layout.tp if stage.head else 0.0
    logits *= (
        c.fused_loss if software.fused_loss else c.loss_in_place if software.loss_in_place else 1.0
    )
    buffers = live + software.bucket_bytes + (c.allocator - 1) * (activations + logits)
    held = weights, gradients, optimizer, activations, logits, buffers, c.base_bytes
    nbytes = dict(zip(CATEGORIES, held, strict=True))
    if software.counter != "torch":
        nbytes["buffers"] += (c.smi_cache - 1) * (activations + logits + live)
    if software.counter == "smi":
        groups = sum(size > 1 for size in (layout.tp, layout.pp, layout.replicas)) + 1
        nbytes["context"] += c.context_bytes + groups * c.communicator_bytes
    return nbytes


def stage_parameters(shape: Shape, layout: Layout, stage: StageShape) -> float:
    """Parameters of one rank of the stage, before they are divided over data-parallel ranks."""
    tables = 1 if shape.tied and stage.embedding and stage.head else stage.embedding + stage.head
    whole = 2 * shape.hidden  # norms are not divided by tp
    divided = stage.layers * (shape.layer_parameters - whole) + tables * shape.table_parameters
    return divided / layout.tp + stage.layers * whole + (shape.hidden if stage.head else 0)


def in_flight(layout: Layout, index: int) -> float:
    """Micro-batches whose activations a stage holds at once."""
    if layout.schedule == "gpipe":
        return layout.micro_batches
    p, v = layout.pp, layout.virtual_stages
    if v > 1:
        return min(layout.micro_batches, max(1.0, p * (1 + (p - 1) / (p * v)) - 2 * index / v))
    return min(layout.micro_batches, p - index)


def _states(shape: Shape, layout: Layout, parameters: float) -> tuple[float, float, float, float]:
    """(weights, gradients, optimizer states, live buffers)."""
    wide, gradient, shards = layout.wide, layout.wide_gradient, layout.state_shards
    states = (8 if wide == 4 else 12) * parameters / shards
    if layout.shards_weights:
        live = (
            shape.layer_parameters * (2 * wide + gradient) + shape.table_parameters * wide
        ) / layout.tp
        # whole weights and gradients live through the step
        if not layout.software.regather and layout.pp > 1:
            live = parameters * (wide + gradient)
        if layout.fsdp and wide == 2:  # fp32 shards are weights and master copy in one
            return parameters * 4 / shards, parameters * 4 / shards, parameters * 8 / shards, live
        return parameters * wide / shards, parameters * gradient / shards, states, live
    gradients = parameters * gradient / (shards if layout.zero_stage == 2 else 1)
    software, beside = layout.software, layout.zero_stage < 2 and layout.dp > 1 and gradient == 4
    buckets = (
        parameters * wide if beside and software.overlap and not software.fused_gradients else 0.0
    )
    return parameters * wide, gradients, states, buckets


def layer_bytes(shape: Shape, layout: Layout, tokens: float, c) -> float:
    """Activations of one layer and micro-batch: (18 D + 8 F) / t without the score matrix.

    6 F if fused, 4 F for GELU; without sequence parallelism 10 D are not divided. The score matrix
    adds 5 H s bytes a token (Korthikanti).
    """
    D, F, t = shape.hidden, shape.width, layout.tp
    mlp = (c.gated_bytes if shape.gated else c.gelu_bytes) * F
    if shape.gated and (layout.software.compiled or layout.software.fused_swiglu):
        mlp *= 0.75  # three of the four tensors of a SwiGLU
    whole = 1 if layout.sequence_parallel else t
    # q, k, v and attention's output
    heads = (8 + 4 * (1 + 2 * shape.keys / shape.heads - 3) / 2) * D
    nbytes = tokens * ((c.stream_bytes * D) * whole + heads + mlp) / t
    if layout.recompute == "selective" and layout.software.flash:
        nbytes *= c.selective_kept
    if not layout.software.flash and layout.recompute != "selective":
        nbytes += 5 * shape.heads * tokens * shape.seq / layout.cp / t
    return nbytes


def host_bytes(shape: Shape, layout: Layout) -> dict[str, float]:
    """Bytes on the host of one rank with a GPU, by when it needs them: drawing its weights, in
    fp32, and saving. Python, its libraries and the pages of the text are not counted."""
    table = shape.table_parameters
    largest = max(table, *(columns * inner for _, columns, inner in shape.layer_products(1, 1)))
    model_parallel = layout.tp * layout.pp > 1
    # The trainers draw one tensor at a time, or the rank's part of it. DeepSpeed's stage 3 gets
    # all on the host.
    drawn = shape.parameters if layout.zero_stage == 3 else largest
    if model_parallel:
        # Megatron-Core's masters and two moments are copied before any is written.
        most = max(stage_parameters(shape, layout, stage) for stage in layout.stages(shape))
        saved = 3 * most / layout.state_shards
    elif layout.zero_stage:
        # DeepSpeed keeps a rank's shard of each state as one tensor.
        saved = shape.parameters / layout.state_shards
    else:
        saved = largest
    return {"drawing weights": 4 * drawn, "saving": 4 * saved}


def fits(shape: Shape, layout: Layout, platform: Platform, c) -> bool:
    return needed_bytes(shape, layout, c) <= capacity_bytes(platform, layout, c)


def needed_bytes(shape: Shape, layout: Layout, c) -> float:
    """The fullest stage by torch's counters, without what its allocator only caches."""
    plain = replace(layout, software=replace(layout.software, counter="torch"))
    return peak_bytes(shape, plain, c)


def capacity_bytes(platform: Platform, layout: Layout, c) -> float:
    """What remains for torch: the device's memory less context and communicators."""
    groups = sum(size > 1 for size in (layout.tp, layout.pp, layout.replicas)) + 1
    whole = platform.memory_bytes - c.context_bytes - groups * c.communicator_bytes
    return whole * c.reserve_share
