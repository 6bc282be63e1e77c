"""`aiscale doctor`: is this node ready to train? In a job (by srun): all its nodes and ranks?

One `Finding` for each question about a node; then all ranks run one all-reduce, and its result is
checked. With --node each node answers for itself, so that one that hangs holds up no other.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import resource
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal, TextIO

import psutil

from aiscale import environment
from aiscale.processes import usable_cores

GIB = 2**30
PACKAGES = (
    "torch",
    "deepspeed",
    "megatron-core",
    "transformers",
    "ipyparallel",
    "mpi4py",
    "papermill",
)
#: variables that decide how NCCL, RCCL, libfabric and MPI use the network, and what a rank sees
#: and is bound to
SETTINGS = (
    "NCCL_",
    "RCCL_",
    "FI_",
    "TORCH_NCCL_",
    "MPICH_",
    "CUDA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "HSA_",
    "SLURM_CPU_BIND",
    "SLURM_GPU_BIND",
)
LEAST_MEMORY_GIB = 2.5  # the eight ranks of lesson 07
CGROUPS = "/sys/fs/cgroup"  # where Linux keeps the limits of containers and jobs
LEAST_FILES = 1024  # every rank has connections to its neighbours and files of its loader open
LEAST_SPACE_GIB = 2
ALL_REDUCE_BYTES = 16 * 2**20
PRODUCT_SIDE = 4096  # of the matrices that each GPU multiplies: 32 MiB each
FREE_SHARE = 0.9  # of a GPU's memory, before anything runs there
COME_UP_S = 1800  #: at 256 nodes of Frontier 2,016 of 2,048 ranks had connected after 601 s


@dataclass(frozen=True)
class Finding:
    """The answer to one question."""

    name: str
    #: wrong: training will not work; warning: it may be slow or fail later
    state: Literal["ok", "warning", "wrong"]
    text: str
    remedy: str = ""

    def line(self) -> str:
        mark = {"ok": "✓", "warning": "!", "wrong": "✗"}[self.state]
        return f"{mark} {self.name:16} {self.text}" + f" → {self.remedy}" * bool(self.remedy)


def examine() -> Iterator[Finding]:
    # pip refuses others
    yield Finding("Python", "ok", f"{platform.python_version()}, {sys.prefix}")
    yield _packages()
    yield _devices()
    yield from _resources()
    yield _loopback()
    yield _own_name()
    yield from _temporary_folder()
    yield from settings(os.environ)


def _packages() -> Finding:
    there, missing = [], []
    for name in PACKAGES:
        try:
            there.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            missing.append(name)
    state = "wrong" if "torch" in missing else "warning" if missing else "ok"
    return Finding(
        "packages", state, ", ".join(there), f"pip install {' '.join(missing)}" if missing else ""
    )


def _devices() -> Finding:
    import torch

    if count := torch.cuda.device_count():
        return Finding("GPUs", "ok", f"{count} x {torch.cuda.get_device_name(0)}")
    if os.environ.get("SLURM_GPUS_ON_NODE"):
        remedy = "install torch for this GPU (make setup TORCH=cuda, or rocm) and check the driver"
        return Finding("GPUs", "warning", "Slurm gave some, but torch sees none", remedy)
    return Finding("GPUs", "ok", "none: ranks run on the CPU over gloo")


def each_gpu() -> Iterator[Finding]:
    """Whether Slurm's GPUs are all there, with free memory, and each multiplies right.

    A torch without support for GPUs is left to `examine`.
    """
    import torch

    count = torch.cuda.device_count()
    given = int(os.environ.get("SLURM_GPUS_ON_NODE") or 0)
    if count < given and (torch.version.cuda or torch.version.hip):
        yield Finding("GPUs", "wrong", f"torch sees {count} of {given}", "leave this node out")
    for number in range(count):
        if trouble := _trouble(torch.device("cuda", number)):
            yield Finding(f"GPU {number}", "wrong", trouble, "leave this node out")


def _trouble(device) -> str:
    """What is wrong with a GPU; empty: nothing was found."""
    import torch

    try:
        free, total = torch.cuda.mem_get_info(device)
        if free < FREE_SHARE * total:
            held = (total - free) / GIB
            return f"{held:.1f} of {total / GIB:.1f} GiB are taken before anything runs"
        ones = torch.ones(PRODUCT_SIDE, PRODUCT_SIDE, dtype=torch.bfloat16, device=device)
        right = bool((ones @ ones == PRODUCT_SIDE).all())
        return "" if right else "a product of two matrices of ones is wrong"
    except RuntimeError as error:
        return str(error).splitlines()[0]


def free_memory_bytes() -> int:
    """What is free on this machine, and in the job or container in which this process runs."""
    return min([psutil.virtual_memory().available, *_left_in_groups()])


def _left_in_groups(membership: str = "/proc/self/cgroup") -> Iterator[int]:
    """What each control group (version 2) of this process may still take, where it has a limit.

    Files that are read through the page cache count as taken, but give way: `inactive_file`.
    """
    with suppress(OSError):
        own = Path(membership).read_text().rpartition("0::/")[2].strip()
        group = Path(CGROUPS, own)
        for folder in (group, *group.parents):
            with suppress(OSError, ValueError):
                most = int((folder / "memory.max").read_text())  # `max` is no limit
                taken = int((folder / "memory.current").read_text())
                stat = dict(line.split() for line in (folder / "memory.stat").open())
                yield most - taken + int(stat["inactive_file"])


def _loopback() -> Finding:
    """Kernels, ranks and their notebook talk over ports of this machine's loopback."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        text = f"no connection to a port of 127.0.0.1 ({error.strerror or error})"
        return Finding("loopback", "wrong", text, "let 127.0.0.1 through this machine's firewall")
    return Finding("loopback", "ok", "ports of 127.0.0.1 can be opened and reached")


