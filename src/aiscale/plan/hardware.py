"""The machine as the formulas see it: rates of one device, links inside a node, the network of a node.

platform("a100-sxm4-80gb", gpus_per_node=8, node_gbit_s=1600)
platform_of(find_machine("frontier"))
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from aiscale.config import ConfigError
from aiscale.machines import ACCELERATORS, Accelerator, Machine, find
from aiscale.plan.constants import DEVICES

DEFAULT_NODE_GBIT_S = 400.0


@dataclass(frozen=True, kw_only=True)
class Platform:
    """Rates in FLOP/s and bytes/s, one direction."""

    name: str
    peaks: tuple[tuple[str, float], ...]  #: dense peak by precision
    memory_bytes: float
    memory_bytes_s: float
    link_bytes_s: float  #: one device to the others of its node
    gpus_per_node: int
    node_bytes_s: float  #: one node into the network
    units: int  #: SMs or CUs: tiles of a product are spread over them
    best_product: float  #: best measured rate of a large product over the peak
    attention: float  #: rate of FlashAttention-2 over the peak, forward and backward
    attention_3: float  #: the same of FlashAttention-3, or cuDNN's
    host_s: float  #: speed of the host's Python over that of an H100 node's

    def peak(self, precision: str) -> float:
        known = dict(self.peaks)
        for name in (precision, "fp16" if precision == "bf16" else "bf16", "fp32"):
            if name in known:
                return known[name]
        return max(known.values())


def _family(name: str) -> dict:
    for prefix, figures in DEVICES.items():
        if name.startswith(prefix):
            return figures
    return DEVICES["other"]


def platform(name: str, *, gpus_per_node: int = 8, node_gbit_s: float | None = None) -> Platform:
    """A node of `gpus_per_node` of these accelerators; the name may be as tables print it ("A100-80GB-SXM")."""
    device = find_accelerator(name)
    return _platform(device, gpus_per_node, (node_gbit_s or DEFAULT_NODE_GBIT_S) / 8 * 1e9, None)


def platform_of(machine: Machine) -> Platform:
    network = machine.network.injection_bytes_s or DEFAULT_NODE_GBIT_S / 8 * 1e9
    return _platform(machine.node.accelerator, machine.node.devices, network, machine.node.intra_bytes_s)


def _platform(device: Accelerator, devices: int, node_bytes_s: float, intra: float | None) -> Platform:
    figures = _family(device.name)
    link = intra or device.link_bytes_s or 25e9
    return Platform(
        name=device.name,
        peaks=tuple((key, value * 1e12 * figures.get("clock", 1.0)) for key, value in device.tflops.items()),
        memory_bytes=device.memory_bytes,
        memory_bytes_s=device.memory_bytes_s or 1e12,
        link_bytes_s=min(link, figures.get("ring_gb_s", 1e9) * 1e9),
        gpus_per_node=devices,
        node_bytes_s=node_bytes_s,
        units=figures["units"],
        best_product=figures["product"],
        attention=figures["attention"],
        attention_3=figures.get("attention_3", figures["attention"]),
        host_s=figures.get("host", 1.0),
    )


def find_accelerator(name: str) -> Accelerator:
    """By catalogue name, or by a table's ("A100-80GB-SXM", "h100_80gb", "MI250X GCD"): the nearest with all its words."""
    key = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if key in ACCELERATORS:
        return find(key)
    words = [word for word in key.split("-") if word not in ("nvidia", "amd", "sxm", "gpu", "intel", "google")]
    found = [known for known in ACCELERATORS if words and all(word in known for word in words)]
    if found:
        return find(min(found, key=lambda known: ("pcie" in known, len(known))))
    close = difflib.get_close_matches(key, ACCELERATORS, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]}?" if close else f"it may be one of {', '.join(ACCELERATORS)}"
    raise ConfigError(f"unknown accelerator {name!r}: {hint}")
