"""Seconds of one collective of `n` ranks, `g` of them on a node: `cost.collective_seconds`, slower as in training.

    seconds("all_reduce", nbytes, n=64, g=8, platform=platform, c=CONSTANTS)
    message_seconds(nbytes, crosses_nodes=True, platform=platform, c=CONSTANTS)

cost knows the machine alone; in training ranks arrive at different times, and kernels, data loading and other jobs use
the same memory, cores and switches. Two constants, inside a node and between nodes, stand for that.
"""

from __future__ import annotations

from functools import lru_cache

from aiscale import cost
from aiscale.plan.hardware import Platform


def seconds(op: str, nbytes: float, n: int, g: int, platform: Platform, c) -> float:
    if n <= 1 or nbytes <= 0:
        return 0.0
    g = max(1, min(g, n, platform.gpus_per_node))
    return (c.exchange_node if n <= g else c.exchange_network) * _seconds(op, int(nbytes), n, g, platform)


def message_seconds(nbytes: float, crosses_nodes: bool, platform: Platform, c) -> float:
    """One message to the next stage, while every rank of the node sends one."""
    if crosses_nodes:
        return c.exchange_network * _seconds("send", int(nbytes), 2, 1, platform)
    return c.exchange_node * _seconds("send", int(nbytes), 2, 2, platform)


@lru_cache(maxsize=200_000)
def _seconds(op: str, nbytes: int, n: int, g: int, platform: Platform) -> float:
    return cost.collective_seconds(op, nbytes, platform.machine, ranks=n, per_node=g).seconds
