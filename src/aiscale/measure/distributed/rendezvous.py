"""Ranks find each other at a rendezvous store.

On one machine the store is a file in a folder of mode 0700, and gloo listens on the loopback: no
other user can read or write the store, and no other machine can connect. What remains open to other
users of the machine are gloo's own connections, which have no password.

On several nodes the store is torch's TCPStore, which anybody on that network can read and write,
and gloo and NCCL listen there, too. Nothing but the centre's network protects them: a stranger
there can stop a job or change what it computes. So the kit unpickles nothing that comes from other
ranks (`World.gather`), but torch's own checkpoints do.
"""

from __future__ import annotations

import datetime
import itertools
import os
import re
import socket
import sys
import uuid
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist

from aiscale import private
from aiscale.private import STORE

LOOPBACK = "127.0.0.1"
LOOPBACK_CARD = "lo0" if sys.platform == "darwin" else "lo"
_RENDEZVOUS = "AISCALE_RENDEZVOUS"  #: a unique name: an earlier job may have used the same address
_CARD = "GLOO_SOCKET_IFNAME"
_OUR_CARD = "AISCALE_GLOO_INSIDE"  #: the card that we chose, for child processes

#: by address; a second world of this process uses the same one
_stores: dict[tuple[str, int], dist.Store] = {}
#: worlds joined by this process, by rendezvous; the same on all its ranks
_worlds = defaultdict(itertools.count)


