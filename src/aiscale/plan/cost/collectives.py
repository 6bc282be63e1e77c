"""Seconds of a collective on a machine of the catalogue, after NCCL's own tuning model.

    machine = machines.find_machine("dgx-a100")
    # eight whole nodes, one ring over them
    cost.collective_seconds("all_reduce", 2**30, machine, ranks=64)
    # one rank a node; eight such groups
    cost.collective_seconds("all_reduce", 2**30, machine, ranks=64, per_node=1)

Seconds are latency plus the larger of bytes over the links in the node and bytes over its adapters,
which groups that send at the same time share. Latency is counted in steps: 2 (n-1) for a ring,
2 (g-1 + log2 nodes) for a tree with g ranks on a node. NCCL takes what is faster, and for small
messages the protocol LL, with shorter steps and less bandwidth. Inside a node a measured curve of
bus bandwidth over size decides, if the machine has one. Where switches add up (NVLink SHARP), an
all-reduce over the node sends each number once.

It is what the machine allows with nobody else on it. Held to measurements on 4 nodes
(tests/test_collectives.py), it is 2 to 5 % off for large messages, and up to twice too fast at
16 MiB. At scale libraries fall behind (Singh et al., arXiv:2504.18658).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from aiscale.errors import ConfigError
from aiscale.plan.cost.communication import check_collective, wire_bytes
from aiscale.plan.machines import Machine

#: Bus bandwidth over nominal bandwidth of the links in a node: 0.78 for 8 A100, 0.82 for 8 H200,
#: 0.70 for 8 MI300X (stas00/ml-engineering@744d01e18b79, network), 0.69 for 4 A100 (published table
#: stanage_a100_nccl_allreduce).
LINK_SHARE = 0.75
#: The same for adapters: 0.91 on 4 nodes of 8 H200, 0.95 on 4 of 8 B200 (ibid.); 46 to 48 of 50
#: GB/s for one adapter (NVIDIA/nccl-tests#290). Slingshot and shared networks give less.
NIC_SHARE = 0.9
#: A further switch on the way: assumed, a fortieth of the steps below, which contain the first.
HOP_S = 0.35e-6


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """Latencies of NCCL's or RCCL's tuning.cc, and the part of the bandwidth that carries data."""

    base_s: float
    node_step_s: float
    ring_step_s: float  #: between nodes
    tree_step_s: float  #: between nodes
    share: float
    most_bytes_s: float = math.inf  #: across nodes


PROTOCOLS = {
    "nccl": (  # NVIDIA/nccl src/graph/tuning.cc: baseLat, hwLat, llMaxBws
        Protocol(base_s=8.4e-6, node_step_s=3.4e-6, ring_step_s=14e-6, tree_step_s=14e-6, share=1),
        Protocol(
            base_s=6.6e-6,
            node_step_s=0.6e-6,
            ring_step_s=2.7e-6,
            tree_step_s=5e-6,
            share=0.5,
            most_bytes_s=19e9,
        ),
    ),
    "rccl": (  # ROCm/rccl src/graph/tuning.cc: baseLat, tuning_model_0
        Protocol(
            base_s=17e-6, node_step_s=4.5e-6, ring_step_s=24.1e-6, tree_step_s=45.4e-6, share=1
        ),
        Protocol(
            base_s=12e-6,
            node_step_s=1.5e-6,
            ring_step_s=2e-6,
            tree_step_s=28.3e-6,
            share=0.07,
            most_bytes_s=19e9,
        ),
    ),
    # Measured as 0.65 to 1.1 ms a message between virtual nodes that share two cores. Only rings.
    "gloo": (
        Protocol(base_s=0, node_step_s=0.1e-3, ring_step_s=0.8e-3, tree_step_s=math.inf, share=1),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Collective:
    seconds: float
    algorithm: str  #: ring, tree, in-switch, pairwise, point-to-point
    bottleneck: str  #: what takes most of the time: latency, links in the node, network adapters


def collective_seconds(
    kind: str,
    n_bytes: float,
    machine: Machine,
    *,
    ranks: int,
    per_node: int = 0,
    simultaneous_groups: int = 0,
) -> Collective:
    """The predicted time of one collective over `ranks` devices.

    n_bytes is the whole buffer, as in `wire_bytes`. per_node: ranks on each node; 0: as many as
    fit. simultaneous_groups: groups like this one that use a node's adapters at the same time; 0:
    as many as its devices make. Raises ConfigError that names a figure which the machine lacks.
    """
    group = _Group(kind, n_bytes, machine, ranks, per_node, simultaneous_groups)
    if ranks == 1 or n_bytes == 0 or kind == "recv":
        return Collective(seconds=0.0, algorithm="ring", bottleneck="latency")
    return min(group.options(), key=lambda option: option.seconds)


class _Group:
    """One group of ranks and what it may use."""

    def __init__(
        self, kind: str, n_bytes: float, machine: Machine, ranks: int, per_node: int, at_once: int
    ) -> None:
        check_collective(kind)
        devices = machine.node.devices
        self.kind, self.n_bytes, self.machine, self.ranks = kind, n_bytes, machine, ranks
        self.per_node = per_node or min(ranks, devices)
        if not 1 <= self.per_node <= min(ranks, devices):
            raise ConfigError(
                f"per_node {per_node}: {machine.name} has {devices} devices a node, "
                f"the group {ranks} ranks"
            )
        self.nodes = math.ceil(ranks / self.per_node)
        self.at_once = at_once or max(1, devices // self.per_node)
        self.gloo = machine.node.accelerator.library == "gloo"
        algorithm = "gloo" if self.gloo else "ring"
        self.fraction = (
            wire_bytes(kind, 1.0, ranks, algorithm) if kind not in ("broadcast", "reduce") else 1.0
        )

    def options(self) -> Iterator[Collective]:
        S, n, g, nodes = self.n_bytes, self.ranks, self.per_node, self.nodes
        if self.kind in ("all_to_all", "scatter", "gather"):
            # A scatter or gather meets the root's links and adapters.
            senders = g if self.kind == "all_to_all" else 1
            volumes = ((g - 1) / n * S, senders * (n - g) / n * S)
            yield self.time("pairwise", n - 1, nodes - 1, volumes)
            return
        if self.kind == "send":
            yield self.time("point-to-point", 1, nodes - 1, (S * (nodes == 1), S * (nodes > 1)))
            return
        twice = self.kind == "all_reduce" or (self.gloo and self.kind == "reduce_scatter")
        rounds = 2 if twice else 1
        sent = self.fraction * S
        yield self.time("ring", rounds * (n - 1), rounds * (nodes - 1), (sent, sent))
        depth = math.ceil(math.log2(nodes))
        through = (min(nodes - 1, 2) * S) / 0.92  # of a node, on a double binary tree of nodes
        whole_nodes = g == self.machine.node.devices and nodes <= 2
        if self.kind == "all_reduce" and self.machine.node.in_switch_gb_s and whole_nodes:
            yield self.in_switch(2 * depth, through)
        if self.kind == "all_reduce" and nodes > 1:
            yield self.time("tree", 2 * (g - 1 + depth), 2 * depth, (2 * S, through))

    def time(
        self, algorithm: str, steps: int, across: int, volumes: tuple[float, float]
    ) -> Collective:
        """With the faster protocol.

        across: steps between nodes; volumes: bytes of a rank through links in the node, of a node
        through its adapters.
        """
        node, ways = self.machine.node, []
        inside, outside = volumes
        has_curve = node.bus_gb_s is not None and len(node.bus_gb_s) > 1 and self.nodes == 1
        for protocol in PROTOCOLS[node.accelerator.library]:
            step_s = protocol.tree_step_s if algorithm == "tree" else protocol.ring_step_s
            between_s = step_s + self.hops() * HOP_S
            within_s = (steps - across) * protocol.node_step_s
            latency_s = protocol.base_s + within_s + across * between_s
            links_s = nics_s = 0.0
            if inside and self.per_node > 1:
                links_s = inside / (protocol.share * self.link_bytes_s())
            if has_curve:
                # With fewer links.
                slower = max(gb_s for _, gb_s in node.bus_gb_s) * 1e9 / self.link_bytes_s()
                measured_s = _curve_seconds(node.bus_gb_s, self.n_bytes, inside)
                links_s = max(0.0, slower * measured_s - latency_s)
            if outside and self.nodes > 1:
                nics_s = outside / min(protocol.most_bytes_s, protocol.share * self.nic_bytes_s())
            parts = {"links in the node": links_s, "network adapters": nics_s, "latency": latency_s}
            ways.append((latency_s + max(links_s, nics_s), max(parts, key=parts.__getitem__)))
        seconds, slowest = min(ways)
        return Collective(seconds=seconds, algorithm=algorithm, bottleneck=slowest)

    def in_switch(self, across: int, through: float) -> Collective:
        """Switches add up in each node, and two nodes exchange the sums (NVLSTree).

        Between more it is slower than the ring for large messages (310 and 365 GB/s on 4 nodes of
        8 H200), and for small ones no measurement was read.
        """
        S, g = self.n_bytes, self.per_node
        curve = self.machine.node.in_switch_gb_s or ()
        parts = {"links in the node": _curve_seconds(curve, S, 2 * (g - 1) / g * S)}
        if self.nodes > 1:
            parts["network adapters"] = through / self.nic_bytes_s()
            tree_step_s = PROTOCOLS[self.machine.node.accelerator.library][0].tree_step_s
            parts["latency"] = across * (tree_step_s + self.hops() * HOP_S)
        seconds = max(parts["links in the node"], parts.get("network adapters", 0.0))
        seconds += parts.get("latency", 0.0)
        slowest = max(parts, key=parts.__getitem__)
        return Collective(seconds=seconds, algorithm="in-switch", bottleneck=slowest)

    def link_bytes_s(self) -> float:
        """Of one rank to its neighbours in the node, one direction, for large messages."""
        node, g = self.machine.node, self.per_node
        if g == 2 and node.mate_gb_s:
            return LINK_SHARE * node.mate_gb_s * 1e9
        rates = [LINK_SHARE * (g - 1) * node.pair_gb_s * 1e9] if node.pair_gb_s else []
        if node.bus_gb_s:
            rates.append(max(gb_s for _, gb_s in node.bus_gb_s) * 1e9)
        elif node.ring_gb_s:
            rates.append(LINK_SHARE * node.ring_gb_s * 1e9)
        elif g > 2 or not rates:
            raise self.missing(
                "node.bus_gb_s (the bus bandwidth that nccl-tests measures in a node)"
            )
        return min(rates)

    def nic_bytes_s(self) -> float:
        """Out of one node, for one of the groups that share its adapters."""
        network = self.machine.network
        for figure in ("nics", "nic_gb_s"):
            if getattr(network, figure) is None:
                raise self.missing(f"network.{figure}")
        a_rank = max(1.0, network.nics / self.machine.node.devices)
        used = 1 if self.kind in ("send", "scatter", "gather") else self.per_node
        adapters = min(used * a_rank, network.nics / self.at_once)
        bytes_s = NIC_SHARE * adapters * network.nic_gb_s * 1e9
        tapers = self.kind == "all_to_all" and network.taper and network.group_nodes
        if tapers and self.nodes > network.group_nodes:
            leaves = 1 - network.group_nodes / self.nodes
            leaving_bytes_s = network.injection_bytes_s * network.taper / leaves
            bytes_s = min(bytes_s, leaving_bytes_s / self.at_once)
        return bytes_s

    def hops(self) -> int:
        """Switches on the longest way, beyond the first.

        On Slingshot at most 3 (De Sensi et al. 2020, abstract).
        """
        network, nodes = self.machine.network, self.nodes
        if network.topology == "torus":
            return math.ceil(nodes ** (1 / 3))
        small = nodes <= (network.group_nodes or 16)
        by_topology = {
            "fat-tree": 2 if small else 4,
            "dragonfly": 1 if small else 3,
            "dragonfly+": 2 if small else 3,
        }
        return by_topology.get(network.topology or "", 2)

    def missing(self, figure: str) -> ConfigError:
        return ConfigError(
            f"no source of {self.machine.name} tells {figure}: measure it and add it to "
            "the machine's file"
        )


def _curve_seconds(curve: tuple[tuple[float, float], ...], n_bytes: float, sent: float) -> float:
    """Seconds that `sent` bytes take at the bus bandwidth of a buffer of n_bytes.

    Linear in the logarithms between the measured points, the same time below the first, the same
    bandwidth above the last.
    """
    if n_bytes <= curve[0][0]:
        return sent / n_bytes * curve[0][0] / (curve[0][1] * 1e9)
    gb_s = curve[-1][1]
    for (a, low), (b, high) in zip(curve, curve[1:], strict=False):
        if a <= n_bytes <= b:
            gb_s = low * (high / low) ** (math.log(n_bytes / a) / math.log(b / a))
            break
    return sent / (gb_s * 1e9)
