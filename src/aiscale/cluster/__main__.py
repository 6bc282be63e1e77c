"""Engines, each a rank: `python -m aiscale.cluster FOLDER WORLD_SIZE RANK[,RANK...]`, or `mpi` or `slurm` for ranks.

With several ranks this process imports torch once and forks, so that eight ranks start as fast as one and share the
memory of the libraries. It then waits for them and writes each end to FOLDER/exits as "RANK STATUS".
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import time
from pathlib import Path

from aiscale.cluster import controller

START_LIMIT_S = 600  #: for an engine to find the controller; who waits for it gives up earlier
_PR_SET_PDEATHSIG = 1


def main() -> None:
    folder, size, which = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    if which == "mpi":
        _serve(folder, _mpi_rank(folder, size), size)
        return
    if which == "slurm":
        _serve_task(folder, size)
        return
    _preload()
    ranks = [int(rank) for rank in which.split(",")]
    if len(ranks) == 1:
        _serve(folder, ranks[0], size)
    else:
        _fork(folder, ranks, size)


def _preload() -> None:
    """Whatever every rank needs, imported once."""
    sys.modules.setdefault("debugpy", None)  # ipykernel would load it, 0.2 s a rank, and nothing can reach it here
    import ipyparallel.engine.app  # noqa: F401
    import stack_data  # noqa: F401  # for a first traceback, which a Stop on a busy machine would have to wait for
    import torch.distributed  # noqa: F401

    import aiscale.distributed  # noqa: F401


def _fork(folder: Path, ranks: list[int], size: int) -> None:
    parent = os.getpid()
    rank_of = {}
    for rank in ranks:
        pid = os.fork()
        if pid == 0:
            _die_with(parent)
            _differ()
            try:
                os.setsid()
                _serve(folder, rank, size)
            finally:
                os._exit(1)
        rank_of[pid] = rank
    with open(folder / "exits", "a", buffering=1) as exits:
        while rank_of:
            pid, status = os.waitpid(-1, 0)
            if pid in rank_of:
                exits.write(f"{rank_of.pop(pid)} {os.waitstatus_to_exitcode(status)}\n")


def _die_with(parent: int) -> None:
    """Be killed by the system when the parent is (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _differ() -> None:
    """Forked ranks inherit one state of numpy's global generator; separate processes would each draw their own."""
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def _mpi_rank(folder: Path, size: int) -> int:
    from mpi4py import MPI  # before torch, as some sites' MPI asks for

    from aiscale.distributed import Launch, mpi_world

    place = Launch(launcher="mpiexec", rank=MPI.COMM_WORLD.rank, size=size)
    _log_to(folder, place.rank)
    mpi_world(place)  # refuses single ranks that were meant to be joined
    _preload()
    return place.rank


def _serve_task(folder: Path, size: int) -> None:
    from aiscale.cluster import step

    step.limit_threads()
    from aiscale.distributed import ConnectError

    try:
        task = step.place(size)
        step.prepare(folder, task)
    except ConnectError as error:
        print(f"aiscale: {error}", file=sys.stderr)
        sys.exit(2)
    _preload()
    step.answer_signals()
    _serve(folder, task.rank, size, task.local_rank, task.local_size)


def _log_to(folder: Path, rank: int) -> int:
    """Send standard output and error to the rank's log; returns its file descriptor."""
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    return log


def _serve(folder: Path, rank: int, size: int, local_rank: int = -1, local_size: int = 0) -> None:
    # ipykernel puts a pipe in the place of standard error, which nobody reads once the process has crashed.
    faulthandler.enable(_log_to(folder, rank), all_threads=False)
    here = {"LOCAL_RANK": local_rank if local_size else rank, "LOCAL_WORLD_SIZE": local_size or size}
    os.environ.update({name: str(value) for name, value in {"RANK": rank, "WORLD_SIZE": size, **here}.items()})
    from ipyparallel.engine.app import IPEngine

    profile = folder / "profile"
    _await_controller(profile)
    IPEngine.launch_instance(
        [
            f"--profile-dir={profile}",
            f"--file={controller.connection_file(profile, 'engine')}",
            f"--IPEngine.id={rank}",
            f"--IPEngine.timeout={START_LIMIT_S}",
            # Deaths are noticed by waiting for processes, signals go straight to them.
            "--IPEngine.enable_nanny=False",
            "--IPEngine.max_heartbeat_misses=0",
            "--log-level=ERROR",
        ]
    )


def _await_controller(profile: Path) -> None:
    """An engine waits for the file only to exist, and would die of one that is not whole."""
    deadline = time.monotonic() + START_LIMIT_S
    while not controller.is_ready(profile, "engine") and time.monotonic() < deadline:
        time.sleep(0.1)


if __name__ == "__main__":
    main()
