"""Seconds of a layer's routed experts: grouped products, ordering tokens, all-to-all, the host.

    routed = ExpertTime(shape, layout, tokens, platform, CONSTANTS, seconds)
    routed.forward, routed.backward, routed.exchange, routed.host

A rank sends each of its tokens to k experts, which lie on ep ranks, and gets as many copies back:
the router is taken as balanced, or drops what exceeds an expert's capacity. Each of its E / ep
experts then multiplies its share of the copies. Few copies an expert, or narrow experts, make small
products: `products` says what those cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from aiscale.plan.hardware import Platform
from aiscale.plan.layout import Layout, Shape
from aiscale.plan.products import product_seconds


class ExpertTime:
    """Seconds of one layer and micro-batch; all 0 without experts."""

    __slots__ = ("forward", "backward", "exchange", "host")

    def __init__(
        self,
        shape: Shape,
        layout: Layout,
        tokens: int,
        platform: Platform,
        c,
        seconds: Callable[..., float],
    ) -> None:
        self.forward = self.backward = self.exchange = self.host = 0.0
        share = shape.expert_share
        if not share:
            return
        copies = copies_of(shape, layout, tokens)
        forward, backward = grouped_products(shape, layout, copies, platform, c)
        moved = ordering_bytes(shape, layout, copies, c)
        moved /= platform.memory_bytes_s * c.memory_share
        self.forward = share * (forward + moved / 3)
        self.backward = share * (backward + moved * 2 / 3)
        self.exchange = share * exchange_seconds(shape, layout, copies, platform, c, seconds)
        self.host = share * expert_host_seconds(shape, layout, platform, c)


def copies_of(shape: Shape, layout: Layout, tokens: int) -> float:
    """Copies of tokens that a rank sends in a micro-batch, and gets."""
    kept = min(1.0, shape.capacity) if shape.capacity else 1.0
    return tokens / layout.expert_tokens_divisor * shape.top_k * kept


def grouped_products(
    shape: Shape, layout: Layout, copies: float, platform: Platform, c
) -> tuple[float, float]:
    """(forward, backward) of the products of a rank's experts.

    With a capacity each expert multiplies that many rows, filled or not.
    """
    mine = max(1, shape.experts // layout.ep)
    padded = max(1.0, shape.capacity) if shape.capacity else 1.0
    rows = max(1, math.ceil(copies * padded * layout.etp / mine))
    width = -(-shape.expert_width // layout.etp)
    peak = platform.peak(layout.precision)
    forward = backward = 0.0
    up, down = (width * (shape.matrices - 1), shape.hidden), (shape.hidden, width)
    for columns, inner in (up, down):
        forward += product_seconds(rows, columns, inner, mine, platform, peak, c)
        backward += product_seconds(rows, inner, columns, mine, platform, peak, c)
        backward += product_seconds(inner, columns, rows, mine, platform, peak, c)
    return forward / c.grouped_share, backward / c.grouped_share


def ordering_bytes(shape: Shape, layout: Layout, copies: float, c) -> float:
    """Bytes moved to order tokens by expert, to weigh and add what returns, and to activate."""
    activated = c.mlp_traffic * shape.expert_width / layout.etp
    if layout.software.compiled:
        activated *= c.compiled_traffic
    order = c.order_traffic * (c.order_fused if layout.software.fused_order else 1.0)
    return copies * (order * shape.hidden + activated)


def exchange_seconds(
    shape: Shape,
    layout: Layout,
    copies: float,
    platform: Platform,
    c,
    seconds: Callable[..., float],
) -> float:
    """Exchange that is waited for: tokens to experts and back, forward and backward.

    All to all between ep ranks; where an expert is cut, its etp ranks gather its tokens and scatter
    the sums.
    """
    passes = 2 + (1 if layout.recompute == "full" else 0)
    gathered = layout.wide * copies * shape.hidden * layout.etp
    g = min(layout.etp, platform.gpus_per_node)
    cut = seconds("all_gather", gathered, layout.etp, g, platform, c)
    cut += seconds("reduce_scatter", gathered, layout.etp, g, platform, c)
    if layout.ep == 1:
        return passes * cut
    # the ranks of a token's group on a node: tensor-parallel ranks fold into experts' groups
    g = min(layout.ep, max(1, platform.gpus_per_node // layout.etp))
    nodes = layout.ep / g
    sent = layout.wide * copies * shape.hidden
    there = sent / 2 if layout.software.fp8_dispatch and layout.precision == "fp8" else sent

    def one_way(nbytes: float) -> float:
        if layout.software.dispatch != "by node" or nodes <= 1:
            return seconds("all_to_all", nbytes, layout.ep, g, platform, c)
        # once to each node, where each copy goes on to its expert's rank meanwhile
        crossing = nbytes * copies_over_nodes(shape.top_k, nodes) / shape.top_k
        between = seconds("all_to_all", crossing, layout.ep, g, platform, c)
        return max(between, seconds("all_to_all", nbytes, g, g, platform, c))

    exposed = c.ep_overlapped if layout.software.ep_overlap else 1.0
    return passes * ((one_way(there) + one_way(sent)) * exposed + cut)


def copies_over_nodes(top_k: int, nodes: float) -> float:
    """Nodes that a token's experts lie on, on average: it crosses to each of them once."""
    return nodes * (1 - (1 - 1 / nodes) ** top_k)


def expert_host_seconds(shape: Shape, layout: Layout, platform: Platform, c) -> float:
    """What the host needs more for a layer of experts: router, order, exchange, their products."""
    if layout.software.graphed:
        return 0.0
    launches = c.launch_experts_s * (c.compiled_launches if layout.software.compiled else 1.0)
    if not layout.software.grouped:
        # in fp8 as many casts as products
        kernels = 2 if layout.precision == "fp8" else 1
        launches += kernels * c.launch_expert_s * shape.experts / layout.ep
    return (
        launches * (c.recompute_launches if layout.recompute == "full" else 1.0) / platform.host_s
    )
