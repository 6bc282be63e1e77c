"""The processes of a cluster on this machine: ipyparallel's controller, and ranks started by this kernel or mpiexec.

A launcher starts `python -m aiscale.cluster` once or `size` times and says which ranks have ended and why; slurm.py
has the launchers for batch jobs. Under MPI, too, the rank that died first is named.

Sockets are private, and four notebooks can start at once: a controller that picks its own ports sometimes gives one
port twice. So we pass it the ports, all different, at a loopback address that on Linux no other cluster uses. (Ranks of
a job cannot reach that: their controller runs in the job, beside rank 0.)
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiscale.cluster.errors import ClusterError
from aiscale.cluster.job import Job

THREADS = "AISCALE_THREADS"  #: per rank of a job; unset: as many as it has cores
INLINE = "module://matplotlib_inline.backend_inline"  #: MPLBACKEND of ranks: figures go to the notebook
PORT_TAKEN = "Address already in use"
LOOPBACK = "127.0.0.1"
_PORTS = 32  #: a controller takes about 20


def spawn(command: list[str], log: Path, **how: Any) -> subprocess.Popen:
    """Start a process without input that appends its output to the file `log`."""
    with open(log, "ab") as file:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, **how)


# ---- the controller --------------------------------------------------------------------------------------------------


def controller_command(profile: Path, addresses: list[str]) -> list[str]:
    """The command line of a controller that listens at the first of `addresses` that this machine has. Its files are in
    the folder `profile`."""
    address, ports = _free_ports(addresses)
    return [
        *(sys.executable, "-m", "ipyparallel.controller", f"--profile-dir={profile}"),
        *(f"--ip={address}", f"--location={address}", f"--ports={','.join(map(str, ports))}"),
        # Threads and no database: fewer processes, and no records.
        *("--usethreads", "--nodb", "--log-level=ERROR"),
        # An engine is admitted at its first heartbeat. Missed ones mean nothing: waitpid detects dead ranks.
        *("--HeartMonitor.period=200", "--HeartMonitor.max_heartmonitor_misses=100000"),
    ]


def connection_file(profile: Path, reader: str = "client") -> Path:
    """The file in which the controller writes how a client, or an engine, reaches it."""
    return profile / "security" / f"ipcontroller-{reader}.json"


def controller_is_ready(profile: Path, reader: str = "client") -> bool:
    path = connection_file(profile, reader)
    return path.exists() and path.read_text().rstrip().endswith("}")


def own_loopback(cluster_id: str) -> list[str]:
    """Addresses that only this machine reaches; the first differs for each cluster."""
    # Linux gives the whole of 127.0.0.0/8 to the loopback, macOS the first address only.
    return ["127." + ".".join(str(1 + int(cluster_id[i : i + 2], 16) % 254) for i in (0, 2, 4)), LOOPBACK]


def _free_ports(addresses: list[str]) -> tuple[str, list[int]]:
    """The first address that can be bound, and free ports there."""
    for address in addresses:
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            sockets = [held.enter_context(socket.socket()) for _ in range(_PORTS)]
            for each in sockets:
                each.bind((address, 0))
            return address, [each.getsockname()[1] for each in sockets]
    raise OSError(f"no free ports at {', '.join(addresses)}")


# ---- the ranks -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exit:
    """The end of a rank, or (rank None) of a process that all ranks need."""

    rank: int | None
    message: str  #: "rank 2 died (signal 9)"
    log: str  #: name of the log that may say why

    @classmethod
    def of_rank(cls, rank: int, code: int) -> Exit:
        return cls(rank, f"rank {rank} {_describe(code)}", f"rank{rank}")

    @classmethod
    def of(cls, process: str, code: int, log: str) -> Exit:
        return cls(None, f"{process} {_describe(code)}", log)


def _describe(code: int) -> str:
    return f"died (signal {-code})" if code < 0 else f"ended with exit status {code}"


class LocalLauncher:
    """Ranks as processes of this machine; on Linux forked from one that has imported torch."""

    remote = False  #: whether ranks, and the controller, may be on other machines

    def __init__(self, size: int, folder: Path, options: Job) -> None:
        self.size, self.folder, self.options = size, folder, options
        self.processes: list[subprocess.Popen] = []

    @staticmethod
    def folder_for(cluster_id: str) -> Path:
        """A private folder for the files of a cluster."""
        return Path(tempfile.mkdtemp(prefix=f"aiscale-{cluster_id}-"))

    def start(self, env: Mapping[str, str]) -> None:
        ranks = [str(rank) for rank in range(self.size)]
        # Forking a process that has loaded Apple's frameworks is not safe, so there each rank is a new Python.
        groups = [",".join(ranks)] if sys.platform == "linux" else ranks
        self.processes = [self._spawn([sys.executable], env, group) for group in groups]

    def _spawn(self, prefix: list[str], env: Mapping[str, str], which: str) -> subprocess.Popen:
        command = [*prefix, "-m", "aiscale.cluster", str(self.folder), str(self.size), which]
        return spawn(command, self.folder / "launcher.log", env=env, start_new_session=True)

    def await_start(self) -> None:
        """Wait until the ranks have a place to run."""

    def keeps_job(self) -> bool:
        """End the ranks but keep their job, so that `start` may be called again; False if there is no job to keep."""
        return False

    def stop(self) -> None:
        """End what does not carry the cluster's marker."""

    def exits(self, pids: Mapping[int, int]) -> list[Exit]:
        """Ranks that have ended, first the one that caused it. `pids` maps a pid to its rank."""
        codes = [process.poll() for process in self.processes]
        if len(self.processes) == self.size:  # one process per rank
            return [Exit.of_rank(rank, code) for rank, code in enumerate(codes) if code is not None]
        record = self.folder / "exits"
        lines = record.read_text().splitlines() if record.exists() else []
        ends = [Exit.of_rank(int(rank), int(code)) for rank, code in (line.split() for line in lines)]
        if not ends and codes[0] is not None:
            return [Exit.of("the process that forked the ranks", codes[0], "launcher")]
        return ends


