"""Ranks find each other at a rendezvous store, and nobody outside the machine can connect to a one-machine job.

    store, env = host_store()             # in a launcher: ranks with `env` in their environment meet there
    host, port = meeting_point(place)     # in a rank: the rendezvous address, from the launcher, Slurm or MPI
    store = join_store(host, port, place, timeout)

By default the store listens on all networks of the machine, and gloo at the address of its host name, open to anybody
who can reach it. Ranks of one machine meet at its loopback, and then listen nowhere else.
"""

from __future__ import annotations

import datetime
import errno
import ipaddress
import itertools
import os
import re
import socket
import subprocess
import sys
import uuid
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

import psutil
import torch.distributed as dist

from aiscale.distributed.failing import alike

LOOPBACK = "127.0.0.1"
_RENDEZVOUS = "AISCALE_RENDEZVOUS"  #: a unique name: an earlier job may have used the same address
_CARD = "GLOO_SOCKET_IFNAME"
_OUR_CARD = "AISCALE_GLOO_INSIDE"  #: the card that we chose, for child processes

_stores: dict[tuple[str, int], dist.Store] = {}  #: by address; a second world of this process uses the same one
_worlds = defaultdict(itertools.count)  #: worlds joined by this process, by rendezvous; the same on all its ranks


def host_store(timeout_s: float = 300.0, address: str = LOOPBACK) -> tuple[dist.TCPStore, dict[str, str]]:
    """A rendezvous store in this process, and the environment variables by which ranks find it. Ranks on other machines
    need an `address` that they can reach. Keep the store alive as long as the ranks run."""
    listener, env = listen(address)
    return serve(listener, timeout_s), env


def listen(address: str = LOOPBACK) -> tuple[socket.socket, dict[str, str]]:
    """A socket for the store, and the environment variables by which ranks find it, even before the store runs."""
    listener = socket.create_server((address, 0), backlog=1024)
    port = listener.getsockname()[1]
    return listener, {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        _RENDEZVOUS: uuid.uuid4().hex,
    }


def serve(listener: socket.socket, timeout_s: float = 300.0) -> dist.TCPStore:
    """The store that answers on a socket. Without a socket it would listen on all networks of this machine."""
    address, port, *_ = listener.getsockname()
    return dist.TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


def join_store(host: str, port: int, place: Launch, timeout_s: float) -> dist.Store:
    """The store at which the ranks of a new world meet. Raises OSError if the port is taken."""
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if place.rank == 0 and is_loopback(host) and not agents:
        if (host, port) not in _stores:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.create_server((host, port), family=family, backlog=1024)
            _stores[host, port] = serve(listener, timeout_s)
        store = _stores[host, port]
    else:
        timeout = datetime.timedelta(seconds=timeout_s)
        store, *_ = next(dist.rendezvous("env://", place.rank, place.size, timeout=timeout))
    # The store may outlive a world, and a second one must not read the first one's addresses.
    count = next(_worlds[os.environ.get(_RENDEZVOUS, "")])
    return dist.PrefixStore(f"world{count}", store)


def meeting_point(place: Launch) -> tuple[str, int]:
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if port and (not port.isdigit() or not 0 < int(port) < 65536):
        raise ConnectError(f"MASTER_PORT is {port!r}: it must be a number between 1 and 65535")
    if host and port:
        if place.launcher == "mpiexec" and "AISCALE_LAUNCHER" not in os.environ:  # else an earlier world listens there
            _refuse_taken_port(host, int(port), place)
        return host, int(port)
    if place.launcher == "srun":
        return host or _slurm_first_host(), int(port or _slurm_port())
    if place.launcher == "mpiexec":
        return _ask_mpi(place)
    raise ConnectError(
        f"{place.launcher} gave RANK {place.rank} of WORLD_SIZE {place.size} but no MASTER_ADDR and MASTER_PORT: "
        "set both, or start the job with torchrun, srun, mpiexec or aiscale train --nproc"
    )


