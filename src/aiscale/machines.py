"""Accelerators, nodes and networks: what a data sheet or a site's documentation says, with its source.

    find("a100-sxm4-80gb").peak_flops("bf16")               # 312e12 FLOP/s, dense; None without such a unit
    find_machine("frontier").node.accelerator.memory_bytes  # one GCD of an MI250X
    find_device(torch.cuda.get_device_name())               # the accelerator that torch sees here, or None

Only figures that were read in a source are here. `verification` says how: "primary" (the maker's or the site's own
documentation), "secondary" (a maintained collection of data sheets), "measured". Figures that we remember but could
not read again (MI100's matrix units, IPUs, node counts) are left out on purpose: None, or no entry at all.

FLOP/s are dense: data sheets of NVIDIA also print twice that for sparse matrices. A data sheet's GB is taken as 10^9
bytes, up to 7 % below what the device reports. Bandwidths are in one direction.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field

from aiscale.config import ConfigError

_ML_ENGINEERING = "stas00/ml-engineering@744d01e18b79, compute/accelerator and network"
_TORCHTITAN = "pytorch/torchtitan@b5bcd76c66d0, torchtitan/tools/utils.py"
_OLCF = "olcf-user-docs@274590317797"
_ALCF = "argonne-lcf/user-guides@7d04a3f91d5e"
_STANAGE = "rcgsheffield/sheffield_hpc@f60c6e605e2b stanage/cluster_specs.rst, software/libs/cuda.rst"
_SCALING_BOOK = "jax-ml/scaling-book tpus.md; links: 6 a chip"


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One device as torch sees it: a GPU, one GCD of an MI250X, one tile of a Max 1550, a TPU chip."""

    name: str
    tflops: Mapping[str, float]  #: dense peak by precision, 10^12 FLOP/s
    memory_gb: float  #: 10^9 bytes
    memory_tb_s: float  #: 10^12 bytes/s between the device and its memory
    link_gb_s: float | None = None  #: 10^9 bytes/s to its neighbours in the node, all its links, one direction
    torch_names: tuple[str, ...] = ()  #: parts of torch's device name, all of which must occur
    verification: str = "secondary"
    sources: Mapping[str, str] = field(default_factory=dict)  #: of tflops, memory, link; "all" for one source of all

    @property
    def memory_bytes(self) -> float:
        return self.memory_gb * 1e9

    @property
    def memory_bytes_s(self) -> float:
        return self.memory_tb_s * 1e12

    @property
    def link_bytes_s(self) -> float | None:
        return None if self.link_gb_s is None else self.link_gb_s * 1e9

    def peak_flops(self, precision: str) -> float | None:
        """FLOP/s at best in fp32, tf32, fp16, bf16 or fp8; None where there is no unit for it, or no figure."""
        known = self.tflops.get(precision)
        return None if known is None else known * 1e12

    def source(self, figure: str) -> str:
        """Where a figure (tflops, memory, link) was read."""
        return f"{self.sources.get(figure, self.sources['all'])} ({self.verification})"


@dataclass(frozen=True, kw_only=True)
class Network:
    """What connects the nodes."""

    name: str
    injection_gb_s: float  #: 10^9 bytes/s from one node into the network, all its adapters, one direction
    source: str
    verification: str = "primary"

    @property
    def injection_bytes_s(self) -> float:
        return self.injection_gb_s * 1e9


