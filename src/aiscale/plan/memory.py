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
    dense, experts = stage_grids(shape, layout, stage)
    tokens = layout.micro_batch * shape.seq / layout.cp
    weights, gradients, optimizer, live = _states(shape, layout, dense, experts)
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
        groups = communicators(layout)
        nbytes["context"] += c.context_bytes + groups * c.communicator_bytes
    return nbytes


def stage_parameters(shape: Shape, layout: Layout, stage: StageShape) -> float:
    """Parameters of one rank of the stage, before they are divided over data-parallel ranks."""
    return sum(stage_grids(shape, layout, stage))


def stage_grids(shape: Shape, layout: Layout, stage: StageShape) -> tuple[float, float]:
    """(what every token meets, routed experts): parameters of one rank, on Megatron-Core's grids.

    tp divides the first, but for norms and, with latent attention, the small compressing matrices;
    ep and etp divide the second.
    """
    tables = 1 if shape.tied and stage.embedding and stage.head else stage.embedding + stage.head
    whole = 2 * shape.hidden  # norms are not divided by tp
    if shape.latent:
        whole += shape.hidden * (shape.q_rank + shape.kv_rank + shape.rope_width)
    divided = stage.layers * (shape.dense_parameters - whole) + tables * shape.table_parameters
    dense = divided / layout.tp + stage.layers * whole + (shape.hidden if stage.head else 0)
    return dense, stage.layers * shape.expert_parameters / (layout.ep * layout.etp)


def in_flight(layout: Layout, index: int) -> float:
    """Micro-batches whose activations a stage holds at once."""
    if layout.schedule == "gpipe":
        return layout.micro_batches
    p, v = layout.pp, layout.virtual_stages
    if v > 1:
        return min(layout.micro_batches, max(1.0, p * (1 + (p - 1) / (p * v)) - 2 * index / v))
    return min(layout.micro_batches, p - index)


def _states(
    shape: Shape, layout: Layout, dense: float, experts: float
) -> tuple[float, float, float, float]:
    """(weights, gradients, optimizer states, live buffers)."""
    wide, gradient = layout.wide, layout.wide_gradient
    parameters = dense + experts
    sharded = dense / layout.state_shards + experts / layout.expert_shards
    states = (8 if wide == 4 else 12) * sharded
    if layout.shards_weights:
        layer = shape.dense_parameters / layout.tp
        layer += shape.expert_parameters / (layout.ep * layout.etp)
        live = layer * (2 * wide + gradient) + shape.table_parameters / layout.tp * wide
        # whole weights and gradients live through the step
        if not layout.software.regather and layout.pp > 1:
            live = parameters * (wide + gradient)
        if layout.fsdp and wide == 2:  # fp32 shards are weights and master copy in one
            return sharded * 4, sharded * 4, sharded * 8, live
        return sharded * wide, sharded * gradient, states, live
    gradients = gradient * (sharded if layout.zero_stage == 2 else parameters)
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
    D, t = shape.hidden, layout.tp
    each = (c.gated_bytes if shape.gated else c.gelu_bytes) * _fused_share(shape, layout)
    mlp = each * shape.dense_width
    whole = 1 if layout.sequence_parallel else t
    # q, k, v and attention's output
    heads = 2 * shape.attention_kept
    nbytes = tokens * ((c.stream_bytes * D) * whole + heads + mlp) / t
    if layout.recompute == "selective" and layout.software.flash:
        nbytes *= c.selective_kept
    if not layout.software.flash and layout.recompute != "selective":
        nbytes += 5 * shape.heads * tokens * shape.seq / layout.cp / t
    return nbytes + _expert_bytes(shape, layout, tokens, each)


def _fused_share(shape: Shape, layout: Layout) -> float:
    """Of the four tensors of a SwiGLU a fused kernel keeps three."""
    fused = layout.software.compiled or layout.software.fused_swiglu
    return 0.75 if shape.gated and fused else 1.0


def _expert_bytes(shape: Shape, layout: Layout, tokens: float, each: float) -> float:
    """What routed experts keep: each copy of a token, its way up and its way down.

    The router balances, or drops what exceeds the capacity: a rank gets as many copies as it sends.
    The etp ranks of a cut expert gather theirs: each has all rows, and 1 / etp of the width.
    """
    copies = tokens / layout.expert_tokens_divisor * shape.top_k * (shape.capacity or 1.0)
    rows = 2 * shape.hidden * layout.etp
    nbytes = copies * (rows + each * shape.expert_width)
    if layout.recompute == "selective":
        # the activation between the two products is computed again
        nbytes = copies * (rows + 2 * (shape.matrices - 1) * shape.expert_width)
    return shape.expert_share * nbytes


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
        grids = [stage_grids(shape, layout, stage) for stage in layout.stages(shape)]
        saved = 3 * max(
            dense / layout.state_shards + experts / layout.expert_shards for dense, experts in grids
        )
    elif layout.zero_stage:
        # DeepSpeed keeps a rank's shard of each state as one tensor.
        saved = shape.parameters / layout.state_shards
    else:
        saved = largest
    return {"drawing weights": 4 * drawn, "saving": 4 * saved}


def checkpoint_bytes(shape: Shape, layout: Layout) -> float:
    """Bytes on disk of one checkpoint: fp32 weights and AdamW's two moments.

    Megatron and DeepSpeed write the weights in 16 bits beside their fp32 masters.
    """
    both = layout.wide == 2 and not layout.fsdp
    return (14 if both else 12) * shape.parameters


def fits(shape: Shape, layout: Layout, platform: Platform, c) -> bool:
    return needed_bytes(shape, layout, c) <= capacity_bytes(platform, layout, c)


def needed_bytes(shape: Shape, layout: Layout, c) -> float:
    """The fullest stage by torch's counters, without what its allocator only caches."""
    plain = replace(layout, software=replace(layout.software, counter="torch"))
    return peak_bytes(shape, plain, c)


def communicators(layout: Layout) -> int:
    """Groups of ranks that exchange, and that of all ranks."""
    return sum(size > 1 for size in (layout.tp, layout.pp, layout.replicas, layout.ep)) + 1


def capacity_bytes(platform: Platform, layout: Layout, c) -> float:
    """What remains for torch: the device's memory less context and communicators."""
    groups = communicators(layout)
    whole = platform.memory_bytes - c.context_bytes - groups * c.communicator_bytes
    return whole * c.reserve_share
