"""Starts ranks (`python -m aiscale.lesson.cluster`) on this machine, and says which have ended."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

from aiscale.launch import stop
from aiscale.lesson.cluster import guard
from aiscale.processes import start_python, warm_up

THREADS = "AISCALE_THREADS"  #: per rank of a job; unset: as many as it has cores
#: MPLBACKEND of ranks: figures go to the notebook
INLINE = "module://matplotlib_inline.backend_inline"
LOOPBACK, LOOPBACK_CARD = "127.0.0.1", "lo0" if sys.platform == "darwin" else "lo"
#: Modules of a rank: torch, what the first optimizer and traceback import, ipyparallel.
NEEDED = (
    "torch._dynamo",
    "aiscale.measure.distributed",
    "aiscale.lesson.cluster.engine",
    "ipyparallel.engine.app",
    "stack_data",
)
_PORTS = 32  #: a controller takes about 20


def spawn(command: list[str], log: Path, env: Mapping[str, str]) -> subprocess.Popen:
    with open(log, "ab") as file:
        files = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
        return subprocess.Popen(command, env=env, start_new_session=True, **files)


def start_controller(folder: Path, addresses: list[str], env: Mapping[str, str]) -> None:
    """Start ipyparallel's controller, at the first of `addresses` that this machine has."""
    address, ports = _free_ports(addresses)
    command = [
        *(sys.executable, "-m", "ipyparallel.controller", f"--profile-dir={folder / 'profile'}"),
        *(f"--ip={address}", f"--location={address}", f"--ports={','.join(map(str, ports))}"),
        # Threads and no database: fewer processes, and no records.
        *("--usethreads", "--nodb", "--log-level=ERROR"),
        # An engine is admitted at its first heartbeat. Missed ones mean nothing: waitpid detects
        # dead ranks.
        *("--HeartMonitor.period=200", "--HeartMonitor.max_heartmonitor_misses=100000"),
    ]
    spawn(command, folder / "controller.log", env)


def connection_file(profile: Path, reader: str = "client") -> Path:
    """The file in which the controller writes how a client, or an engine, reaches it."""
    return profile / "security" / f"ipcontroller-{reader}.json"


def controller_is_ready(profile: Path, reader: str = "client") -> bool:
    path = connection_file(profile, reader)
    return path.exists() and path.read_text().rstrip().endswith("}")


def own_loopback(cluster_id: str) -> list[str]:
    """Addresses that only this machine reaches; the first differs for each cluster."""
    # Linux gives the whole of 127.0.0.0/8 to the loopback, macOS the first address only.
    numbers = (str(1 + int(cluster_id[i : i + 2], 16) % 254) for i in (0, 2, 4))
    return ["127." + ".".join(numbers), LOOPBACK]


def _free_ports(addresses: list[str]) -> tuple[str, list[int]]:
    """The first address that can be bound, and free ports there."""
    for address in addresses:
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            sockets = [held.enter_context(socket.socket()) for _ in range(_PORTS)]
            for each in sockets:
                each.bind((address, 0))
            return address, [each.getsockname()[1] for each in sockets]
    raise OSError(f"no free ports at {', '.join(addresses)}")


class Exit(NamedTuple):
    """The end of a rank, or of a process that all ranks need."""

    message: str  #: "rank 2 died (signal 9)"
    log: str  #: name of the log that may say why

    @classmethod
    def of(cls, process: str, code: int, log: str) -> Exit:
        how = f"died (signal {-code})" if code < 0 else f"ended with exit status {code}"
        return cls(f"{process} " + how, log)


class LocalLauncher:
    """Ranks as processes of this machine, forked from one that has imported torch."""

    remote = False  #: whether ranks, and the controller, may be on other machines
    submits = False  #: whether they are in a job of their own, which had to queue

    def __init__(self, size: int, folder: Path, job: object) -> None:
        self.size, self.folder = size, folder
        self.process: subprocess.Popen | None = None  #: srun
        self._ranks: list[BaseProcess] = []

    @staticmethod
    def folder_for(cluster_id: str) -> Path:
        return Path(tempfile.mkdtemp(prefix=f"aiscale-{cluster_id}-"))

    def start(self, env: Mapping[str, str]) -> None:
        """Start the ranks; returns when they have a place to run."""
        os.environ["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"  # or the debugger warns
        warm_up(NEEDED, env)
        start_controller(self.folder, own_loopback(env[guard.MARKER]), env)
        import aiscale.measure.distributed  # noqa: F401  # for the store, at the same time

        with open(self.folder / "launcher.log", "ab") as log:
            for rank in range(self.size):
                argv = ["-m", "aiscale.lesson.cluster", str(self.folder), str(self.size), str(rank)]
                how = {"name": f"rank {rank}", "stdout": log.fileno(), "stderr": log.fileno()}
                self._ranks.append(start_python(argv, env, preload=NEEDED, **how))

    def stop(self) -> None:
        stop(self._ranks, grace_s=0)

    def exits(self) -> list[Exit]:
        """Ranks that have ended, first the one that caused it."""
        codes = [process.exitcode for process in self._ranks]
        return [
            Exit.of(f"rank {rank}", code, f"rank{rank}")
            for rank, code in enumerate(codes)
            if code is not None
        ]
