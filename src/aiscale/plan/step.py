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
from functools import lru_cache
from typing import NamedTuple

from aiscale.plan import cost
from aiscale.plan.hardware import Platform
from aiscale.plan.layout import Layout, Shape, StageShape
from aiscale.plan.memory import stage_parameters

#: Tiles of a product: rows, columns, share of the best rate.
TILES = (
    (128, 256, 1.0),
    (256, 128, 1.0),
    (128, 192, 0.97),
    (192, 128, 0.97),
    (128, 128, 0.92),
    (64, 128, 0.75),
    (64, 64, 0.55),
)


def seconds(op: str, nbytes: float, n: int, g: int, platform: Platform, c) -> float:
    """Seconds of one collective of `n` ranks, `g` of them on a node."""
    if n <= 1 or nbytes <= 0:
        return 0.0
    g = max(1, min(g, n, platform.gpus_per_node))
    longer = c.exchange_node if n <= g else c.exchange_network
    return longer * _seconds(op, int(nbytes), n, g, platform)


@lru_cache(maxsize=200_000)
def _seconds(op: str, nbytes: int, n: int, g: int, platform: Platform) -> float:
    return cost.collective_seconds(op, nbytes, platform.machine, ranks=n, per_node=g).seconds


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


@lru_cache(maxsize=200_000)
def wave_share(rows: int, columns: int, inner: int, many: int, units: int, half: float) -> float:
    """Share of the best product rate: full tiles on all units, and a long inner dimension."""
    best = 0.0
    for high, wide, share in TILES:
        tiles = many * math.ceil(rows / high) * math.ceil(columns / wide)
        # half of the last one's idle units find work
        waves = (math.ceil(tiles / units) + max(1.0, tiles / units)) / 2
        used = rows * columns * many / (waves * units * high * wide)
        best = max(best, share * used)
    return best * inner / (inner + half)


def product_seconds(
    rows: int, columns: int, inner: int, many: int, platform: Platform, peak: float, c
) -> float:
    """`many` products of rows x inner by inner x columns."""
    share = wave_share(rows, columns, inner, many, platform.units, c.inner_half)
    if columns % 64 or inner % 64 or rows % 64:
        share *= c.unaligned_share
    flops = 2.0 * rows * columns * inner * many
    nbytes = 2.0 * many * (rows * inner + inner * columns + rows * columns)
    rate = peak * platform.best_product * c.product_share * share
    return max(flops / rate, nbytes / (platform.memory_bytes_s * c.memory_share))


