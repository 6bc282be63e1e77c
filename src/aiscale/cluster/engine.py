"""The process of a rank: starts as an ipyparallel engine, and runs what the notebook calls.

    python -m aiscale.cluster FOLDER SIZE 0,1,2,3                # on this machine: imports torch once, then forks
    mpiexec -n 4 python -m aiscale.cluster FOLDER 4 mpi
    srun --ntasks=16 python -m aiscale.cluster FOLDER 16 slurm   # all nodes see FOLDER

The same cells run on all three. Eight forked ranks start as fast as one and share the memory of the libraries. Nothing
listens on a login node: rank 0 of a job starts the controller on its own node, and everything ends with the step.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import os
import platform
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from aiscale.cluster import local
from aiscale.processes import THREAD_VARIABLES, die_with, usable_cores

if TYPE_CHECKING:  # it loads torch, which must not happen before limit_threads
    from aiscale.distributed import Launch

ADDRESS = "AISCALE_ADDRESS"  #: this node's address, for the others
START_LIMIT_S = 600  #: for an engine to find the controller; the notebook times out earlier

_store = None  #: the rendezvous store, on rank 0 of a job


# ---- starting --------------------------------------------------------------------------------------------------------


def main() -> None:
    """Become the rank, or the ranks, given on the command line."""
    folder, size, which = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    if which == "mpi":
        _serve_mpi(folder, size)
    elif which == "slurm":
        _serve_task(folder, size)
    else:
        _preload()
        if "," in which:
            _fork(folder, size, which.split(","))
        else:
            _serve(folder, int(which), size, int(which), size)


def _preload() -> None:
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # or the debugger fills logs with a warning
    import ipykernel.debugger  # noqa: F401  # each rank would load it, 0.2 s
    import ipyparallel.engine.app  # noqa: F401
    import stack_data  # noqa: F401  # for the first traceback, which would delay Stop on a busy machine
    import torch._dynamo  # noqa: F401  # the first optimizer imports it: seconds on each rank
    import torch.distributed  # noqa: F401

    import aiscale.distributed  # noqa: F401


def _fork(folder: Path, size: int, ranks: list[str]) -> None:
    """Fork the ranks, wait for them, and write each end to FOLDER/exits as "RANK STATUS"."""
    from aiscale.distributed.spawn import Forked

    rank_of = {Forked(["-m", "aiscale.cluster", str(folder), str(size), rank], {}).pid: rank for rank in ranks}
    with open(folder / "exits", "a", buffering=1) as exits:
        while rank_of:
            pid, status = os.waitpid(-1, 0)
            if pid in rank_of:
                exits.write(f"{rank_of.pop(pid)} {os.waitstatus_to_exitcode(status)}\n")


def _serve_mpi(folder: Path, size: int) -> None:
    from mpi4py import MPI  # before torch, as some sites' MPI requires

    from aiscale.distributed import Launch, mpi_world

    place = Launch(launcher="mpiexec", rank=MPI.COMM_WORLD.rank, size=size)
    _log_to(folder, place.rank)
    mpi_world(place)  # raises if MPI did not join the processes
    _preload()
    _serve(folder, place.rank, size, place.rank, size)


def _serve_task(folder: Path, size: int) -> None:
    limit_threads()
    from aiscale.distributed import ConnectError, find_launch

    try:
        task = find_launch(os.environ)
        if task.launcher != "srun" or task.size != size:
            started = f"{task.launcher} started {task.size}"
            raise ConnectError(f"{size} ranks were requested, and {started}: start them with srun")
        prepare(folder, task)
    except ConnectError as error:
        print(f"aiscale: {error}", file=sys.stderr)
        sys.exit(2)
    _preload()
    _answer_signals()
    _serve(folder, task.rank, size, task.local_rank, task.local_size)


def _log_to(folder: Path, rank: int) -> int:
    """Send standard output and error to the rank's log; returns its file descriptor."""
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    return log


def _serve(folder: Path, rank: int, size: int, local_rank: int, local_size: int) -> None:
    # ipykernel replaces standard error by a pipe, which nobody reads after a crash.
    faulthandler.enable(_log_to(folder, rank), all_threads=False)
    place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size}
    os.environ.update({name: str(value) for name, value in place.items()})
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
            # We notice dead ranks by waiting for processes, and signal processes directly.
            "--IPEngine.enable_nanny=False",
            "--IPEngine.max_heartbeat_misses=0",
            "--log-level=ERROR",
        ]
    )


# ---- a task of srun, perhaps on another node than the notebook's -----------------------------------------------------


