"""Checks whether this node is ready to train: one `Finding` for each question.

    for finding in examine():
        print(finding.state, finding.name, finding.found, finding.remedy)

It changes nothing and talks to no other node. What could hang (MPI on a login node, a driver without its card) runs in
a separate process with a timeout.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import psutil

from aiscale.config import ConfigError, require_writable
from aiscale.processes import usable_cores

GIB = 2**30
PACKAGES = ("torch", "deepspeed", "megatron-core", "transformers", "ipyparallel", "mpi4py", "papermill")
#: network interfaces of the fast networks: Slingshot (hsn), InfiniBand (ib)
FAST_LINKS = ("hsn", "ib")
#: plugin through which NCCL and RCCL reach libfabric; without it they fall back to slow TCP
OFI_PLUGINS = ("libnccl-net.so", "librccl-net.so", "libnccl-net-ofi.so", "librccl-net-ofi.so")
LEAST_MEMORY_GIB = 2.5  # the eight ranks of lesson 06
LEAST_FILES = 1024  # every rank has connections to its neighbours and files of its loader open
LEAST_SPACE_GIB = 2


@dataclass(frozen=True)
class Finding:
    """The answer to one question."""

    name: str
    state: Literal["ok", "warning", "wrong"]  #: wrong: training will not work; warning: it may be slow or fail later
    found: str
    remedy: str = ""

    def line(self) -> str:
        mark = {"ok": "✓", "warning": "!", "wrong": "✗"}[self.state]
        return f"{mark} {self.name:16} {self.found}" + f" → {self.remedy}" * bool(self.remedy)


def examine() -> Iterator[Finding]:
    """All findings of this node, in order; takes a few seconds."""
    yield Finding("Python", "ok", f"{platform.python_version()}, {sys.prefix}")  # pip refuses others
    yield from _packages()
    yield _devices()
    yield _cores()
    yield _memory()
    yield _open_files()
    yield _mpi()
    yield _host_name()
    yield from _network()
    yield from effective_settings(os.environ)
    yield from _storage()


def _packages() -> Iterator[Finding]:
    found, missing = [], []
    for name in PACKAGES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            missing.append(name)
    state = "wrong" if "torch" in missing else "warning" if missing else "ok"
    remedy = f"pip install {' '.join(missing)}" if missing else ""
    yield Finding("packages", state, ", ".join(found), remedy)
    if not shutil.which("cc") and not shutil.which("gcc"):
        yield Finding("compiler", "warning", "none", "DeepSpeed's extensions want gcc: install it or load its module")


def _devices() -> Finding:
    """The GPUs that torch sees, from a separate process: a broken driver may hang or abort it."""
    code = (
        "import json, torch; c = torch.cuda; n = c.device_count(); "
        "print(json.dumps([torch.version.cuda or torch.version.hip, "
        "[[c.get_device_name(i), c.get_device_properties(i).total_memory] for i in range(n)]]))"
    )
    expected = int(os.environ.get("SLURM_GPUS_ON_NODE") or 0)
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180)
        toolkit, devices = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:  # as on a slow file system: no reason to stop a job
        return Finding("GPUs", "warning", "torch took more than 180 s to look for them", "try again")
    except (IndexError, ValueError):
        return Finding("GPUs", "wrong", "torch cannot look for them", "look at what python -c 'import torch' says")
    if not devices:
        lacking = f"Slurm gave this node {expected} GPUs, but torch sees none" if expected else "none"
        remedy = "install torch for this GPU (make setup TORCH=cuda, or rocm) and check the driver" if expected else ""
        return Finding("GPUs", "warning" if expected else "ok", f"{lacking}: ranks run on the CPU over gloo", remedy)
    names = ", ".join(f"{n} x {name}" for name, n in Counter(name for name, _ in devices).items())
    found = f"{names}, {devices[0][1] / GIB:.0f} GiB each, toolkit {toolkit}"
    one_each = len(devices) == 1 and "SLURM_PROCID" in os.environ  # --gpus-per-task=1
    if expected > len(devices) and not one_each:
        return Finding("GPUs", "warning", f"{found}; Slurm gave {expected}", "look at the step's --gpu-bind")
    return Finding("GPUs", "ok", found)


def node_cores() -> int:
    """The cores of the node, or of the container: those of a process that is bound to none."""
    for path in ("/sys/fs/cgroup/cpuset.cpus.effective", "/sys/fs/cgroup/cpuset/cpuset.effective_cpus"):
        if text := _read(Path(path)):
            ranges = [[int(end) for end in part.split("-")] for part in text.split(",")]
            return sum(ends[-1] - ends[0] + 1 for ends in ranges)
    return os.cpu_count() or 1


def machine() -> str:
    """An id shared by all virtual nodes and containers on this kernel; empty if it is unknown."""
    return _read(Path("/proc/sys/kernel/random/boot_id"))


def _cores() -> Finding:
    cores, threads = usable_cores(), os.environ.get("OMP_NUM_THREADS", "")
    found = f"{len(cores)} of {os.cpu_count()} usable, load {os.getloadavg()[0]:.1f}"
    found += f", OMP_NUM_THREADS {threads}" if threads else ""
    if threads.isdigit() and int(threads) > len(cores):
        return Finding("cores", "warning", found, "more threads than cores: raise --cpus-per-task or lower the first")
    if len(cores) < 2:
        return Finding("cores", "warning", found, "ranks will take turns: give this job at least 2 cores")
    return Finding("cores", "ok", found)


def _memory() -> Finding:
    """The memory that this process may use: the node's, or its control group's limit."""
    limits = [psutil.virtual_memory().total]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = _read(Path(path))
        limits += [int(text)] if text.isdigit() else []
    limit, free = min(limits), psutil.virtual_memory().available
    found = f"{limit / GIB:.0f} GiB, {min(free, limit) / GIB:.0f} free"
    if min(free, limit) < LEAST_MEMORY_GIB * GIB:
        return Finding("memory", "warning", found, f"the lessons want {LEAST_MEMORY_GIB} GiB: close other programs")
    return Finding("memory", "ok", found)


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    fast = any(name.startswith(FAST_LINKS) for name in psutil.net_if_addrs())
    found = f"{soft} open files, locked memory {'unlimited' if locked == resource.RLIM_INFINITY else f'{locked} bytes'}"
    if soft < LEAST_FILES:
        return Finding("limits", "wrong", found, f"ulimit -n {min(hard, 4096) if hard > 0 else 4096}")
    if fast and locked != resource.RLIM_INFINITY:
        return Finding("limits", "warning", found, "the fast network registers memory: ulimit -l unlimited")
    return Finding("limits", "ok", found)


def _mpi() -> Finding:
    """The MPI that mpi4py finds. Asked without MPI_Init, which may fail or hang outside a job."""
    code = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
    beside = Path(sys.executable).parent / "mpiexec"
    starter = str(beside) if beside.exists() else shutil.which("mpiexec") or shutil.which("srun") or "no mpiexec"
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    except subprocess.TimeoutExpired:
        return Finding("MPI", "warning", "mpi4py does not answer", "ask again inside a job; only strategy mpi needs it")
    if done.returncode:
        return Finding("MPI", "warning", "mpi4py finds no library", "pip install mpich, or load your site's MPI module")
    version = " ".join(done.stdout.split("\n")[0].replace("\t", " ").split()).rstrip("\x00")
    return Finding("MPI", "ok", f"{version[:60]}, {starter}")


def _host_name() -> Finding:
    name = socket.gethostname()
    try:
        address = socket.getaddrinfo(name, None)[0][4][0]
    except OSError:
        remedy = "ranks on this node meet on loopback; for several nodes set GLOO_SOCKET_IFNAME and MASTER_ADDR"
        return Finding("host name", "warning", f"{name} does not resolve", remedy)
    return Finding("host name", "ok", f"{name} is {address}")


def _network() -> Iterator[Finding]:
    links = [name for name, stat in psutil.net_if_stats().items() if stat.isup and name != "lo"]
    fast = sorted(name for name in links if name.startswith(FAST_LINKS))
    if not fast:
        yield Finding("network", "ok", ", ".join(sorted(links)) or "loopback only")
        return
    chosen = os.environ.get("NCCL_SOCKET_IFNAME", "")
    if not chosen or any(name.startswith(tuple(chosen.split(","))) for name in fast):
        yield Finding("network", "ok", ", ".join(fast))
    else:
        remedy = f"NCCL_SOCKET_IFNAME {chosen} is none of them: set it to {fast[0].rstrip('0123456789')}"
        yield Finding("network", "warning", ", ".join(fast), remedy)
    if plugin := find_plugin(os.environ):
        yield Finding("libfabric plugin", "ok", str(plugin))
    else:
        remedy = "load its module (rccl-net-plugin at OLCF; NERSC's nccl has it), or NCCL talks over TCP"
        yield Finding("libfabric plugin", "warning", "neither in NCCL_NET_PLUGIN nor on LD_LIBRARY_PATH", remedy)


#: what decides how NCCL, RCCL, libfabric and MPI use the network, and what a rank sees and is bound to
_SETTINGS = ("NCCL_", "RCCL_", "FI_", "TORCH_NCCL_", "MPICH_", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_SETTINGS += ("HIP_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS", "HSA_", "SLURM_CPU_BIND", "SLURM_GPU_BIND")


def effective_settings(env: Mapping[str, str]) -> Iterator[Finding]:
    """The variables of the network and of binding, and the modules, as this process has them."""
    told = " ".join(f"{name}={value}" for name, value in sorted(env.items()) if name.startswith(_SETTINGS) and value)
    if told:
        yield Finding("settings", "ok", told)
    if modules := env.get("LOADEDMODULES"):
        yield Finding("modules", "ok", modules.replace(":", " "))


def find_plugin(env: Mapping[str, str]) -> Path | None:
    """The library through which NCCL or RCCL reaches libfabric."""
    if (named := Path(env.get("NCCL_NET_PLUGIN", ""))).is_absolute() and named.exists():
        return named
    folders = [Path(folder) for folder in env.get("LD_LIBRARY_PATH", "").split(":") if folder]
    return next((folder / name for folder in folders for name in OFI_PLUGINS if (folder / name).exists()), None)


def _storage() -> Iterator[Finding]:
    """The folders for runs and temporary files: are they writable, and is there room?"""
    user = os.environ.get("USER", "")
    runs = Path.cwd() / "runs"  # where `aiscale train` writes
    places = {"this folder": runs if runs.is_dir() else Path.cwd(), "temporary files": Path(tempfile.gettempdir())}
    for name, path in (("node-local NVMe", f"/mnt/bb/{user}"), ("scratch", os.environ.get("SCRATCH", ""))):
        if path and Path(path).is_dir():
            places[name] = Path(path)
    for name, path in places.items():
        try:
            require_writable(path, "TMPDIR" if name == "temporary files" else "aiscale train --runs-dir DIR")
        except ConfigError as error:
            what, _, remedy = str(error).rpartition(": ")
            state = "wrong" if name in ("this folder", "temporary files") else "warning"
            yield Finding(name, state, what, remedy)
            continue
        free = shutil.disk_usage(path).free / GIB
        short = free < LEAST_SPACE_GIB
        remedy = "free some space for checkpoints" if short else ""
        yield Finding(name, "warning" if short else "ok", f"{path}, {free:,.0f} GiB free", remedy)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
