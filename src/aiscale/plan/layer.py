"""Seconds of one layer and micro-batch on one rank: products, attention, memory, exchange, host.

    layer = LayerTime(shape, layout, platform, CONSTANTS)
    layer.forward, layer.backward, layer.tensor, layer.host

Letters: D hidden, F width of the MLP, t tensor-parallel ranks, M tokens of one micro-batch on one
rank. Routed experts are in `experts`.
"""

from __future__ import annotations

import math
from functools import lru_cache

from aiscale.plan import cost
from aiscale.plan.experts import ExpertTime
from aiscale.plan.hardware import Platform
from aiscale.plan.layout import Layout, Shape
from aiscale.plan.products import product_seconds


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


def tokens_of(shape: Shape, layout: Layout) -> int:
    """Of one micro-batch on one rank."""
    return max(1, layout.micro_batch * shape.seq // layout.cp)


class LayerTime:
    """Seconds of one layer and micro-batch; tensor, table, experts: exchange that is waited for."""

    __slots__ = ("forward", "backward", "recompute", "tensor", "table", "experts", "host")

    def __init__(self, shape: Shape, layout: Layout, platform: Platform, c) -> None:
        software, tokens = layout.software, tokens_of(shape, layout)
        forward, backward = _products(shape, layout, tokens, platform, c)
        attention, attention_backward = attention_seconds(shape, layout, tokens, platform, c)
        moved = elementwise_bytes(shape, layout, tokens, c)
        if layout.precision == "fp8":
            moved += cast_bytes(shape, layout, tokens, c)
        moved /= platform.memory_bytes_s * c.memory_share
        moved += (
            c.stream_kernels
            * c.stream_kernel_s
            * (c.compiled_launches if software.compiled else 1.0)
        )
        routed = ExpertTime(shape, layout, tokens, platform, c, seconds)
        self.host = host_seconds(layout, platform, c) + routed.host
        if not software.flash and not _fuses_scores(shape, layout):
            self.host *= c.unfused_launches
        self.forward = forward + attention + moved / 3 + routed.forward
        if not shape.capacity:
            # The host learns from the router how many tokens each expert gets, and only then
            # launches what follows: in the forward pass neither runs ahead of the other.
            self.forward += shape.expert_share * self.host / 3
        again = {
            "none": 0.0,
            "full": 1.0,
            "selective": 0.3 if software.flash else attention / self.forward,
        }
        self.recompute = again[layout.recompute] * self.forward
        self.backward = backward + attention_backward + moved * 2 / 3 + routed.backward
        self.backward += self.recompute
        self.tensor, self.table = _tensor_exchange(shape, layout, tokens, platform, c)
        self.tensor += _context_exchange(
            shape, layout, tokens, attention + attention_backward, platform, c
        )
        self.experts = routed.exchange


def _products(
    shape: Shape, layout: Layout, tokens: int, platform: Platform, c
) -> tuple[float, float]:
    """(forward, backward) of the products that every token meets."""
    peak = platform.peak(layout.precision)
    forward = backward = 0.0
    for rows, columns, inner in shape.layer_products(tokens, layout.tp):
        forward += product_seconds(rows, columns, inner, 1, platform, peak, c)
        backward += product_seconds(rows, inner, columns, 1, platform, peak, c)
        backward += product_seconds(inner, columns, rows, 1, platform, peak, c)
    return forward, backward


def _tensor_exchange(
    shape: Shape, layout: Layout, tokens: int, platform: Platform, c
) -> tuple[float, float]:
    """(of a layer, of the embedding or head): tensor-parallel exchange that is waited for."""
    if layout.tp == 1:
        return 0.0, 0.0
    g = min(layout.tp, platform.gpus_per_node)
    once = seconds("all_reduce", layout.wide * tokens * shape.hidden, layout.tp, g, platform, c)
    times = 4 + (2 if layout.recompute == "full" else 0)
    times += 1 if layout.sequence_parallel else 0
    if not shape.shared_experts:
        # a layer of experts has no MLP whose halves are summed: attention alone exchanges
        times *= 1 - shape.expert_share / 2
    shares = {
        "none": 1.0,
        "async": c.tp_exposed,
        "backward": c.tp_backward,
        "pipelined": c.tp_pipelined,
    }
    exposed = shares[layout.software.tp_overlap]
    further = math.ceil(layout.tp / platform.gpus_per_node) - 1  # nodes of the group
    return times * once * exposed + further * c.further_node_s, once * exposed


def _context_exchange(
    shape: Shape, layout: Layout, tokens: int, attention_s: float, platform: Platform, c
) -> float:
    """Exchange between context-parallel ranks that is waited for.

    Around a ring keys and values pass while attention computes on those before: in the backward
    pass twice as many, with their gradients. All to all (Ulysses) sends queries, keys, values and
    the output once in each direction, and nothing hides it.
    """
    if layout.cp == 1:
        return 0.0
    g = max(1, platform.gpus_per_node // layout.tp)
    keys = 2 * shape.keys * shape.head_width / layout.tp
    if layout.cp_kind == "all-to-all":
        heads = 2 * shape.heads_width / layout.tp + keys
        once = seconds("all_to_all", layout.wide * tokens * heads, layout.cp, g, platform, c)
        return 2 * once
    nbytes = layout.wide * tokens * keys * layout.cp
    ring = seconds("all_gather", nbytes, layout.cp, g, platform, c)
    return max(0.0, 3 * ring - attention_s) + 0.1 * ring


def host_seconds(layout: Layout, platform: Platform, c) -> float:
    """What the host needs to launch one layer, forward and backward.

    Where it is slow, in pipelines, more by peers.
    """
    if layout.software.graphed:
        return 0.0
    launches = c.launch_s + c.launch_slow_s * layout.software.slow_host
    if layout.tp > 1:
        # two all-reduces in each pass; with sequence parallelism four calls, and six
        launches += c.launch_tp_s * (2.5 if layout.sequence_parallel else 1.0)
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
        work = 2.0 * tokens * shape.seq * heads * shape.score_width
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
    D, t = shape.hidden, layout.tp
    stream = 1 / t if layout.sequence_parallel else 0.6 + 0.4 / t
    mlp = shape.dense_width / t if shape.gated else 0.6 * shape.dense_width / t
    nbytes = tokens * (c.stream_traffic * D * stream + c.mlp_traffic * mlp)
    nbytes *= layout.software.traffic * (1 if layout.software.fused_kernels else 1.5)
    return nbytes * (c.compiled_traffic if layout.software.compiled else 1.0)


def cast_bytes(shape: Shape, layout: Layout, tokens: int, c) -> float:
    """Bytes that fp8's scales and casts move: each input of a product, of its three passes."""
    entries = 4 * shape.hidden + 2 * shape.dense_width
    copies = shape.expert_share * shape.top_k / layout.expert_tokens_divisor
    routed = copies * (shape.hidden + 2 * shape.expert_width / layout.etp)
    return c.fp8_cast * tokens * (entries / layout.tp + routed)