def host_store(address: str, timeout_s: float = 300.0) -> tuple[dist.TCPStore, dict[str, str]]:
    """A rendezvous store in this process, to be kept alive, and the environment variables by which
    ranks on other machines find it at `address`."""
    store = _serve(address, 0, timeout_s)
    there = {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    return store, {**there, _RENDEZVOUS: uuid.uuid4().hex}


def _serve(address: str, port: int, timeout_s: float) -> dist.TCPStore:
    # Without a socket of ours it would listen on all networks of this machine.
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family, backlog=1024)
    return dist.TCPStore(
        address,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


def join_store(where: Path | tuple[str, int], place: Launch, timeout_s: float) -> dist.Store:
    """The store at which the ranks of a new world meet. Raises OSError if its port is taken."""
    timeout = datetime.timedelta(seconds=timeout_s)
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    name = os.environ.get(_RENDEZVOUS, "")
    if isinstance(where, Path):
        name = str(where)
        store = dist.FileStore(name)
        store.set_timeout(timeout)
    elif place.rank == 0 and is_loopback(where[0]) and not agents:
        if where not in _stores:
            _stores[where] = _serve(*where, timeout_s)
        store = _stores[where]
    else:
        store, *_ = next(dist.rendezvous("env://", place.rank, place.size, timeout=timeout))
    # The store may outlive a world, and a second one must not read the first one's addresses.
    return dist.PrefixStore(f"world{next(_worlds[name])}", store)


def meeting_point(place: Launch) -> Path | tuple[str, int]:
    """Where the ranks meet: a file, or a host and a port.

    A file if all are on this machine and their launcher says so.
    """
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    one_node = place.launcher == "srun" and os.environ.get("SLURM_STEP_NUM_NODES", "1") == "1"
    if host and port:
        return (LOOPBACK if one_node else host), int(port)
    if file := os.environ.get(STORE):
        return Path(file)
    if one_node:
        return _slurm_file()
    if place.launcher == "srun":
        return host or _slurm_first_host(), int(port or _slurm_port())
    if place.launcher == "mpiexec":
        return _ask_mpi(place)
    raise ConnectError(
        f"{place.launcher} gave RANK {place.rank} of WORLD_SIZE {place.size} but no MASTER_ADDR "
        "and MASTER_PORT: set both, or start the job with torchrun, srun, mpiexec or "
        "aiscale train --nproc"
    )


def _ask_mpi(place: Launch) -> Path | tuple[str, int]:
    """Rank 0 picks a file, or for several nodes a free port, and broadcasts it over MPI."""
    one_node = place.local_size == place.size
    if one_node:
        for name in ("UCX_NET_DEVICES", "FI_TCP_IFACE"):  # of the libraries that MPI sends with
            os.environ.setdefault(name, LOOPBACK_CARD)
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ConnectError(
            f"mpi4py cannot load an MPI library ({reason}): pip install mpich, or load a module"
        ) from None
    if (joined := MPI.COMM_WORLD.size) != place.size:
        what = f"mpiexec started {place.size} processes, but MPI joined {joined}"
        raise ConnectError(f"{what}: use the mpiexec of the MPI that mpi4py loads")
    there = None
    if place.rank == 0 and one_node:
        there = private.new_store()
    elif place.rank == 0:
        with socket.socket() as probe:
            probe.bind(("", 0))
            there = socket.gethostname(), probe.getsockname()[1]
    return MPI.COMM_WORLD.bcast(there, root=0)


def _slurm_file() -> Path:
    """A file that all ranks of a step on this node compute alike."""
    # Slurm requeues jobs under their number; the launcher's port tells their steps apart.
    names = ("JOB_ID", "STEP_ID", "RESTART_COUNT", "STEP_LAUNCHER_PORT")
    step = [os.environ.get(f"SLURM_{name}", "0") for name in names]
    try:
        return private.named_folder() / f"store-{'-'.join(step)}"
    except PermissionError as error:
        raise ConnectError(str(error)) from None


def _slurm_first_host() -> str:
    """The node of this step's rank 0."""
    # node[001-004,7],other -> node001
    first = re.match(r"([^\[,]+)(?:\[(\w+))?", os.environ["SLURM_STEP_NODELIST"])
    return first.group(1) + (first.group(2) or "")


def _slurm_port() -> int:
    """A port that all ranks of a step compute alike, below those that Linux gives connections."""
    job, step = int(os.environ.get("SLURM_JOB_ID", 0)), os.environ.get("SLURM_STEP_ID", "0")
    return 20_000 + (job * 31 + int(step if step.isdigit() else 0)) % 10_000


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine can reach `host`."""
    return host in ("localhost", "::1") or host.startswith("127.")


def choose_gloo_interface(meeting_point: str) -> None:
    """Make gloo listen on the card that leads to the meeting point, unless the user chose one."""
    # from an earlier world, or from the process that started the job
    ours = os.environ.pop(_OUR_CARD, None)
    if ours and os.environ.get(_CARD) == ours:
        del os.environ[_CARD]
    if _CARD not in os.environ:
        os.environ[_CARD] = os.environ[_OUR_CARD] = _card_towards(meeting_point)


def _card_towards(host: str) -> str:
    import psutil  # not needed to count traffic, which works with torch alone

    address = LOOPBACK
    cards = {each.address: name for name, own in psutil.net_if_addrs().items() for each in own}
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing: the system only picks the source address
        address = probe.getsockname()[0]
    return cards.get(address, LOOPBACK_CARD)


#: (rank, size, local rank, local size) as each MPI's process manager spells them.
_MPI_DIALECTS = (
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("PALS_RANKID", "PALS_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
)


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


def find_launch(env: Mapping[str, str]) -> Launch:
    """This process's rank, from its environment; the innermost launcher wins.

    That one wrote RANK and WORLD_SIZE: torchrun may run below srun, and a notebook's engines inside
    a Slurm job. Where they are srun's own numbers, for scripts that want torchrun's names, srun
    also knows the rank's place on its node.
    """
    copied = (env.get("RANK"), env.get("WORLD_SIZE")) == (
        env.get("SLURM_PROCID"),
        env.get("SLURM_STEP_NUM_TASKS"),
    )
    named = "TORCHELASTIC_RUN_ID" in env or "AISCALE_LAUNCHER" in env
    if "RANK" in env and "WORLD_SIZE" in env and (named or not copied):
        name = (
            "torchrun"
            if "TORCHELASTIC_RUN_ID" in env
            else env.get("AISCALE_LAUNCHER", "environment")
        )
        return _read(name, env, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    # SLURM_PROCID alone proves nothing: a batch script has it too (0), with SLURM_NTASKS, the
    # number of tasks that srun *would* start. Only a step has SLURM_STEP_NUM_TASKS.
    slurm = (env.get("SLURM_PROCID"), env.get("SLURM_STEP_NUM_TASKS"))
    mpi = next(
        (dialect for dialect in _MPI_DIALECTS if dialect[0] in env and dialect[1] in env), None
    )
    # mpiexec inside a Slurm job starts its helpers with srun, or runs in the step of an interactive
    # shell: every rank inherits that step's numbers. srun --mpi=pmi2 itself sets both alike.
    if mpi and slurm != (env[mpi[0]], env[mpi[1]]):
        return _read("mpiexec", env, *mpi)
    if all(slurm):
        launch = _read("srun", env, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "")
        # 8(x2): the same on all nodes
        tasks = re.match(r"\d*", env.get("SLURM_STEP_TASKS_PER_NODE", ""))[0]
        return replace(launch, local_size=int(tasks or launch.size))
    return Launch(launcher="none")


def _read(
    name: str, env: Mapping[str, str], rank: str, size: str, local_rank: str, local_size: str
) -> Launch:
    there = {"rank": env[rank], "size": env[size]}
    there |= {"local_rank": env.get(local_rank, 0), "local_size": env.get(local_size, env[size])}
    return Launch(launcher=name, **{key: int(value) for key, value in there.items()})
