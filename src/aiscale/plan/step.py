"""Seconds of one optimizer step of a layout, and where they go.

    T = sum_i t_i + (m - 1) max_i t_i + messages + exposed exchange + optimizer + s log2 nodes

over stages i and m micro-batches; t_i is the longer of what the device computes and what the host
needs to launch it. Interleaved schedules divide the fill by v. A product of M x N x K runs at best
x tiles / (units x waves) x K / (K + k) of the peak, or at the speed of memory; attention and
everything else that reads and writes memory are apart. A collective takes
`cost.collective_seconds`, and longer by two constants, inside a node and between nodes: in training
ranks arrive at different times, and other work uses the same memory, cores and switches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from aiscale.plan.hardware import Platform
from aiscale.plan.layer import LayerTime, seconds, tokens_of
from aiscale.plan.layout import Layout, Shape, StageShape
from aiscale.plan.memory import stage_grids, stage_parameters
from aiscale.plan.products import product_seconds
from aiscale.plan.stalls import likely_wait_s

#: Of a Llama: queries, keys and values in one, attention's output, two of the MLP, two norms.
TENSORS_OF_A_LAYER = 6


@dataclass(frozen=True)
class Step:
    """Seconds of one step by cause."""

    total_s: float
    compute_s: float  #: of the slowest stage, all micro-batches
    bubble_s: float
    optimizer_s: float
    recompute_s: float
    launch_bound: bool  #: the host, not the device, sets the pace of the slowest stage
    parts: dict[str, float]  #: exchange that no computation hides, by kind
    stages_s: list[float]  #: of one micro-batch on each pipeline stage, forward and backward

    def causes(self) -> dict[str, float]:
        """Seconds by cause, which sum to the total."""
        parts = {
            "computation": self.compute_s - self.recompute_s,
            "recomputation": self.recompute_s,
        }
        return (
            parts | {"bubble": self.bubble_s} | self.parts | {"optimizer, fixed": self.optimizer_s}
        )


class StageTime(NamedTuple):
    """One stage and micro-batch, forward and backward."""

    seconds: float
    launch_bound: bool  #: the host, not the device, sets the pace
    tensor_s: float  #: exchange between tensor- and context-parallel ranks that is waited for
    experts_s: float  #: exchange between expert-parallel ranks that is waited for
    sharded_s: float  #: exchange of sharded weights that is waited for


def _time_stages(
    shape: Shape, layout: Layout, layer: LayerTime, platform: Platform, c
) -> list[StageTime]:
    head_s, head_host = _head_seconds(shape, layout, platform, c)
    accumulate = 6 if layout.micro_batches > 1 else 0
    if layout.software.fp32_gradients:
        accumulate = c.accumulate_bytes
    accumulate /= platform.memory_bytes_s * c.memory_share
    unit, sharded_layer, sharded_table = layer.forward + layer.backward, 0.0, 0.0
    if layout.shards_weights:
        waited = layer.tensor + layer.experts
        sharded_layer = _sharded_layer(shape, layout, layer, platform, c) - unit - waited
        # Tables are gathered before the first layer computes; their gradients are scattered after
        # the last one has.
        sharded_table = sum(_gather_and_scatter(shape.table_parameters, 0, layout, platform, c))
    times = []
    for stage in layout.stages(shape):
        ends = stage.embedding + stage.head
        tensor = stage.layers * layer.tensor + ends * layer.table
        sharded = (
            stage.layers * sharded_layer + (1 if shape.tied and ends == 2 else ends) * sharded_table
        )
        experts = stage.layers * layer.experts
        device = stage.layers * unit + tensor + experts + sharded
        device += head_s if stage.head else 0.0
        if not layout.shards_weights:
            device += stage_parameters(shape, layout, stage) * accumulate
        host = stage.layers * layer.host + (head_host if stage.head else 0.0)
        times.append(StageTime(max(device, host), host > device, tensor, experts, sharded))
    return times


def step_seconds(shape: Shape, layout: Layout, platform: Platform, c) -> Step:
    """The time of one step; the layout must have passed Layout.check."""
    layer = LayerTime(shape, layout, platform, c)
    times, stages = _time_stages(shape, layout, layer, platform, c), layout.stages(shape)
    m, p, v = layout.micro_batches, layout.pp, layout.virtual_stages
    at = max(range(p), key=lambda i: times[i].seconds)
    slowest, launch_bound, tensor_s, experts_s, sharded_s = times[at]
    fill = (
        (sum(stage.seconds for stage in times) - slowest)
        / v
        / (3 if layout.schedule == "zero-bubble" else 1)
    )
    sent = (
        message_of_stage(shape, layout, platform, c)
        * v
        * (2 * (p - 1) + 2 * c.message_exposed * (m - 1))
    )
    # p micro-batches run between two pieces of a rank
    window = times[0].seconds * (min(m, p) if v > 1 else 1)
    dense, experts = stage_grids(shape, layout, stages[0])
    exchange = _exchange(dense, layout, window, platform, c)
    exchange += _expert_exchange(experts, layout, window, platform, c)
    exchange += _shard_copies(layout, stages[0], platform, c)
    optimizer = _optimizer(shape, layout, stages, platform, c)
    waiting = c.straggler_s * math.log2(max(1.0, layout.gpus / platform.gpus_per_node))
    stalled = likely_wait_s(layout, platform, c)
    total = fill + m * slowest + sent + exchange + optimizer + c.step_s + waiting + stalled
    waited = 0 if launch_bound else m
    parts = {"tensor parallel": waited * tensor_s, "pipeline messages": sent + stalled}
    if shape.experts:
        parts["tokens to experts"] = waited * experts_s
    parts |= {
        "gradients and weights": exchange + waited * sharded_s,
        "waiting for the slowest": waiting,
    }
    return Step(
        total_s=total,
        compute_s=m * slowest - waited * (tensor_s + experts_s + sharded_s),
        bubble_s=fill,
        parts=parts,
        optimizer_s=optimizer + c.step_s,
        recompute_s=m * stages[at].layers * layer.recompute,
        launch_bound=launch_bound,
        stages_s=[stage.seconds for stage in times],
    )


def _head_seconds(shape: Shape, layout: Layout, platform: Platform, c) -> tuple[float, float]:
    tokens = tokens_of(shape, layout)
    columns = 64 * math.ceil(shape.vocab / (64 * layout.tp))  # padded, as Megatron and others do
    peak = platform.peak("bf16" if layout.precision == "fp8" else layout.precision)
    passes = (
        (tokens, columns, shape.hidden),
        (tokens, shape.hidden, columns),
        (shape.hidden, columns, tokens),
    )
    products = sum(product_seconds(*dims, 1, platform, peak, c) for dims in passes)
    traffic = c.logit_traffic * (c.fused_loss if layout.software.fused_loss else 1.0)
    moved = traffic * tokens * columns / (platform.memory_bytes_s * c.memory_share)
    launches = c.launch_s + c.launch_slow_s * layout.software.slow_host
    return products + moved, launches / platform.host_s


def _sharded_layer(shape: Shape, layout: Layout, layer: LayerTime, platform: Platform, c) -> float:
    """Weights are gathered before each pass, gradients scattered after, beside computation.

    Each slows the other.
    """
    calls = 12 if layout.software.per_tensor_gather else 1  # 4 matrices, and biases and norms
    parts = shape.dense_parameters, shape.expert_parameters
    gather, scatter = _gather_and_scatter(*parts, layout, platform, c, calls)
    waited = layer.tensor + layer.experts
    forward, backward = layer.forward + waited / 3, layer.backward + waited * 2 / 3
    if layout.wide_gradient > layout.wide:
        backward += (
            c.cast_bytes
            * (shape.dense_parameters / layout.tp + shape.expert_parameters / layout.ep)
            / (platform.memory_bytes_s * c.memory_share)
        )
    behind = scatter + (gather if layout.software.regather else 0.0)
    behind += gather if layout.software.per_tensor_gather and layout.recompute == "full" else 0.0

    def beside(compute: float, exchange: float) -> float:
        if not layout.software.overlap:
            return compute + exchange
        return max(compute, exchange) + c.contention * min(compute, exchange)

    return beside(forward, gather) + beside(backward, behind)


def _gather_and_scatter(
    dense: float, experts: float, layout: Layout, platform: Platform, c, calls: int = 1
) -> tuple[float, float]:
    """Seconds to gather these parameters, divided by tp or ep, and to scatter their gradients."""
    grids = ((dense / layout.tp, layout.state_shards, layout.tp),)
    if experts:
        ranks = layout.ep * layout.etp
        grids += ((experts / ranks, layout.expert_shards, ranks),)
    gather = scatter = 0.0
    for part, n, apart in grids:
        g, part = max(1, platform.gpus_per_node // apart), part / calls
        gather += calls * seconds("all_gather", layout.wide * part, n, g, platform, c)
        scatter += calls * seconds("reduce_scatter", layout.wide_gradient * part, n, g, platform, c)
    return gather, scatter


def message_of_stage(shape: Shape, layout: Layout, platform: Platform, c) -> float:
    """Seconds of a message between stages, while every rank of the node sends its share of one."""
    if layout.pp == 1:
        return 0.0
    nbytes = layout.wide * layout.micro_batch * shape.seq / layout.cp * shape.hidden / layout.tp
    beside = layout.dp * layout.tp * layout.cp < platform.gpus_per_node
    return seconds("send", nbytes, 2, 2 if beside else 1, platform, c)


def _exchange(parameters: float, layout: Layout, first_s: float, platform: Platform, c) -> float:
    """Exposed seconds of exchange: of gradients, and of weights that a sharded optimizer returns.

    On the first stage: its parameters, and the seconds that it computes meanwhile.
    """
    n = layout.replicas
    if n == 1 or layout.shards_weights:
        return 0.0
    g = max(1, platform.gpus_per_node // layout.tp)
    sent = layout.density + (1 - layout.density) / layout.period
    gradient = layout.wide_gradient * parameters * sent
    shards = layout.state_shards
    if shards == 1:
        reduce = seconds("all_reduce", gradient, n, g, platform, c)
        back = 0.0
    else:
        reduce = seconds("reduce_scatter", gradient, shards, g, platform, c)
        back = seconds("all_gather", layout.wide * parameters, shards, g, platform, c)
        if layout.software.broadcasts:
            back += shards * c.broadcast_s
        copies = n // shards
        if copies > 1:
            per_node = max(1, g // shards)
            reduce += seconds("all_reduce", gradient / shards, copies, per_node, platform, c)
    hidden = c.overlap_share * first_s * 2 / 3 if layout.software.overlap else 0.0
    if layout.zero_stage == 2:
        reduce, hidden = reduce * layout.micro_batches, hidden * layout.micro_batches
    if layout.software.gather_overlap:
        back = max(0.1 * back, back - first_s / 3)
    return max(reduce - hidden, c.never_hidden * reduce) + back


def _shard_copies(layout: Layout, stage: StageShape, platform: Platform, c) -> float:
    """Seconds of the pieces that a sharded optimizer cuts and copies: one a tensor and owner."""
    if not layout.software.shard_copies or layout.shards_weights or layout.state_shards == 1:
        return 0.0
    tensors = TENSORS_OF_A_LAYER * stage.layers + stage.embedding + stage.head
    return layout.state_shards * tensors * c.shard_copy_s / platform.host_s


def _expert_exchange(
    parameters: float, layout: Layout, first_s: float, platform: Platform, c
) -> float:
    """The same for routed experts, whose gradients are averaged over fewer ranks.

    They leave while those of everything else do, so half of the time that hides both is theirs.
    """
    n = layout.expert_replicas
    if not parameters or n == 1 or layout.shards_weights:
        return 0.0
    apart = layout.ep * layout.etp
    g = max(1, platform.gpus_per_node // apart)
    gradient = layout.wide_gradient * parameters
    if layout.expert_shards == 1:
        reduce = seconds("all_reduce", gradient, n, g, platform, c)
        back = 0.0
    else:
        reduce = seconds("reduce_scatter", gradient, n, g, platform, c)
        back = seconds("all_gather", layout.wide * parameters, n, g, platform, c)
    hidden = c.overlap_share * first_s / 3 if layout.software.overlap else 0.0
    if layout.software.gather_overlap:
        back = max(0.1 * back, back - first_s / 6)
    return max(reduce - hidden, c.never_hidden * reduce) + back


def _optimizer(
    shape: Shape, layout: Layout, stages: tuple[StageShape, ...], platform: Platform, c
) -> float:
    grids = [stage_grids(shape, layout, stage) for stage in stages]
    most = max(
        dense / layout.state_shards + experts / layout.expert_shards for dense, experts in grids
    )
    nbytes = c.optimizer_bytes if layout.software.fused_optimizer else c.eager_optimizer_bytes
    return most * nbytes / (platform.memory_bytes_s * c.memory_share)