def _resources() -> Iterator[Finding]:
    cores, memory = len(usable_cores()), psutil.virtual_memory()
    free_bytes = free_memory_bytes()
    few = "" if cores > 1 else "ranks will take turns: give this job at least 2 cores"
    yield Finding("cores", "warning" if few else "ok", f"{cores} of {os.cpu_count()} usable", few)
    little = (
        ""
        if free_bytes > LEAST_MEMORY_GIB * GIB
        else f"the lessons want {LEAST_MEMORY_GIB} GiB free"
    )
    # the same on all nodes of a job, so that it is told once
    text = f"{memory.total / GIB:.0f} GiB"
    if little:
        text = f"{free_bytes / GIB:.1f} of {text} free"
    yield Finding("memory", "warning" if little else "ok", text, little)
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    remedy = "" if files >= LEAST_FILES else f"ulimit -n {min(most, 4096) if most > 0 else 4096}"
    yield Finding("limits", "wrong" if remedy else "ok", f"{files} open files", remedy)
    full = (
        ""
        if shutil.disk_usage(".").free > LEAST_SPACE_GIB * GIB
        else "free some space for checkpoints"
    )
    yield Finding("disk", "warning" if full else "ok", os.getcwd(), full)


def _own_name() -> Finding:
    """torchrun's ranks meet at this machine's name."""
    if address := os.environ.get(environment.LOCAL_ADDRESS):
        return Finding("host name", "ok", f"not needed: torchrun's ranks meet at {address}")
    if environment.name_leads_here():
        return Finding("host name", "ok", "leads to this machine")
    text = f"{socket.gethostname()} leads to no address of this machine: in a terminal `torchrun` "
    text += "hangs, in lessons it does not"
    remedy = f"export {environment.LOCAL_ADDRESS}=127.0.0.1, for torchrun on this machine alone"
    return Finding("host name", "warning", text, remedy)


def _temporary_folder() -> Iterator[Finding]:
    """Whether sockets can lie there."""
    most = f"a socket's path has at most {environment.SOCKET_PATH}"
    remedy = "export TMPDIR=FOLDER, one with a short path"
    if environment.linked:
        text = (
            f"{len(environment.linked)} characters, and {most}: aiscale and lessons go there by a "
        )
        text += "short link, and other scripts hang where they load data in processes of their own"
        yield Finding("TMPDIR", "warning", text, remedy)
    elif (length := len(os.environ.get("TMPDIR", ""))) > environment.LONGEST_FOLDER:
        text = f"{length} characters, and {most}: ranks do not start"
        yield Finding("TMPDIR", "wrong", text, remedy)


def settings(env: Mapping[str, str]) -> Iterator[Finding]:
    """The variables of the network and of binding, and the modules, as this process has them."""
    if set_here := [
        f"{name}={value}"
        for name, value in sorted(env.items())
        if name.startswith(SETTINGS) and value
    ]:
        yield Finding("settings", "ok", " ".join(set_here))
    if modules := env.get("LOADEDMODULES"):
        yield Finding("modules", "ok", modules.replace(":", " "))


