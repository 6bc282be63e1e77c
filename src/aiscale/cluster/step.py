"""A rank as a task of srun, on a node that may be another one than the notebook's.

    srun --ntasks=16 python -m aiscale.cluster FOLDER 16 slurm

FOLDER is one that all nodes see. Rank 0 starts the controller beside itself, so that nothing listens on a login node;
it and everything else of the step ends with the step.
"""

from __future__ import annotations

import functools
import os
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from aiscale.cluster import controller
from aiscale.cluster.local import THREAD_VARIABLES, THREADS

if TYPE_CHECKING:  # it loads torch, which must not happen before limit_threads
    from aiscale.distributed import Launch

ADDRESS = "AISCALE_ADDRESS"  #: of this node, for the others


def limit_threads() -> None:
    """Tell libraries, before they are loaded, how many threads this rank may use: as many as were asked for, else its
    cores, and no more than the site's job script says."""
    threads = int(os.environ.get(THREADS) or 0)
    if not threads:
        cores = len(os.sched_getaffinity(0))
        if cores == os.cpu_count():  # not bound: all ranks of the node share them
            cores //= max(map(int, re.findall(r"(?<!x)\b\d+", os.environ.get("SLURM_STEP_TASKS_PER_NODE", "1"))))
        threads = max(1, min(cores, int(os.environ.get("OMP_NUM_THREADS") or cores)))
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(threads)))


def place(size: int) -> Launch:
    """This task's place in the step; raises ConnectError if this is no task of a step of `size`."""
    from aiscale.distributed import ConnectError, find_launch

    found = find_launch(os.environ)
    if found.launcher != "srun" or found.size != size:
        raise ConnectError(
            f"{size} ranks were asked for, and {found.launcher} started {found.size}: start them by srun"
        )
    return found


def prepare(folder: Path, task: Launch) -> None:
    """Set this task's variables, and on rank 0 start the controller."""
    from IPython.core.profiledir import ProfileDir

    from aiscale.distributed import ConnectError

    if not folder.is_dir():  # whoever asked for this job has gone, or the nodes do not see the same files
        raise ConnectError(f"{folder} is not on {socket.gethostname()}: name one that all nodes see by AISCALE_RUNS")
    os.umask(0o077)
    os.environ[ADDRESS] = node_address()
    # srun, so that connect() knows what the site's binding of GPUs means
    os.environ.update(AISCALE_LAUNCHER="srun", IPYTHONDIR=str(folder / "ipython"))
    os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    ProfileDir.create_profile_dir(str(folder / "profile"))  # by whoever comes first: an engine without one gives up
    if task.rank == 0:
        job, step = os.environ["SLURM_JOB_ID"], os.environ["SLURM_STEP_ID"]
        (folder / "ranks").write_text(str(task.size))
        (folder / "step").write_text(f"{job}.{step}")
        _start_controller(folder)


def _start_controller(folder: Path) -> None:
    from aiscale.distributed.forking import die_with

    with open(folder / "controller.log", "ab") as log:
        subprocess.Popen(
            controller.command(folder / "profile", [os.environ[ADDRESS]]),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=functools.partial(die_with, os.getpid()),
        )


def node_address(env: Mapping[str, str] = os.environ) -> str:
    """The address at which the other nodes of this job, and the node that it was submitted from, reach this one."""
    for peer in _peers(env):
        try:
            # A datagram socket sends nothing when it is connected: the system only says from where it would.
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((peer, 9))
                address = probe.getsockname()[0]
        except OSError:
            continue
        if not address.startswith("127."):
            return address
    return controller.LOOPBACK  # alone on a machine that knows no network


def _peers(env: Mapping[str, str]) -> Iterator[str]:
    yield from filter(None, [env.get("SLURM_SUBMIT_HOST"), env.get("SLURM_LAUNCH_NODE_IPADDR")])
    yield socket.gethostname()


def answer_signals() -> None:
    """Let the notebook signal this engine through the controller, for it may be on another machine."""
    from ipyparallel.engine.kernel import IPythonParallelKernel

    async def signal_request(self, stream, ident, parent) -> None:
        # In the thread for control, which is free while a cell runs in the main one.
        signal.pthread_kill(threading.main_thread().ident, int(parent["content"]["sig"]))
        self.session.send(stream, "signal_reply", {"status": "ok"}, parent=parent, ident=ident)

    IPythonParallelKernel.signal_request = signal_request
    IPythonParallelKernel.control_msg_types = [*IPythonParallelKernel.control_msg_types, "signal_request"]