def limit_threads() -> None:
    """Set the number of threads before libraries are loaded: as asked for, else this rank's cores, but no more than the
    site's job script says."""
    threads = int(os.environ.get(local.THREADS) or 0)
    if not threads:
        cores = len(usable_cores())
        if cores == os.cpu_count():  # not bound: all ranks of the node share them
            cores //= max(map(int, re.findall(r"(?<!x)\b\d+", os.environ.get("SLURM_STEP_TASKS_PER_NODE", "1"))))
        threads = max(1, min(cores, int(os.environ.get("OMP_NUM_THREADS") or cores)))
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(threads)))


def prepare(folder: Path, task: Launch) -> None:
    """Set this task's variables, and on rank 0 start the controller."""
    from IPython.core.profiledir import ProfileDir

    from aiscale.distributed import ConnectError

    if not folder.is_dir():  # the notebook is gone, or the nodes do not share files
        raise ConnectError(
            f"{folder} is not on {socket.gethostname()}: set AISCALE_RUNS to a folder that all nodes see"
        )
    os.umask(0o077)
    os.environ[ADDRESS] = node_address()
    # srun: connect() then knows how the site binds GPUs
    os.environ.update(AISCALE_LAUNCHER="srun", IPYTHONDIR=str(folder / "ipython"))
    os.environ.setdefault("MPLBACKEND", local.INLINE)
    ProfileDir.create_profile_dir(str(folder / "profile"))  # on every rank: an engine without one gives up
    if task.rank == 0:
        job, step = os.environ["SLURM_JOB_ID"], os.environ["SLURM_STEP_ID"]
        (folder / "step").write_text(f"{job}.{step}")
        command = local.controller_command(folder / "profile", [os.environ[ADDRESS]])
        local.spawn(command, folder / "controller.log", preexec_fn=functools.partial(die_with, os.getpid()))


def node_address(env: Mapping[str, str] = os.environ) -> str:
    """The address at which other nodes of this job, and the submitting node, reach this one."""
    for peer in filter(None, [env.get("SLURM_SUBMIT_HOST"), env.get("SLURM_LAUNCH_NODE_IPADDR"), socket.gethostname()]):
        try:
            # Connecting a datagram socket sends nothing: the system only picks the source address.
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((peer, 9))
                address = probe.getsockname()[0]
        except OSError:
            continue
        if not address.startswith("127."):
            return address
    return local.LOOPBACK  # this machine has no network


def _answer_signals() -> None:
    """Let the notebook signal this engine through the controller, because it may be on another machine."""
    from ipyparallel.engine.kernel import IPythonParallelKernel

    async def signal_request(self, stream, ident, parent) -> None:
        # Runs in the control thread, which is free while a cell runs in the main one.
        signal.pthread_kill(threading.main_thread().ident, int(parent["content"]["sig"]))
        self.session.send(stream, "signal_reply", {"status": "ok"}, parent=parent, ident=ident)

    IPythonParallelKernel.signal_request = signal_request
    IPythonParallelKernel.control_msg_types = [*IPythonParallelKernel.control_msg_types, "signal_request"]


# ---- what the notebook calls on a rank -------------------------------------------------------------------------------


def join(rendezvous: dict[str, str], size: int, device: str, timeout_s: float, path: list[str], fresh: bool) -> dict:
    """Join a new process group of `size` ranks at `rendezvous`, and set the names that `%%px` cells rely on.

    `path`, the notebook's sys.path, is added to this rank's. With `fresh`, variables are deleted first.

    Returns what `Ranks` shows: rank, pid, host, device, backend, threads.
    """
    import torch
    import torch.distributed as dist
    from IPython.core.interactiveshell import InteractiveShell

    import aiscale.distributed

    shell = InteractiveShell.instance()
    if fresh:
        shell.reset(new_session=False)
        gc.collect()
        torch.set_default_dtype(torch.float32)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    sys.path += [folder for folder in path if folder not in sys.path]
    os.environ.update(rendezvous, WORLD_SIZE=str(size))
    world = aiscale.distributed.connect(device=device, timeout_s=timeout_s)
    names = {"rank": world.rank, "world_size": world.size, "world": world, "torch": torch, "dist": dist}
    shell.push(names, interactive=False)
    return {
        "rank": world.rank,
        "pid": os.getpid(),
        "host": platform.node(),
        "device": str(world.device),
        "backend": world.backend,
        "threads": torch.get_num_threads(),
    }


def offer_store(timeout_s: float) -> dict[str, str]:
    """On rank 0 of a job: start a rendezvous store; returns the environment variables by which ranks find it."""
    from aiscale.distributed import host_store

    global _store
    _store, found = host_store(timeout_s, os.environ[ADDRESS])
    return found


def leave() -> None:
    """Close this rank's connections, so that ranks which wait for it fail now instead of timing out."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
