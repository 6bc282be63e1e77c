"""Figures of accelerators, nodes and networks from data sheets and sites' pages, with sources.

    find("a100-sxm4-80gb").peak_flops("bf16")               # 312e12 FLOP/s, dense, or None
    find_machine("frontier").node.accelerator.memory_bytes  # one GCD of an MI250X

`verification` is "primary" (read in the maker's or the site's own documentation), "secondary" (a
maintained collection of data sheets, another site) or "measured". A figure without a source is
None. FLOP/s are dense, bandwidths in one direction; memory is what torch reports. A system's node
may be `like` that of another system, with changes.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from aiscale.errors import ConfigError, hint
from aiscale.plan.config.run import build

Precision = Literal["fp32", "fp32_matrix", "tf32", "fp16", "bf16", "fp8"]
#: of an accelerator; all: one source for all
Figure = Literal["all", "tflops", "memory", "link", "power"]
Verification = Literal["primary", "secondary", "measured"]


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """A device as torch sees it: a GPU, a GCD of an MI250X, a tile of a Max 1550, a TPU, an IPU."""

    name: str
    tflops: Mapping[Precision, float]  #: dense peak by precision, 10^12 FLOP/s
    memory_gb: float  #: 10^9 bytes, as torch reports them
    memory_tb_s: float | None = None  #: 10^12 bytes/s between the device and its memory
    watts: float | None = None  #: of its board, at most; of its share where a board has several
    #: 10^9 bytes/s to its neighbours in the node, all its links, one direction
    link_gb_s: float | None = None
    #: of its collectives; others are taken as NCCL's
    library: Literal["nccl", "rccl", "gloo"] = "nccl"
    torch_names: tuple[str, ...] = ()  #: parts of torch's device name, all of which must occur
    verification: Verification = "secondary"
    sources: Mapping[Figure, str] = field(default_factory=dict)

    @property
    def memory_bytes(self) -> float:
        return self.memory_gb * 1e9

    @property
    def memory_bytes_s(self) -> float | None:
        return None if self.memory_tb_s is None else self.memory_tb_s * 1e12

    def peak_flops(self, precision: str) -> float | None:
        """Peak FLOP/s of matrix products in a precision; None without hardware units or a figure.

        AMD's GPUs multiply fp32 matrices in units of their own, fp32_matrix; tflops["fp32"] is the
        vector units' peak.
        """
        tflops = self.tflops.get(f"{precision}_matrix", self.tflops.get(precision))
        return None if tflops is None else tflops * 1e12


@dataclass(frozen=True, kw_only=True)
class Network:
    name: str
    nics: int | None = None  #: adapters of one node
    nic_gb_s: float | None = None  #: 10^9 bytes/s through one adapter, one direction
    topology: Literal["fat-tree", "dragonfly", "dragonfly+", "torus"] | None = None
    group_nodes: int | None = None  #: nodes in one group of a dragonfly
    #: bandwidth that leaves a group or a leaf, over what its nodes inject; 1: non-blocking
    taper: float | None = None
    source: str
    verification: Verification = "primary"

    @property
    def injection_bytes_s(self) -> float | None:
        """From one node into the network, all its adapters, one direction."""
        return (
            None if self.nics is None or self.nic_gb_s is None else self.nics * self.nic_gb_s * 1e9
        )


Curve = tuple[tuple[float, float], ...]  #: (bytes, 10^9 bytes/s), growing


@dataclass(frozen=True, kw_only=True)
class Node:
    """Devices that share one operating system.

    bus_gb_s and in_switch_gb_s are the bus bandwidth of nccl-tests, measured by an all-reduce over
    all devices: 2 (n-1)/n bytes over seconds. ring_gb_s, pair_gb_s and mate_gb_s are nominal
    figures of links, in one direction.
    """

    accelerator: Accelerator
    devices: int  #: as torch counts them
    bus_gb_s: Curve | None = None  #: measured, on rings: [[bytes of the buffer, 10^9 bytes/s], ...]
    in_switch_gb_s: Curve | None = None  #: measured, where switches add up (NVLink SHARP)
    ring_gb_s: float | None = None  #: 10^9 bytes/s between neighbours on rings through all devices
    #: 10^9 bytes/s between two devices; every pair has links of its own (no switch)
    pair_gb_s: float | None = None
    mate_gb_s: float | None = None  #: 10^9 bytes/s between the two devices of one package
    host_gb: float | None = None  #: 10^9 bytes of the processors' memory that jobs may use
    host_source: str = ""
    note: str = ""
    source: str
    verification: Verification = "primary"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A system: many nodes and a network."""

    name: str
    site: str
    node: Node
    network: Network
    nodes: int | None = None  #: None without a source