@dataclass(frozen=True, kw_only=True)
class Node:
    """Devices that share one operating system."""

    accelerator: Accelerator
    devices: int  #: as torch counts them
    intra_gb_s: float  #: 10^9 bytes/s between neighbours on a ring through all devices of the node, one direction
    note: str = ""
    source: str
    verification: str = "primary"

    @property
    def intra_bytes_s(self) -> float:
        return self.intra_gb_s * 1e9


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A system: many nodes and a network."""

    name: str
    site: str
    node: Node
    network: Network
    nodes: int | None = None  #: None where the count was not read in a source


_V100 = {"fp32": 15.7, "fp16": 125}
_A100 = {"fp32": 19.5, "tf32": 156, "fp16": 312, "bf16": 312}
_H100 = {"fp32": 67.0, "tf32": 494.5, "fp16": 989, "bf16": 989, "fp8": 1979}
_H100_PCIE = {"fp32": 51.0, "tf32": 378, "fp16": 756, "bf16": 756, "fp8": 1513}
_MI300X = {"fp32": 163.4, "tf32": 653.7, "fp16": 1307, "bf16": 1307, "fp8": 2614}
_GAUDI3 = {"tf32": 459, "fp16": 459, "bf16": 1677, "fp8": 1677}
_SUMMIT = {
    "all": f"{_OLCF} summit_user_guide.rst",
    "tflops": f"{_OLCF} summit_user_guide.rst; 125: developer.nvidia.com, programming tensor cores in CUDA 9",
    "link": _ML_ENGINEERING,
}
_NVIDIA = {"all": _ML_ENGINEERING, "tflops": f"{_ML_ENGINEERING}; {_TORCHTITAN}"}
_MI250X = {"all": f"{_OLCF} frontier_user_guide.rst", "tflops": f"{_TORCHTITAN}, half of the package"}
_TURING = {"all": "Turing Technical Report 3, doi:10.5281/zenodo.13349541, tables 2 and 3"}
_MAX1550 = {"all": f"{_ALCF} docs/aurora/node-performance-overview: one tile, not a data sheet"}
_TILE = {"fp32": 21, "tf32": 130, "fp16": 247, "bf16": 256}

_ACCELERATOR_COLUMNS = (
    "name",
    "torch_names",
    "tflops",
    "memory_gb",
    "memory_tb_s",
    "link_gb_s",
    "verification",
    "sources",
)
_ACCELERATOR_ROWS = (
    ("v100-sxm2-16gb", ("V100-SXM2-16GB",), _V100, 16, 0.9, 150, "primary", _SUMMIT),
    ("v100-sxm2-32gb", ("V100-SXM2-32GB",), _V100, 32, 0.9, 150, "primary", _SUMMIT),
    ("a100-sxm4-40gb", ("A100-SXM4-40GB",), _A100, 40, 1.555, 300, "secondary", {"all": _ML_ENGINEERING}),
    ("a100-sxm4-80gb", ("A100-SXM4-80GB",), _A100, 80, 2.0, 300, "secondary", {"all": _ML_ENGINEERING}),
    ("h100-sxm5-80gb", ("H100", "HBM3"), _H100, 80, 3.35, 450, "secondary", _NVIDIA),
    ("h100-pcie-80gb", ("H100", "PCIe"), _H100_PCIE, 80, 2.0, 63, "secondary", _NVIDIA),
    ("h200-sxm-141gb", ("H200",), _H100, 141, 4.8, 450, "secondary", _NVIDIA),
    ("mi210", ("MI210",), {"fp32": 22.6, "fp16": 181, "bf16": 181}, 64, 1.6, None, "secondary", _TURING),
    ("mi250x-gcd", ("MI250X",), {"fp32": 23.95, "fp16": 191.5, "bf16": 191.5}, 64, 1.6, 200, "primary", _MI250X),
    ("mi300x", ("MI300X",), _MI300X, 192, 5.3, 448, "secondary", {"all": _ML_ENGINEERING}),
    ("max1550-tile", ("Data Center GPU Max 1550",), _TILE, 64, 1.64, 185, "measured", _MAX1550),
    ("tpu-v4", (), {"bf16": 275}, 32, 1.2, 270, "secondary", {"all": _SCALING_BOOK}),
    ("tpu-v5p", (), {"bf16": 459}, 96, 2.8, 540, "secondary", {"all": _SCALING_BOOK}),
    ("gaudi2", (), {"fp16": 432, "bf16": 432, "fp8": 865}, 96, 2.46, 300, "secondary", {"all": _ML_ENGINEERING}),
    ("gaudi3", (), _GAUDI3, 128, 3.7, 600, "secondary", {"all": _ML_ENGINEERING}),
)
ACCELERATORS: dict[str, Accelerator] = {
    row[0]: Accelerator(**dict(zip(_ACCELERATOR_COLUMNS, row, strict=True))) for row in _ACCELERATOR_ROWS
}

_SLINGSHOT = "4 x Slingshot-11, 200 Gb/s each"
_OMNI_PATH = "Omni-Path, 100 Gb/s"
_RADIUS = "artifact appendix of the Radius paper, section A.3.2"
_LUMI = "lumi-userguide@6c3a26c0fc8f lumig.md, network.md"
_JEAN_ZAY = "bigscience@9e64edec2ad1 jz/hpc-specs.md"
_FRONTIER_NOTE = "200 GB/s between the two GCDs of a package, 100 or 50 to others: a ring meets the slowest"
_AURORA_NOTE = "one stream between two GPUs, measured; 185 GB/s between the tiles of one"
_STANAGE_NOTE = "bus bandwidth of NCCL's all-reduce of 128 MiB, measured"
_SUMMIT_NOTE = "inside each of two triads of GPUs; what joins the triads was not read"

# name, site, nodes, accelerator, devices, GB/s in the node, note on it, network, GB/s into it, source
_MACHINE_ROWS = (
    (
        "frontier",
        "OLCF",
        None,
        "mi250x-gcd",
        8,
        50,
        _FRONTIER_NOTE,
        _SLINGSHOT,
        100,
        f"{_OLCF} frontier_user_guide.rst",
    ),
    ("lumi-g", "CSC", None, "mi250x-gcd", 8, 50, "as Frontier's node", _SLINGSHOT, 100, _LUMI),
    ("perlmutter", "NERSC", None, "a100-sxm4-80gb", 4, 300, "half of 600 both ways", _SLINGSHOT, 100, _RADIUS),
    ("summit", "OLCF", 4608, "v100-sxm2-16gb", 6, 50, _SUMMIT_NOTE, "2 x EDR", 23, f"{_OLCF} summit_user_guide.rst"),
    (
        "polaris",
        "ALCF",
        560,
        "a100-sxm4-40gb",
        4,
        300,
        "half of 600 both ways",
        "2 x Slingshot-11",
        50,
        f"{_ALCF} polaris",
    ),
    ("aurora", "ALCF", 10624, "max1550-tile", 12, 15, _AURORA_NOTE, "8 x Slingshot-11", 200, f"{_ALCF} aurora"),
    ("stanage-a100", "Sheffield", 15, "a100-sxm4-80gb", 4, 206, _STANAGE_NOTE, _OMNI_PATH, 12.5, _STANAGE),
    ("stanage-h100", "Sheffield", 6, "h100-pcie-80gb", 2, 63, "PCIe only", _OMNI_PATH, 12.5, _STANAGE),
    ("jean-zay-a100", "IDRIS", 52, "a100-sxm4-80gb", 8, 300, "NVSwitch", f"4 x {_OMNI_PATH}", 50, _JEAN_ZAY),
)


def _machine(name, site, nodes, accelerator, devices, intra_gb_s, note, network, injection_gb_s, source) -> Machine:
    node = Node(accelerator=ACCELERATORS[accelerator], devices=devices, intra_gb_s=intra_gb_s, note=note, source=source)
    links = Network(name=network, injection_gb_s=injection_gb_s, source=source)
    return Machine(name=name, site=site, nodes=nodes, node=node, network=links)


MACHINES: dict[str, Machine] = {row[0]: _machine(*row) for row in _MACHINE_ROWS}


def _nearest(kind: str, name: str, known: Mapping[str, object]) -> ConfigError:
    key = name.lower().replace("_", "-").replace(" ", "-")
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]}?" if close else f"it may be one of {', '.join(known)}"
    return ConfigError(f"unknown {kind} {name!r}: {hint}")


def find(name: str) -> Accelerator:
    """The accelerator of that name; raises ConfigError that names the nearest one."""
    if name not in ACCELERATORS:
        raise _nearest("accelerator", name, ACCELERATORS)
    return ACCELERATORS[name]


def find_machine(name: str) -> Machine:
    """The machine of that name; raises ConfigError that names the nearest one."""
    if name not in MACHINES:
        raise _nearest("machine", name, MACHINES)
    return MACHINES[name]


def find_device(torch_name: str) -> Accelerator | None:
    """The accelerator behind torch's name of a device ("NVIDIA A100-SXM4-80GB"), or None if it is not known here."""
    for device in ACCELERATORS.values():
        if device.torch_names and all(part in torch_name for part in device.torch_names):
            return device
    return None
