"""`find_launch(os.environ)` reads a process's rank and world size from its launcher's environment variables.

It knows torchrun, Slurm, MPI and ipyparallel, and raises ConnectError if it cannot tell. The innermost launcher, which
wrote RANK and WORLD_SIZE, wins: torchrun may run below srun, and a notebook's engines inside a Slurm job.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

#: Processes that start ranks. A process below one of them without a rank is an error: see find_launch.
_RANK_STARTERS = {"hydra_pmi_proxy", "orted", "prted", "prterun", "mpiexec", "mpirun", "mpiexec.hydra"}

#: (rank, size, local rank, local size) as each MPI's process manager spells them.
_MPI_DIALECTS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("PALS_RANKID", "PALS_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
)


LOOPBACK_CARD = "lo0" if sys.platform == "darwin" else "lo"


class ConnectError(RuntimeError):
    """The processes cannot be connected; the message is one line that says what to change."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One process's rank among the processes that a launcher started."""

    launcher: str  #: torchrun, aiscale, ipyparallel, srun, mpiexec, or none
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConnectError(
                f"{self.launcher} says rank {self.rank} of {self.size}: a rank must be between 0 and {self.size - 1}; "
                "unset stale RANK and WORLD_SIZE variables, or start the job again"
            )


def find_launch(env: Mapping[str, str], parents: list[str] | None = None) -> Launch:
    """This process's rank, from its environment. `parents` are the names of the processes above this one. They tell a
    process that was started alone from one that an MPI launcher started without giving it a rank; for the latter
    ConnectError is raised."""
    if "RANK" in env and "WORLD_SIZE" in env:
        name = "torchrun" if "TORCHELASTIC_RUN_ID" in env else env.get("AISCALE_LAUNCHER", "environment")
        return _read(name, env, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    # SLURM_PROCID alone proves nothing: a batch script has it too (0), with SLURM_NTASKS, the number of tasks that
    # srun *would* start. Only a step has SLURM_STEP_NUM_TASKS.
    slurm = (env.get("SLURM_PROCID"), env.get("SLURM_STEP_NUM_TASKS"))
    mpi = next((dialect for dialect in _MPI_DIALECTS if dialect[0] in env and dialect[1] in env), None)
    # mpiexec inside a Slurm job starts its helpers with srun, or runs in the step of an interactive shell: every rank
    # inherits that step's numbers. srun --mpi=pmi2 itself sets both to the same values.
    if mpi and slurm != (env[mpi[0]], env[mpi[1]]):
        return _read("mpiexec", env, *mpi)
    if all(slurm):
        launch = _read("srun", env, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "")
        return replace(launch, local_size=_tasks_here(env, launch.size))
    for name in parents or []:
        if name in _RANK_STARTERS:
            raise ConnectError(
                f"{name} started this process but gave it no rank, so every copy would train alone: "
                "use the mpiexec that belongs to your MPI (pip install mpich brings one), srun, or torchrun"
            )
    return Launch(launcher="none")


def _tasks_here(env: Mapping[str, str], size: int) -> int:
    """The ranks of this step on this node: node n's entry in a list such as 8(x2),4."""
    tasks: list[int] = []
    for entry in env.get("SLURM_STEP_TASKS_PER_NODE", str(size)).split(","):
        count, _, nodes = entry.rstrip(")").partition("(x")
        tasks += [int(count)] * int(nodes or 1)
    node = int(env.get("SLURM_NODEID", 0))
    return tasks[node] if node < len(tasks) else tasks[0]


def _read(name: str, env: Mapping[str, str], rank: str, size: str, local_rank: str, local_size: str) -> Launch:
    try:
        world = int(env[size])
        return Launch(
            launcher=name,
            rank=int(env[rank]),
            size=world,
            local_rank=int(env.get(local_rank, 0)),
            local_size=int(env.get(local_size, world)),
        )
    except ValueError:
        raise ConnectError(
            f"{rank}={env[rank]!r}, {size}={env[size]!r}: both must be whole numbers; unset them or start the job again"
        ) from None


def mpi_world(place: Launch):
    """mpi4py's COMM_WORLD, which listens on the loopback only if all ranks are on this machine; raises ConnectError if
    its size differs from the launcher's."""
    if place.launcher == "mpiexec" and place.local_size == place.size:
        for name in ("UCX_NET_DEVICES", "FI_TCP_IFACE"):  # of the libraries that MPI sends with
            os.environ.setdefault(name, LOOPBACK_CARD)
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ConnectError(
            f"mpi4py cannot load an MPI library ({reason}): pip install mpich, or load your site's MPI module"
        ) from None
    comm = MPI.COMM_WORLD
    if comm.size != place.size:
        raise ConnectError(
            f"{place.launcher} started {place.size} processes, but MPI joined {comm.size}: its library "
            f"({MPI.Get_library_version().splitlines()[0].strip()}) does not belong to this launcher; "
            "use that MPI's own mpiexec, or srun --mpi=pmix"
        )
    return comm
