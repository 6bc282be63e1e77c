"""How engines come to be: as children of this kernel, or as MPI ranks. (Slurm's are in slurm.py.)

A launcher starts `python -m aiscale.cluster` once or `size` times and can say which ranks have ended and why.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from aiscale.cluster.errors import ClusterError
from aiscale.cluster.job import Job

THREADS = "AISCALE_THREADS"  #: of each rank of a job; unset: as many as it has cores
#: With which libraries are told how many threads to use.
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


@dataclass(frozen=True)
class Exit:
    """The end of a rank, or (rank None) of a process that all ranks need."""

    rank: int | None
    message: str  #: "rank 2 died (signal 9)"
    log: str  #: the name of the log that may say why

    @classmethod
    def of_rank(cls, rank: int, code: int) -> Exit:
        return cls(rank, f"rank {rank} {_describe(code)}", f"rank{rank}")

    @classmethod
    def of(cls, process: str, code: int, log: str) -> Exit:
        return cls(None, f"{process} {_describe(code)}", log)


class LocalLauncher:
    """Ranks as processes of this machine; on Linux forked from one that has already imported torch."""

    remote = False  #: whether ranks may be on other machines, and the controller with them
    used = False  #: whether another notebook may have left variables on the ranks

    def __init__(self, size: int, folder: Path, options: Job, files: Path | None = None) -> None:
        self.size, self.folder, self.options = size, folder, options
        self.files = files or folder  #: where the ranks' connection files and logs are
        self.processes: list[subprocess.Popen] = []

    @staticmethod
    def folder_for(cluster_id: str) -> Path:
        """A private folder for the files of a cluster."""
        return Path(tempfile.mkdtemp(prefix=f"aiscale-{cluster_id}-"))

    def start(self, env: Mapping[str, str]) -> None:
        ranks = [str(rank) for rank in range(self.size)]
        # Forking a process that has loaded Apple's frameworks is not safe, so there each rank starts from nothing.
        groups = [",".join(ranks)] if sys.platform == "linux" else ranks
        self.processes = [self._spawn([sys.executable], env, group) for group in groups]

    def _spawn(self, prefix: list[str], env: Mapping[str, str], which: str) -> subprocess.Popen:
        command = [*prefix, "-m", "aiscale.cluster", str(self.folder), str(self.size), which]
        with open(self.folder / "launcher.log", "ab") as log:
            return subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def await_start(self) -> None:
        """Return when ranks have been given a place to run."""

    def keeps_job(self) -> bool:
        """End the ranks, so that `start` may be called again; False if nothing can be kept for that."""
        return False

    def stop(self, useless: bool) -> None:
        """End what carries no marker of the cluster. useless: its ranks can serve nobody else either."""

    def exits(self, pids: Mapping[int, int]) -> list[Exit]:
        """Ranks that have ended, the cause before its consequences. `pids` maps a pid to its rank."""
        codes = [process.poll() for process in self.processes]
        if len(self.processes) == self.size:  # one process a rank
            return [Exit.of_rank(rank, code) for rank, code in enumerate(codes) if code is not None]
        record = self.folder / "exits"
        lines = record.read_text().splitlines() if record.exists() else []
        ends = [Exit.of_rank(int(rank), int(code)) for rank, code in (line.split() for line in lines)]
        if not ends and codes[0] is not None:
            return [Exit.of("the process that forked the ranks", codes[0], "launcher")]
        return ends


class MpiLauncher(LocalLauncher):
    """Ranks as MPI ranks, so that mpi4py's COMM_WORLD in a `%%px` cell is the same world."""

    def start(self, env: Mapping[str, str]) -> None:
        # Open MPI counts cores and refuses more ranks than those; MPICH does not read these.
        oversubscribe = {
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        }
        prefix = [find_mpiexec(), "-n", str(self.size), sys.executable]
        self.processes = [self._spawn(prefix, {**env, **oversubscribe}, "mpi")]

    def exits(self, pids: Mapping[int, int]) -> list[Exit]:
        code = self.processes[0].poll()
        if code is None:
            return []
        text = (self.folder / "launcher.log").read_text(errors="replace")
        return [_mpi_exit(text, pids) or Exit.of("mpiexec", code, "launcher")]


def _mpi_exit(text: str, pids: Mapping[int, int]) -> Exit | None:
    """Which rank ended first, as mpiexec tells it."""
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
            "engines='mpi' needs mpiexec, and there is none beside this Python or on PATH: "
            "pip install mpich, or load your site's MPI module and start the kernel again"
        )
    return found


def _describe(code: int) -> str:
    """An exit status as subprocess gives it, in words."""
    if code < 0:
        return f"died (signal {-code})"
    return f"ended with exit status {code}"