class LayerTime:
    """Seconds of one layer and micro-batch: forward, backward, tensor-parallel exchange, host."""

    __slots__ = ("forward", "backward", "recompute", "tensor", "table", "host")

    def __init__(self, shape: Shape, layout: Layout, platform: Platform, c) -> None:
        software, tokens = layout.software, max(1, layout.micro_batch * shape.seq // layout.cp)
        peak, bandwidth = platform.peak(layout.precision), platform.memory_bytes_s * c.memory_share
        forward = backward = 0.0
        for rows, columns, inner in shape.layer_products(tokens, layout.tp):
            forward += product_seconds(rows, columns, inner, 1, platform, peak, c)
            backward += product_seconds(rows, inner, columns, 1, platform, peak, c)
            backward += product_seconds(inner, columns, rows, 1, platform, peak, c)
        attention, attention_backward = attention_seconds(shape, layout, tokens, platform, c)
        moved = elementwise_bytes(shape, layout, tokens, c) / bandwidth
        if layout.precision == "fp8":
            moved += tokens * 3 * (4 * shape.hidden + 2 * shape.width) * 3 / layout.tp / bandwidth
        self.forward = forward + attention + moved / 3
        again = {
            "none": 0.0,
            "full": 1.0,
            "selective": 0.3 if software.flash else attention / self.forward,
        }
        self.recompute = again[layout.recompute] * self.forward
        self.backward = backward + attention_backward + moved * 2 / 3 + self.recompute
        self.tensor = self.table = 0.0  # table: of the embedding, or of the head
        if layout.tp > 1:
            g = min(layout.tp, platform.gpus_per_node)
            once = seconds(
                "all_reduce", layout.wide * tokens * shape.hidden, layout.tp, g, platform, c
            )
            times = 4 + (2 if layout.recompute == "full" else 0)
            times += 1 if layout.sequence_parallel else 0
            shares = {
                "none": 1.0,
                "async": c.tp_exposed,
                "backward": c.tp_backward,
                "pipelined": c.tp_pipelined,
            }
            exposed = shares[software.tp_overlap]
            further = math.ceil(layout.tp / platform.gpus_per_node) - 1  # nodes of the group
            self.tensor = times * once * exposed + further * c.further_node_s
            self.table = once * exposed
        if layout.cp > 1:
            keys = layout.wide * tokens * 2 * shape.keys * shape.head_width / layout.tp
            g = platform.gpus_per_node // layout.tp
            ring = seconds("all_gather", keys * layout.cp, layout.cp, g, platform, c)
            self.tensor += max(0.0, 3 * ring - attention - attention_backward) + 0.1 * ring
        self.host = host_seconds(layout, platform, c)
        if not software.flash and not _fuses_scores(shape, layout):
            self.host *= c.unfused_launches


def host_seconds(layout: Layout, platform: Platform, c) -> float:
    """What the host needs to launch one layer, forward and backward.

    Where it is slow, in pipelines, more by peers.
    """
    launches = c.launch_s + c.launch_slow_s * layout.software.slow_host
    if layout.tp > 1:
        launches += c.launch_tp_s
        if layout.pp > 1 and layout.software.slow_host:
            launches += (
                c.launch_peer_s
                * layout.tp
                * (0.75 + math.ceil(layout.tp / platform.gpus_per_node) / 4)
            )
    launches += c.launch_fsdp_s if layout.fsdp else 0.0
    launches *= c.compiled_launches if layout.software.compiled else 1.0
    return (
        launches * (c.recompute_launches if layout.recompute == "full" else 1.0) / platform.host_s
    )


def attention_seconds(
    shape: Shape, layout: Layout, tokens: int, platform: Platform, c
) -> tuple[float, float]:
    """(forward, backward) of softmax(q k) v.

    One fused causal kernel, or two products and kernels between them.
    """
    heads = shape.heads / layout.tp
    if layout.software.flash:
        work = 2.0 * tokens * shape.seq * heads * shape.head_width
        peak = platform.peak("bf16")
        width = shape.head_width / (shape.head_width + 32) * 1.25
        length = shape.seq / (shape.seq + c.attention_half)
        rate = platform.attention_3 if layout.software.attention == 3 else platform.attention
        rate *= c.attention_1 if layout.software.attention == 1 else 1.0
        forward = work / (peak * rate * c.attention_share * width * length)
        return forward, 2.5 * forward
    peak, many = platform.peak(layout.precision), max(1, round(heads * tokens / shape.seq))
    products = product_seconds(shape.seq, shape.seq, shape.head_width, many, platform, peak, c)
    products += product_seconds(shape.seq, shape.head_width, shape.seq, many, platform, peak, c)
    scores = heads * tokens * shape.seq / (platform.memory_bytes_s * c.memory_share)
    scores *= c.score_bytes * (1 if _fuses_scores(shape, layout) else c.unfused_scores) / 3
    return products + scores, 2 * products + 2 * scores


def _fuses_scores(shape: Shape, layout: Layout) -> bool:
    """Megatron's `is_kernel_available`: a multiple of 4 heads times sequences on a rank."""
    return layout.software.fused_kernels and layout.micro_batch * shape.heads // layout.tp % 4 == 0


def elementwise_bytes(shape: Shape, layout: Layout, tokens: int, c) -> float:
    """Bytes that norms, activations, rotations, additions move in a layer, forward and backward."""
    D, F, t = shape.hidden, shape.width, layout.tp
    stream = 1 / t if layout.sequence_parallel else 0.6 + 0.4 / t
    mlp = F / t if shape.gated else 0.6 * F / t
    nbytes = tokens * (c.stream_traffic * D * stream + c.mlp_traffic * mlp)
    nbytes *= layout.software.traffic * (1 if layout.software.fused_kernels else 1.5)
    return nbytes * (c.compiled_traffic if layout.software.compiled else 1.0)


class StageTime(NamedTuple):
    """One stage and micro-batch, forward and backward."""

    seconds: float
    launch_bound: bool  #: the host, not the device, sets the pace
    tensor_s: float  #: exchange between tensor-parallel ranks that is waited for
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
        sharded_layer = _sharded_layer(shape, layout, layer, platform, c) - unit - layer.tensor
        # Tables are gathered before the first layer computes; their gradients are scattered after
        # the last one has.
        sharded_table = sum(_gather_and_scatter(shape.table_parameters, layout, platform, c))
    times = []
    for stage in layout.stages(shape):
        ends = stage.embedding + stage.head
        tensor = stage.layers * layer.tensor + ends * layer.table
        sharded = (
            stage.layers * sharded_layer + (1 if shape.tied and ends == 2 else ends) * sharded_table
        )
        device = stage.layers * unit + tensor + sharded + (head_s if stage.head else 0.0)
        if not layout.shards_weights:
            device += stage_parameters(shape, layout, stage) * accumulate
        host = stage.layers * layer.host + (head_host if stage.head else 0.0)
        times.append(StageTime(max(device, host), host > device, tensor, sharded))
    return times


def step_seconds(shape: Shape, layout: Layout, platform: Platform, c) -> Step:
    """The time of one step; the layout must have passed Layout.check."""
    layer = LayerTime(shape, layout, platform, c)
    times, stages = _time_stages(shape, layout, layer, platform, c), layout.stages(shape)
    m, p, v = layout.micro_batches, layout.pp, layout.virtual_stages
    at = max(range(p), key=lambda i: times[i].seconds)
    slowest, launch_bound, tensor_s, sharded_s = times[at]
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
    exchange = _exchange(stage_parameters(shape, layout, stages[0]), layout, window, platform, c)
    optimizer = _optimizer(shape, layout, stages, platform, c)
    waiting = c.straggler_s * math.log2(max(1.0, layout.gpus / platform.gpus_per_node))
    total = fill + m * slowest + sent + exchange + optimizer + c.step_s + waiting
    waited = 0 if launch_bound else m
    parts = {"tensor parallel": waited * tensor_s, "pipeline messages": sent}
    parts |= {
        "gradients and weights": exchange + waited * sharded_s,
        "waiting for the slowest": waiting,
    }
    return Step(
        total_s=total,
        compute_s=m * slowest - waited * (tensor_s + sharded_s),
        bubble_s=fill,
        parts=parts,
        optimizer_s=optimizer + c.step_s,
        recompute_s=m * stages[at].layers * layer.recompute,
        launch_bound=launch_bound,
        stages_s=[stage.seconds for stage in times],
    )


def _head_seconds(shape: Shape, layout: Layout, platform: Platform, c) -> tuple[float, float]:
    tokens = max(1, layout.micro_batch * shape.seq // layout.cp)
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
    gather, scatter = _gather_and_scatter(shape.layer_parameters, layout, platform, c, calls)
    forward, backward = layer.forward + layer.tensor / 3, layer.backward + layer.tensor * 2 / 3
    if layout.wide_gradient > layout.wide:
        backward += (
            c.cast_bytes
            * shape.layer_parameters
            / layout.tp
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
    count: float, layout: Layout, platform: Platform, c, calls: int = 1
) -> tuple[float, float]:
    """Seconds to gather these parameters, divided by tp, and to scatter their gradients."""
    n, g = layout.state_shards, max(1, platform.gpus_per_node // layout.tp)
    part = count / layout.tp / calls
    gather = calls * seconds("all_gather", layout.wide * part, n, g, platform, c)
    return gather, calls * seconds("reduce_scatter", layout.wide_gradient * part, n, g, platform, c)


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


def _optimizer(
    shape: Shape, layout: Layout, stages: tuple[StageShape, ...], platform: Platform, c
) -> float:
    most = max(stage_parameters(shape, layout, stage) for stage in stages) / layout.state_shards
    nbytes = c.optimizer_bytes if layout.software.fused_optimizer else c.eager_optimizer_bytes
    return most * nbytes / (platform.memory_bytes_s * c.memory_share)