class MpiLauncher(LocalLauncher):
    """Ranks as MPI ranks: mpi4py's COMM_WORLD in a `%%px` cell has the same ranks."""

    def start(self, env: Mapping[str, str]) -> None:
        # Open MPI refuses more ranks than cores; MPICH ignores these variables.
        oversubscribe = {
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        }
        card = "lo0" if sys.platform == "darwin" else "lo"  # MPI would listen on all networks of this machine
        inside = {name: os.environ.get(name, card) for name in ("UCX_NET_DEVICES", "FI_TCP_IFACE")}
        prefix = [find_mpiexec(), "-n", str(self.size), sys.executable]
        self.processes = [self._spawn(prefix, {**env, **oversubscribe, **inside}, "mpi")]

    def exits(self, pids: Mapping[int, int]) -> list[Exit]:
        code = self.processes[0].poll()
        if code is None:
            return []
        text = (self.folder / "launcher.log").read_text(errors="replace")
        return [first_mpi_exit(text, pids) or Exit.of("mpiexec", code, "launcher")]


def first_mpi_exit(text: str, pids: Mapping[int, int]) -> Exit | None:
    """Which rank ended first, from the output of mpiexec (Open MPI's or MPICH's)."""
    open_mpi = re.search(r"process rank (\d+) .*exited on signal (\d+)", text)
    if open_mpi:
        return Exit.of_rank(int(open_mpi[1]), -int(open_mpi[2]))
    mpich = re.search(r"PID (\d+) RUNNING AT.*?EXIT CODE: (\d+)", text, re.DOTALL)
    if mpich and int(mpich[1]) in pids:
        by_signal = "KILLED BY SIGNAL" in text or "EXIT STRING" in text
        return Exit.of_rank(pids[int(mpich[1])], -int(mpich[2]) if by_signal else int(mpich[2]))
    return None


def find_mpiexec() -> str:
    """The mpiexec beside this Python (the mpich wheel's), else the one on PATH (a site's module)."""
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise ClusterError(
            "there is no mpiexec beside this Python or on PATH: pip install mpich, or load your site's MPI module "
            "(and start a notebook's kernel again)"
        )
    return found
