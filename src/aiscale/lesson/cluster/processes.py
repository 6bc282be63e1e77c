"""The processes of one cluster: engines and the cleaner (guard.py); their private folder (0700).

A start that fails or times out shows what the engines printed. Everything on this machine listens
on the loopback only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
import uuid

from aiscale.lesson.cluster import guard, local
from aiscale.lesson.cluster.errors import ClusterError
from aiscale.lesson.cluster.local import Exit, LocalLauncher
from aiscale.lesson.cluster.slurm import Job, SlurmLauncher, public
from aiscale.processes import THREAD_VARIABLES, end_server, kill_marked

LAUNCHERS = {"local": LocalLauncher, "slurm": SlurmLauncher}
_NEWS_S = 10.0  #: while ranks are missing, before connecting to the controller again


class Processes:
    def __init__(self, size: int, engines: str, threads: int, job: Job) -> None:
        kind = LAUNCHERS[engines]
        self.id = uuid.uuid4().hex[:12]
        self.folder = kind.folder_for(self.id)
        self.size = size
        #: whether ranks may be on machines that cannot reach this process
        self.remote = kind.remote
        self.client = None
        self._profile = self.folder / "profile"
        self.pids: dict[int, int] = {}  #: pid -> rank
        self._launcher = kind(size, self.folder, job)
        self.submitted = self._launcher.submits  #: whether new ranks would have to queue
        self._poll_s = 0.2 if self.remote else 0.02  # poll a shared file system less often
        self._env = self._environment(threads)
        self._watchman = self._start_watchman()

    def _environment(self, threads: int) -> dict[str, str]:
        if self.remote:
            variables = {local.THREADS: str(threads)} if threads else {}
            return {**public(os.environ, keep="SLURM_"), **variables, guard.MARKER: self.id}
        return {
            **os.environ,
            **dict.fromkeys(THREAD_VARIABLES, str(threads)),
            "MPLBACKEND": local.INLINE,
            "IPYTHONDIR": str(self.folder / "ipython"),
            "AISCALE_LAUNCHER": "ipyparallel",
            # By default gloo listens at the host name's address, which on a login node the world
            # can reach.
            "GLOO_SOCKET_IFNAME": local.LOOPBACK_CARD,
            guard.MARKER: self.id,
        }

    def _start_watchman(self) -> subprocess.Popen:
        # Without the kernel's environment: it may carry the marker of an outer cluster, which the
        # cleaner must outlive.
        return subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, self.id, str(self.folder)],
            env={name: os.environ[name] for name in ("PATH", "SLURM_CONF") if name in os.environ},
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def start(self, timeout_s: float) -> None:
        from IPython.core.profiledir import ProfileDir

        ProfileDir.create_profile_dir(str(self._profile))
        self._launcher.start(self._env)
        deadline = time.monotonic() + timeout_s  # queue time does not count
        while not local.controller_is_ready(self._profile):
            self._check_start(deadline)
            time.sleep(self._poll_s)
        self._connect(deadline)

    def _connect(self, deadline: float) -> None:
        while True:
            self._open_client(deadline)
            until = time.monotonic() + _NEWS_S
            while self._missing() and time.monotonic() < until:
                self._check_start(deadline)
                time.sleep(self._poll_s)
            if not self._missing():
                return
            # The client may miss an engine that registers while it connects; a new client sees all.
            self.client.close()
            self.client = None

    def _missing(self) -> int:
        return len(set(range(self.size)) - set(self.client.ids))

    def _open_client(self, deadline: float) -> None:
        import ipyparallel

        where = local.connection_file(self._profile)
        try:
            self.client = ipyparallel.Client(
                str(where),
                profile_dir=str(self._profile),
                ipython_dir=str(self.folder / "ipython"),
                timeout=max(1.0, deadline - time.monotonic()),
            )
        except TimeoutError:
            why = "has the job ended, or may this machine not connect to compute nodes?"
            logs = self.log("controller", "launcher")
            raise ClusterError(
                f"the controller described in {where} does not answer: {why}\n{logs}"
            ) from None

    def _check_start(self, deadline: float) -> None:
        ranks = [f"rank{rank}" for rank in range(self.size)]
        if ends := self.exits():
            logs = self.log(ends[0].log, *ranks, "launcher")
            raise ClusterError(f"the ranks did not start: {ends[0].message}\n{logs}")
        if time.monotonic() > deadline:
            up = self.size - self._missing() if self.client else 0
            late = (
                f"only {up} of {self.size} ranks were up in time: raise start_timeout_s, or see "
                "what they say"
            )
            raise ClusterError(f"{late}:\n{self.log('launcher', 'controller', *ranks)}")

    def exits(self) -> list[Exit]:
        return self._launcher.exits()

    def signal(self, ranks: list[int], number: int) -> None:
        if self.remote:
            self.client.send_signal(int(number), ranks, block=False)
            return
        for pid, rank in self.pids.items():
            if rank in ranks:
                with contextlib.suppress(OSError):
                    os.kill(pid, number)

    def log(self, *names: str, lines: int = 20) -> str:
        """The last lines of these processes' logs, or a crash report from its start."""
        parts = []
        for name in dict.fromkeys(names):
            path = self.folder / f"{name}.log"
            text = path.read_text(errors="replace").strip() if path.exists() else ""
            crash = text.find("Fatal Python error")  # a crash report has the most recent call first
            shown = text[crash:].splitlines()[:lines] if crash >= 0 else text.splitlines()[-lines:]
            parts += [f"{name}: {line}" for line in shown]
        return "\n".join(parts)

    def stop(self) -> None:
        if self.client is not None:
            self.client.close(linger=0)
        self._launcher.stop()
        kill_marked(guard.MARKER, self.id)
        end_server()
        self._watchman.stdin.close()
        for process in (self._launcher.process, self._watchman):
            if process is not None:
                process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