def _ask_mpi(place: Launch) -> tuple[str, int]:
    """Rank 0 picks a free port and broadcasts it over MPI."""
    comm = mpi_world(place)
    found = None
    if place.rank == 0:
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        found = (LOOPBACK if place.local_size == place.size else _own_address(), port)
    return comm.bcast(found, root=0)


def _refuse_taken_port(host: str, port: int, place: Launch) -> None:
    """Let all ranks know over MPI that rank 0 cannot listen: they would wait minutes for it, as mpiexec goes on."""
    try:
        comm = mpi_world(place)
    except ConnectError:  # these ranks need no MPI
        return
    problem = ""
    if place.rank == 0 and is_own(host):
        try:
            socket.create_server((host if is_loopback(host) else "", port)).close()
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            why = "is already in use by another process" if taken else f"cannot be used ({os.strerror(error.errno)})"
            problem = f"{host}:{port} {why}: set MASTER_PORT to a free port, or unset it"
    if problem := comm.bcast(problem, root=0):
        raise alike(ConnectError(problem))


def is_own(host: str) -> bool:
    """Whether `host` is an address or a name of this machine."""
    try:
        there = {address[0] for *_, address in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    own = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    return bool(there & own) or is_loopback(host)


def _own_address() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return LOOPBACK


def _slurm_first_host() -> str:
    """The node of this step's rank 0."""
    if os.environ.get("SLURM_STEP_NUM_NODES", "1") == "1":
        return LOOPBACK
    nodes = os.environ["SLURM_STEP_NODELIST"]
    try:
        return subprocess.check_output(["scontrol", "show", "hostnames", nodes], text=True).split()[0]
    except (OSError, subprocess.CalledProcessError):
        # node[001-004,7],other -> node001
        first = re.match(r"([^\[,]+)(?:\[(\w+))?", nodes)
        return first.group(1) + (first.group(2) or "")


def _slurm_port() -> int:
    """A port that all ranks of a step compute alike, below those that Linux gives to connections (32,768 and up)."""
    job, step = int(os.environ.get("SLURM_JOB_ID", 0)), os.environ.get("SLURM_STEP_ID", "0")
    return 20_000 + (job * 31 + int(step if step.isdigit() else 0)) % 10_000


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def choose_gloo_interface(meeting_point: str) -> None:
    """Make gloo listen on the loopback if the ranks meet there, unless the user has chosen an interface. Otherwise gloo
    looks up its own host name. If that leads only to this machine, as it often does, name the network card that leads
    to the others."""
    ours = os.environ.pop(_OUR_CARD, None)  # from an earlier world, or from the process that started the job
    if ours and os.environ.get(_CARD) == ours:
        del os.environ[_CARD]
    if _CARD in os.environ:
        return
    if is_loopback(meeting_point):
        card = LOOPBACK_CARD
    elif not _found_by_name():
        card = _card_towards(meeting_point)
    else:
        return
    os.environ[_CARD] = os.environ[_OUR_CARD] = card


def _card_towards(host: str) -> str:
    """The network card that reaches `host`; the loopback if it is this machine or cannot be reached."""
    try:
        # Connecting a datagram socket sends nothing: the system only picks the source address.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            address = probe.getsockname()[0]
    except OSError:
        return LOOPBACK_CARD
    cards = (name for name, own in psutil.net_if_addrs().items() if any(each.address == address for each in own))
    return next(cards, LOOPBACK_CARD)


def _found_by_name() -> bool:
    """Whether other machines reach this one at the address gloo takes: the first of its host name that is its own."""
    try:
        named = [address[0] for *_, address in socket.getaddrinfo(socket.gethostname(), None)]
    except OSError:
        return False
    own = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    first = next((address for address in named if address in own), None)
    return first is not None and not is_loopback(first)


# The launcher's environment variables ---------------------------------------------------------------------------------
# The innermost launcher, which wrote RANK and WORLD_SIZE, wins: torchrun may run below srun, and a notebook's engines
# inside a Slurm job.


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
