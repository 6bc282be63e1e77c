"""ipyparallel's controller, through which the notebook and its engines talk: how it is started, and where it listens.

By itself it picks free ports one after the other and binds them later. Four notebooks that start at once get in each
other's way, and now and then it picks one port twice. So it is given its ports, all different, at an address of the
loopback that on Linux no other cluster uses. Ranks of a batch job cannot reach that: their controller runs in the job,
beside rank 0, and listens at that node's address, to those who have the key.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from pathlib import Path

PORT_TAKEN = "Address already in use"
LOOPBACK = "127.0.0.1"
_PORTS = 32  #: it takes about 20


def command(profile: Path, addresses: list[str]) -> list[str]:
    """The command line of a controller that listens at the first of `addresses` that this machine has, and whose
    files are in the folder `profile`."""
    address, ports = _free_ports(addresses)
    return [
        *(sys.executable, "-m", "ipyparallel.controller", f"--profile-dir={profile}"),
        *(f"--ip={address}", f"--location={address}", f"--ports={','.join(map(str, ports))}"),
        # Threads and no database: fewer processes, and nothing is kept.
        *("--usethreads", "--nodb", "--log-level=ERROR"),
        # An engine is admitted at its first heartbeat. Missed ones mean nothing here: deaths are seen by waitpid.
        *("--HeartMonitor.period=200", "--HeartMonitor.max_heartmonitor_misses=100000"),
    ]


def connection_file(profile: Path, reader: str = "client") -> Path:
    """Where the controller writes how a client, or an engine, reaches it."""
    return profile / "security" / f"ipcontroller-{reader}.json"


def is_ready(profile: Path, reader: str = "client") -> bool:
    """Whether that file has been written to its end."""
    path = connection_file(profile, reader)
    return path.exists() and path.read_text().rstrip().endswith("}")


def own_loopback(cluster_id: str) -> list[str]:
    """Addresses that only this machine reaches, the first one different for each cluster."""
    # Linux gives the whole of 127.0.0.0/8 to the loopback, macOS the first address only.
    return ["127." + ".".join(str(1 + int(cluster_id[i : i + 2], 16) % 254) for i in (0, 2, 4)), "127.0.0.1"]


def _free_ports(addresses: list[str]) -> tuple[str, list[int]]:
    """The first of the addresses that can be listened at, and ports that are free there."""
    for address in addresses:
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            sockets = [held.enter_context(socket.socket()) for _ in range(_PORTS)]
            for each in sockets:
                each.bind((address, 0))
            return address, [each.getsockname()[1] for each in sockets]
    raise OSError(f"no free ports at {', '.join(addresses)}")