def read_catalogue(
    root: Path,
) -> tuple[dict[str, Accelerator], dict[str, Machine], dict[str, dict]]:
    """The accelerators, the systems and the systems' node tables below `root`, by file name.

    They are in its folders `accelerators` and `systems`. Invalid TOML, an unknown key or a missing
    one raises ConfigError with one line that names the file.
    """
    devices = _files(root / "accelerators")
    accelerators = {name: _accelerator(name, *file) for name, *file in devices}
    systems = {name: file for name, *file in _files(root / "systems")}
    nodes = {name: table.get("node", {}) for name, (_, table) in systems.items()}
    machines = {name: _machine(name, *file, accelerators, nodes) for name, file in systems.items()}
    return accelerators, machines, nodes


def _files(folder: Path) -> Iterator[tuple[str, str, dict]]:
    """(name, path for messages, content) of each file."""
    for file in sorted(folder.iterdir()):
        where = f"machines/{folder.name}/{file.name}"
        yield file.stem, where, _read(file, where)


def _read(file: Path, where: str) -> dict:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{where} is not TOML: {error}") from None


def _accelerator(name: str, where: str, table: dict) -> Accelerator:
    if "all" not in table.get("sources", {}):
        raise ConfigError(f"{where}: key sources.all is missing: every figure has a source")
    return _build(Accelerator, table | {"name": name}, where)


def _machine(
    name: str, where: str, table: dict, accelerators: Mapping[str, Accelerator], nodes: dict
) -> Machine:
    node = dict(table.get("node", {}))
    like = node.pop("like", None)
    if like is not None:
        if "like" in nodes.get(like, {"like": ""}):
            originals = {other: keys for other, keys in nodes.items() if "like" not in keys}
            raise ConfigError(
                f"{where}: node.like: "
                f"{_nearest('system with a node of its own', str(like), originals)}"
            )
        node = nodes[like] | node
    if "host_gb" in node and not node.get("host_source"):
        raise ConfigError(f"{where}: key node.host_source is missing: every figure has a source")
    device = node.get("accelerator")
    if isinstance(device, dict):
        node["accelerator"] = _accelerator(name, where, device)
    elif device in accelerators:
        node["accelerator"] = accelerators[device]
    elif device is not None:
        raise ConfigError(
            f"{where}: node.accelerator: {_nearest('accelerator', str(device), accelerators)}"
        )
    return _build(Machine, table | {"name": name, "node": node}, where)


def _build(cls: type, table: dict, where: str):
    try:
        return build(cls, table)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _nearest(kind: str, name: str, names: Mapping[str, object]) -> ConfigError:
    key = name.lower().replace("_", "-").replace(" ", "-")
    return ConfigError(f"unknown {kind} {name!r}: {hint(key, names)}")


ACCELERATORS, MACHINES, _NODES = read_catalogue(Path(__file__).parent)


def find(name: str) -> Accelerator:
    """The accelerator of that name; an unknown name raises ConfigError with the nearest one."""
    if name not in ACCELERATORS:
        raise _nearest("accelerator", name, ACCELERATORS)
    return ACCELERATORS[name]


def find_machine(name: str) -> Machine:
    """The machine of that name, or of your own file, "mine.toml".

    A file is like those in systems/; node.accelerator may be a table like those in accelerators/.
    An unknown name raises ConfigError with the nearest one.
    """
    if name.endswith(".toml"):
        return _machine(Path(name).stem, name, _read(Path(name), name), ACCELERATORS, _NODES)
    if name not in MACHINES:
        raise _nearest("machine", name, MACHINES)
    return MACHINES[name]


def find_device(torch_name: str) -> Accelerator | None:
    """The accelerator with torch's device name ("NVIDIA A100-SXM4-80GB"); None if unknown."""
    for device in ACCELERATORS.values():
        if device.torch_names and all(part in torch_name for part in device.torch_names):
            return device
    return None
