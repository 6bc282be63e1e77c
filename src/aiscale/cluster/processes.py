"""The processes of one cluster: a controller, the engines, the watchman, and the folder that holds their files.

Nothing of it is shared with another cluster or with the user's own IPython: a private folder (0700) holds profile,
connection files and logs; everything listens on the loopback only; ports are chosen by the system.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

from aiscale.cluster import controller, guard
from aiscale.cluster.errors import ClusterError
from aiscale.cluster.launchers import LAUNCHERS, Exit

_POLL_S = 0.02
_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


class PortTakenError(ClusterError):
    """Somebody else took a port between its choice and its use; a second try will do."""


class Processes:
    """Engines as operating-system processes, up to the moment at which the client sees all of them."""

    def __init__(self, size: int, launcher: str, threads: int, env: Mapping[str, str]) -> None:
        self.id = uuid.uuid4().hex[:12]
        self.folder = Path(tempfile.mkdtemp(prefix=f"aiscale-{self.id}-"))
        self.size = size
        self.client = None
        self.pids: dict[int, int] = {}  #: rank of a pid
        self._env = self._environment(threads, env)
        self._launcher = LAUNCHERS[launcher](size, self.folder)
        self._controller: subprocess.Popen | None = None
        self._watchman = self._start_watchman()

    def _environment(self, threads: int, env: Mapping[str, str]) -> dict[str, str]:
        return {
            **os.environ,
            **dict.fromkeys(_THREAD_VARIABLES, str(threads)),
            "MPLBACKEND": "module://matplotlib_inline.backend_inline",
            "IPYTHONDIR": str(self.folder / "ipython"),
            "AISCALE_LAUNCHER": "ipyparallel",
            # Left to itself gloo listens at the address of the host name, which on a login node the world can reach.
            "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
            **env,
            guard.MARKER: self.id,
        }

    def _start_watchman(self) -> subprocess.Popen:
        # Without the kernel's environment: that may carry the marker of an outer cluster, which this must outlive.
        return subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, self.id, str(self.folder)],
            env={"PATH": os.environ.get("PATH", os.defpath)},
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def start(self, timeout_s: float) -> None:
        """Bring everything up; raises ClusterError with the engines' own words when that fails or takes too long."""
        from IPython.core.profiledir import ProfileDir

        deadline = time.monotonic() + timeout_s
        ProfileDir.create_profile_dir(str(self.folder / "profile"))
        self._launcher.start(self._env)
        self._start_controller(deadline)
        self._connect(deadline)

    def _start_controller(self, deadline: float) -> None:
        with open(self.folder / "controller.log", "ab") as log:
            self._controller = subprocess.Popen(
                controller.command(self.folder / "profile", self.id),
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        import aiscale.dist  # noqa: F401  # needed soon, takes a second, and the others are not ready yet

        while not controller.is_ready(self.folder / "profile"):
            self._check_start(deadline)
            time.sleep(_POLL_S)

    def _connect(self, deadline: float) -> None:
        import ipyparallel

        profile = self.folder / "profile"
        self.client = ipyparallel.Client(
            str(controller.connection_file(profile)),
            profile_dir=str(profile),
            ipython_dir=str(self.folder / "ipython"),
            timeout=max(1.0, deadline - time.monotonic()),
        )
        while len(self.client.ids) < self.size:
            self._check_start(deadline)
            time.sleep(_POLL_S)

    def _check_start(self, deadline: float) -> None:
        if controller.PORT_TAKEN in self.log("controller", lines=1000):
            raise PortTakenError(f"the ranks did not start: {controller.PORT_TAKEN}")
        ends = self.exits()
        if ends:
            raise ClusterError(f"the ranks did not start: {ends[0].message}\n{self.log(ends[0].log, *self._rank_logs)}")
        if time.monotonic() > deadline:
            up = len(self.client.ids) if self.client else 0
            raise ClusterError(
                f"only {up} of {self.size} ranks were up in time: raise start_timeout_s, or see what they say:\n"
                + self.log("launcher", "controller", *self._rank_logs)
            )

    def exits(self) -> list[Exit]:
        """Ranks whose processes have ended, the first to end first; also the controller's end (rank None)."""
        ends = self._launcher.exits(self.pids)
        if not ends and self._controller is not None and self._controller.poll() is not None:
            return [Exit.of("ipyparallel's controller", self._controller.poll(), "controller")]
        return ends

    def signal(self, ranks: list[int], number: int) -> None:
        """Send a signal to some ranks."""
        for pid, rank in self.pids.items():
            if rank in ranks:
                try:
                    os.kill(pid, number)
                except OSError:
                    pass

    @property
    def _rank_logs(self) -> list[str]:
        return [f"rank{rank}" for rank in range(self.size)]

    def log(self, *names: str, lines: int = 20) -> str:
        """The part that matters of what these processes wrote to their standard error."""
        parts = []
        for name in dict.fromkeys(names):
            path = self.folder / f"{name}.log"
            text = path.read_text(errors="replace").strip() if path.exists() else ""
            crash = text.find("Fatal Python error")  # a crash tells the most recent call first
            shown = text[crash:].splitlines()[:lines] if crash >= 0 else text.splitlines()[-lines:]
            parts += [f"{name}: {line}" for line in shown]
        return "\n".join(parts)

    def stop(self, grace_s: float = 0.0) -> None:
        """End everything and remove the folder. With a grace, ranks are first asked politely."""
        if self.client is not None:
            self.client.close(linger=0)
        if grace_s and self.pids:
            self.signal(list(self.pids.values()), signal.SIGTERM)
            deadline = time.monotonic() + grace_s
            while time.monotonic() < deadline and len(self._launcher.exits(self.pids)) < self.size:
                time.sleep(_POLL_S)
        guard.kill_marked(self.id)
        self._watchman.stdin.close()
        for process in (*self._launcher.processes, self._controller, self._watchman):
            if process is not None:
                process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