def check_ranks(world) -> list[Finding]:
    """One all-reduce of all ranks, and the cores that they share; the same on every rank."""
    import torch
    import torch.distributed as dist

    for _ in range(2):  # the first one opens connections
        ones = torch.ones(ALL_REDUCE_BYTES // 4, device=world.device)
        world.barrier()
        began = time.perf_counter()
        with world.control():
            dist.all_reduce(ones)
        right = bool((ones == world.size).all())  # waits for a GPU, too
        seconds = time.perf_counter() - began
    every = world.gather((socket.gethostname(), usable_cores(), right, seconds))
    cores: dict[str, list[list[int]]] = {}  # of each rank of a node
    for host, own, _, _ in every:
        cores.setdefault(host, []).append(own)
    text = f"{world.size} on {len(cores)} node{'s' * (len(cores) > 1)}: "
    text += f"an all-reduce of {ALL_REDUCE_BYTES >> 20} MiB over {world.backend} "
    findings = [
        Finding("ranks", "ok", text + f"in {max(each[-1] for each in every) * 1e3:,.1f} ms")
    ]
    if not all(ok for _, _, ok, _ in every):
        findings = [
            Finding("ranks", "wrong", text + "gave a wrong sum", "the network corrupts data")
        ]
    for host, each in cores.items():
        if (several := len(set().union(*each))) < len(each):
            remedy = "they take turns: start fewer, or srun --cpus-per-task=... --cpu-bind=cores"
            findings.append(
                Finding(
                    "ranks", "warning", f"{len(each)} on {host}, bound to {several} cores", remedy
                )
            )
    return findings


def alike(nodes: Mapping[str, list[Finding]]) -> list[Finding]:
    """Each finding once; where not all nodes share it, with their names."""
    where: dict[Finding, list[str]] = {}
    for node, findings in nodes.items():
        for finding in findings:
            where.setdefault(finding, []).append(node)
    few = {one: f"  [{', '.join(some)}]" for one, some in where.items() if len(some) < len(nodes)}
    return [dataclasses.replace(one, text=one.text + few.get(one, "")) for one in where]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nproc",
        type=int,
        default=2,
        metavar="N",
        help="ranks to start outside a job (default: 2)",
    )
    parser.add_argument(
        "--device", default="auto", choices=["auto", "cpu", "cuda"], help="where ranks run"
    )
    parser.add_argument(
        "--node",
        action="store_true",
        help="in a job, by one task a node: print `ready NAME` if this node is, by itself",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=COME_UP_S,
        metavar="S",
        help=f"seconds for the ranks of a job to meet (default: {COME_UP_S})",
    )


def run(args: argparse.Namespace) -> int:
    from aiscale.launch import launch
    from aiscale.measure.distributed import find_launch

    if args.node:
        return _as_node()
    if find_launch(os.environ).size > 1:
        return _as_rank(args.device, look=True, patience_s=args.patience)
    wrong = False
    for finding in examine():
        print(finding.line(), flush=True)
        wrong |= finding.state == "wrong"
    if args.nproc > 1:
        wrong |= launch(args.nproc, as_rank(args.device, args.patience)) != 0
    print(_verdict(wrong))
    return int(wrong)


def as_rank(device: str, patience_s: float = COME_UP_S) -> list[str]:
    """What `launch` starts: ranks that meet, all-reduce and print what they found."""
    return ["-m", "aiscale.site.doctor", device, str(patience_s)]


def _as_node() -> int:
    """What this node lacks on stderr; `ready NAME` on stdout, as Slurm has it, if nothing."""
    name = os.environ.get("SLURMD_NODENAME", socket.gethostname())
    wrong = [one for one in [*examine(), *each_gpu()] if one.state == "wrong"]
    for finding in wrong:
        print(f"{name} {finding.line()}", file=sys.stderr)
    if not wrong:
        print(f"ready {name}")
    return int(bool(wrong))


def _as_rank(device: str, *, look: bool, patience_s: float = COME_UP_S) -> int:
    """`look`: the first rank of each node also examines it, and rank 0 gives the verdict."""
    from aiscale.measure.distributed import connect

    world = connect(device, patience_s)
    try:
        return int(_said(world, look, sys.stdout))
    finally:
        world.close()


def _said(world, look: bool, out: TextIO) -> bool:
    """Whether something is wrong, on all ranks; rank 0 says what."""
    mine = list(examine()) if look and world.local_rank == 0 else []
    nodes: dict[str, list[Finding]] = {}
    for node, told in world.gather(
        (socket.gethostname(), [dataclasses.astuple(one) for one in mine])
    ):
        if told:
            nodes[node] = [Finding(*words) for words in told]
    findings = alike(nodes) + check_ranks(world)
    wrong = any(finding.state == "wrong" for finding in findings)
    if world.is_main:
        lines = [*(finding.line() for finding in findings), *([_verdict(wrong)] if look else [])]
        print(*lines, sep="\n", flush=True, file=out)
    return wrong


def _verdict(wrong: bool) -> str:
    return (
        "no: put right what is marked ✗, or what the error above names"
        if wrong
        else "yes: this is ready to train"
    )


if __name__ == "__main__":
    sys.exit(_as_rank(sys.argv[1], look=False, patience_s=float(sys.argv[2])))
