"""The process of a rank: starts as an ipyparallel engine, and runs what the notebook calls.

python -m aiscale.lesson.cluster FOLDER 4 2                         # rank 2 of 4 on this machine
srun --ntasks=16 python -m aiscale.lesson.cluster FOLDER 16 slurm   # rank 0 starts the controller
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import platform
import re
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from aiscale.lesson.cluster import local
from aiscale.lesson.cluster.local import start_controller
from aiscale.private import STORE, keep_caches_private, new_store
from aiscale.processes import THREAD_VARIABLES, usable_cores

ADDRESS = "AISCALE_ADDRESS"  #: this node's address, for the others
START_LIMIT_S = 600  #: for an engine to find the controller; the notebook times out earlier
_store = None  #: the rendezvous store, on rank 0 of a job


def main() -> None:
    folder, size, which = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    if which == "slurm":
        _serve_task(folder, size)
    else:
        # Stop in a notebook signals its kernel's whole group; ranks are interrupted one by one.
        os.setsid()
        _serve(folder, int(which), size, int(which), size)


def _serve_task(folder: Path, size: int) -> None:
    limit_threads()
    from aiscale.measure.distributed import find_launch

    task = find_launch(os.environ)
    if task.launcher != "srun" or task.size != size:
        sys.exit(
            f"aiscale: {size} ranks were requested, and {task.launcher} started {task.size}: start "
            "them with srun"
        )
    if not folder.is_dir():  # the notebook is gone, or the nodes do not share files
        sys.exit(
            f"aiscale: {folder} is not on {platform.node()}: set AISCALE_RUNS to a folder that all "
            "nodes see"
        )
    prepare(folder, task.rank)
    _serve(folder, task.rank, size, task.local_rank, task.local_size)


def _log_to(folder: Path, rank: int) -> int:
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    return log


def _serve(folder: Path, rank: int, size: int, local_rank: int, local_size: int) -> None:
    # ipykernel replaces standard error by a pipe, which nobody reads after a crash.
    faulthandler.enable(_log_to(folder, rank), all_threads=False)
    place = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_size,
    }
    os.environ.update({name: str(value) for name, value in place.items()})
    for module in local.NEEDED:
        importlib.import_module(module)
    from ipyparallel.engine.app import IPEngine

    profile, deadline = folder / "profile", time.monotonic() + START_LIMIT_S
    # An engine waits only until the file exists, and would die if it is incomplete.
    while not local.controller_is_ready(profile, "engine") and time.monotonic() < deadline:
        time.sleep(0.1)
    IPEngine.launch_instance(
        [
            f"--profile-dir={profile}",
            f"--file={local.connection_file(profile, 'engine')}",
            f"--IPEngine.id={rank}",
            f"--IPEngine.timeout={START_LIMIT_S}",
            # On other machines a nanny passes on the notebook's signals; here it sends them itself.
            f"--IPEngine.enable_nanny={ADDRESS in os.environ}",
            "--IPEngine.max_heartbeat_misses=0",
            "--log-level=ERROR",
        ]
    )


def limit_threads() -> None:
    """Set the number of threads before libraries are loaded: as asked for, or this rank's cores."""
    threads = int(os.environ.get(local.THREADS) or 0)
    if not threads:
        cores = len(usable_cores())
        if cores == os.cpu_count():  # not bound: all ranks of the node share them
            tasks = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "1")
            cores //= max(map(int, re.findall(r"(?<!x)\b\d+", tasks)))
        threads = max(1, min(cores, int(os.environ.get("OMP_NUM_THREADS") or cores)))
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(threads)))


def prepare(folder: Path, rank: int) -> None:
    """Set this task's variables, and on rank 0 start the controller."""
    from IPython.core.profiledir import ProfileDir

    os.umask(0o077)
    keep_caches_private()
    os.environ[ADDRESS] = node_address()
    # srun: connect() then knows how the site binds GPUs
    os.environ.update(AISCALE_LAUNCHER="srun", IPYTHONDIR=str(folder / "ipython"))
    os.environ.setdefault("MPLBACKEND", local.INLINE)
    # On every rank: an engine without one gives up.
    ProfileDir.create_profile_dir(str(folder / "profile"))
    if rank == 0:
        job, step = os.environ["SLURM_JOB_ID"], os.environ["SLURM_STEP_ID"]
        (folder / "step").write_text(f"{job}.{step}")
        start_controller(folder, [os.environ[ADDRESS]], os.environ)


def node_address(env: Mapping[str, str] = os.environ) -> str:
    """The address at which other nodes of this job, and the submitting node, reach this one."""
    for peer in (
        env.get("SLURM_SUBMIT_HOST"),
        env.get("SLURM_LAUNCH_NODE_IPADDR"),
        socket.gethostname(),
    ):
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # Sends nothing: the system only picks the source address.
            probe.connect((peer or "", 9))
            if not (address := probe.getsockname()[0]).startswith("127."):
                return address
    return local.LOOPBACK  # this machine has no network


def join(
    rendezvous: dict[str, str],
    size: int,
    device: str,
    timeout_s: float,
    path: list[str],
    fresh: bool,
) -> dict:
    """Join a new process group of `size` ranks at `rendezvous`.

    Sets the names that `%%px` cells rely on. Adds `path` to this rank's sys.path; with `fresh`,
    deletes variables first. Returns what `Ranks.info` shows.
    """
    import torch
    import torch.distributed as dist
    from IPython.core.interactiveshell import InteractiveShell

    import aiscale.measure.distributed

    shell = InteractiveShell.instance()
    if fresh:
        shell.reset(new_session=False)
        gc.collect()
        torch.set_default_dtype(torch.float32)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    sys.path += [folder for folder in path if folder not in sys.path]
    for name in ("MASTER_ADDR", "MASTER_PORT", STORE):  # of an earlier group, or of the job
        os.environ.pop(name, None)
    os.environ.update(rendezvous, WORLD_SIZE=str(size))
    world = aiscale.measure.distributed.connect(device=device, timeout_s=timeout_s)
    names = {
        "rank": world.rank,
        "world_size": world.size,
        "world": world,
        "torch": torch,
        "dist": dist,
    }
    shell.push(names, interactive=False)
    own = {
        "rank": world.rank,
        "pid": os.getpid(),
        "host": platform.node(),
        "device": str(world.device),
    }
    return {**own, "backend": world.backend, "threads": torch.get_num_threads()}


def offer_store(timeout_s: float) -> dict[str, str]:
    """On rank 0 of a job: start a rendezvous store; returns the variables that lead ranks to it."""
    if os.environ["SLURM_STEP_NUM_NODES"] == "1":
        return {STORE: str(new_store())}
    from aiscale.measure.distributed import host_store

    global _store
    _store, address = host_store(os.environ[ADDRESS], timeout_s)
    return address


def leave() -> None:
    """Close this rank's connections, so that ranks which wait for it fail before they time out."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
