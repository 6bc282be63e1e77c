"""ipyparallel's controller, through which the notebook and its engines talk: how it is started, and where it listens.

By itself it picks free ports one after the other and binds them later. Four notebooks that start at once get in each
other's way, and now and then it picks one port twice. So it is given its ports, all different, at an address of the
loopback that on Linux no other cluster uses.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from pathlib import Path

PORT_TAKEN = "Address already in use"
_PORTS = 32  #: it takes about 20


def command(profile: Path, cluster_id: str) -> list[str]:
    """The command line of the controller whose files are in the folder `profile`."""
    address, ports = _free_ports(cluster_id)
    return [
        *(sys.executable, "-m", "ipyparallel.controller", f"--profile-dir={profile}"),
        *(f"--ip={address}", f"--location={address}", f"--ports={','.join(map(str, ports))}"),
        # Threads and no database: fewer processes, and nothing is kept.
        *("--usethreads", "--nodb", "--log-level=ERROR"),
        # An engine is admitted at its first heartbeat. Missed ones mean nothing here: deaths are seen by waitpid.
        *("--HeartMonitor.period=200", "--HeartMonitor.max_heartmonitor_misses=100000"),
    ]


def connection_file(profile: Path) -> Path:
    """Where the controller writes how to reach it."""
    return profile / "security" / "ipcontroller-client.json"


def is_ready(profile: Path) -> bool:
    """Whether the connection file has been written to its end."""
    path = connection_file(profile)
    return path.exists() and path.read_text().rstrip().endswith("}")


def _free_ports(cluster_id: str) -> tuple[str, list[int]]:
    """An address and ports that are free there."""
    # Linux gives the whole of 127.0.0.0/8 to the loopback, macOS the first address only.
    own = "127." + ".".join(str(1 + int(cluster_id[i : i + 2], 16) % 254) for i in (0, 2, 4))
    for address in (own, "127.0.0.1"):
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            sockets = [held.enter_context(socket.socket()) for _ in range(_PORTS)]
            for each in sockets:
                each.bind((address, 0))
            return address, [each.getsockname()[1] for each in sockets]
    raise OSError("the loopback has no free ports")
