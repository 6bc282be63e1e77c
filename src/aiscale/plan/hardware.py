"""The machine as formulas see it: a device's rates, a node's links, the network of a node."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import lru_cache

from aiscale.errors import ConfigError, hint
from aiscale.plan.constants import DEVICES
from aiscale.plan.machines import (
    ACCELERATORS,
    MACHINES,
    Accelerator,
    Machine,
    Network,
    Node,
    find,
    find_machine,
)

DEFAULT_NODE_GBIT_S = 400.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Platform:
    """Rates in FLOP/s and bytes/s, one direction."""

    name: str
    memory_bytes: float
    memory_bytes_s: float
    gpus_per_node: int
    machine: Machine  #: for `cost.collective_seconds`
    units: int  #: SMs or CUs: tiles of a product are spread over them
    best_product: float  #: best measured rate of a large product over the peak
    attention: float  #: rate of FlashAttention-2 over the peak, forward and backward
    attention_3: float  #: the same of FlashAttention-3, or cuDNN's
    host_s: float  #: speed of the host's Python over that of an H100 node's

    def peak(self, precision: str) -> float:
        """Of products, dense; without a figure, of the nearest precision that has one."""
        tflops = self.machine.node.accelerator.tflops
        for name in (precision, "fp16" if precision == "bf16" else "bf16", "fp32"):
            if name in tflops:
                return tflops[name] * 1e12
        return max(tflops.values()) * 1e12


@lru_cache(maxsize=256)
def platform(name: str, *, gpus_per_node: int = 8, node_gbit_s: float | None = None) -> Platform:
    """A node of `gpus_per_node` of these accelerators with that network (400 Gb/s without one).

    Its adapters have 100 Gb/s or more; the name may be as tables print it ("A100-80GB-SXM").
    Raises ConfigError.
    """
    if node_gbit_s is not None and not 0 <= node_gbit_s < math.inf:
        raise ConfigError(
            f"the network of a node is {node_gbit_s:g} Gb/s: it must be at least 0, and finite"
        )
    device = find_accelerator(name)
    alike = [
        m.node
        for m in MACHINES.values()
        if m.node.accelerator is device and m.node.devices == gpus_per_node
    ]
    with_curve = [node for node in alike if node.bus_gb_s]
    family = name.lower().startswith(("a100", "h100", "h200", "gh200"))
    own = Node(
        accelerator=device,
        devices=gpus_per_node,
        ring_gb_s=device.link_gb_s or 25.0,
        source="data sheet",
    )
    node = with_curve[0] if with_curve else alike[0] if alike else own
    if not with_curve and family and gpus_per_node == 8:  # the same board with another memory
        node = replace(
            find_machine("dgx-a100" if "a100" in device.name else "dgx-h100").node,
            accelerator=device,
        )
    gbit = node_gbit_s or DEFAULT_NODE_GBIT_S
    nics = max(1, min(gpus_per_node, round(gbit / 100)))
    network = Network(
        name=f"{gbit:g} Gb/s a node", nics=nics, nic_gb_s=gbit / 8 / nics, source="the caller"
    )
    return platform_of(
        Machine(name=f"{gpus_per_node} x {device.name}", site="", node=node, network=network)
    )


def platform_of(machine: Machine) -> Platform:
    device, network = machine.node.accelerator, machine.network
    figures = next(
        (row for prefix, row in DEVICES.items() if device.name.startswith(prefix)), DEVICES["other"]
    )
    if network.injection_bytes_s is None:
        nics, nic_gb_s = network.nics or 1, network.nic_gb_s or DEFAULT_NODE_GBIT_S / 8
        machine = replace(machine, network=replace(network, nics=nics, nic_gb_s=nic_gb_s))
    node = machine.node
    if not node.bus_gb_s and not node.ring_gb_s:
        machine = replace(
            machine, node=replace(node, ring_gb_s=device.link_gb_s or node.pair_gb_s or 25.0)
        )
    return Platform(
        name=device.name,
        memory_bytes=device.memory_bytes,
        memory_bytes_s=device.memory_bytes_s or 1e12,
        gpus_per_node=machine.node.devices,
        machine=machine,
        units=figures["units"],
        best_product=figures["product"],
        attention=figures["attention"],
        attention_3=figures.get("attention_3", figures["attention"]),
        host_s=figures.get("host", 1.0),
    )


def find_accelerator(name: str) -> Accelerator:
    """By catalogue name, or a table's ("A100-80GB-SXM", "MI250X GCD"): one with all its words."""
    key = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if key in ACCELERATORS:
        return find(key)
    words = [
        word
        for word in key.split("-")
        if word not in ("nvidia", "amd", "sxm", "gpu", "intel", "google")
    ]
    alike = [other for other in ACCELERATORS if words and set(words) <= set(other.split("-"))]
    if alike:
        return find(min(alike, key=lambda other: ("pcie" in other, len(other))))
    raise ConfigError(f"unknown accelerator {name!r}: {hint(key, ACCELERATORS)}")
