"""Seconds of one collective of `n` ranks, `g` of them on a node.

    seconds("all_reduce", nbytes, n=64, g=8, platform=platform, c=CONSTANTS)

Bytes cross the slower of the links inside a node and the group's share of its network adapters: the g ranks of one ring
own g of the node's devices' shares. Latency: a ring hops n - nodes times inside nodes and nodes - 1 times between them;
an all-reduce may take a tree instead (NCCL's tuning.cc), whichever is faster.
"""

from __future__ import annotations

import math

from aiscale.plan.hardware import Platform


def seconds(op: str, nbytes: float, n: int, g: int, platform: Platform, c) -> float:
    if n <= 1 or nbytes <= 0:
        return 0.0
    g = max(1, min(g, n, platform.gpus_per_node))
    nodes = -(-n // g)
    bandwidth = platform.link_bytes_s * c.link_share
    if nodes > 1:
        network = g * platform.node_bytes_s / platform.gpus_per_node * c.network_share
        bandwidth = network if g == 1 else min(bandwidth, network)
    passes = 2 if op == "all_reduce" else 1
    moved = passes * nbytes * (n - 1) / n / bandwidth
    ring = moved + passes * ((n - nodes) * c.hop_node_s + (nodes - 1) * c.hop_network_s)
    if op == "all_reduce" and nodes > 1:
        tree = moved / c.tree_share + 2 * ((g - 1) * c.hop_node_s + math.log2(nodes) * c.hop_network_s)
        ring = min(ring, tree)
    return c.collective_s + ring


def message_seconds(nbytes: float, crosses_nodes: bool, platform: Platform, c) -> float:
    """One message to the next stage, while every rank of the node sends one."""
    if crosses_nodes:
        return c.hop_network_s + nbytes / (platform.node_bytes_s / platform.gpus_per_node * c.network_share)
    return c.hop_node_s + c.collective_s + nbytes / (platform.link_bytes_s * c.link_share)
