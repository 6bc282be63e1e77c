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
import uuid
from collections import defaultdict

import psutil
import torch.distributed as dist

from aiscale.distributed.environment import LOOPBACK_CARD, ConnectError, Launch, mpi_world
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
    """The rendezvous address: host and port."""
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
        same_node = place.local_size == place.size
        found = (LOOPBACK if same_node else _own_address(), port)
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
    """A port that all ranks of a step compute alike."""
    job, step = int(os.environ.get("SLURM_JOB_ID", 0)), os.environ.get("SLURM_STEP_ID", "0")
    return 20_000 + (job * 31 + int(step if step.isdigit() else 0)) % 20_000


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
