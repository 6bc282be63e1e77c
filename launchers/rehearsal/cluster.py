"""A private Slurm cluster on this machine, as a context manager.

Everything runs in its own namespaces and ends with the context, or with this process. Nodes share
the machine's cores and files, but each has its own /tmp, in which it sees only this Python and the
folders in `share`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

import aiscale
from aiscale.site.profiles import Site, find, names
from rehearsal.settings import (
    LOGIN,
    RehearsalError,
    Settings,
    address,
    search_path,
    unshare,
    user_name,
    why_not,
)


class Cluster:
    """A private Slurm cluster; see the module. Raises RehearsalError where none can run."""

    def __init__(
        self,
        *,
        site: str | Site = "generic",
        nodes: int = 4,
        accounts: Sequence[str] = (),
        share: Sequence[str | Path] = (),
    ):
        self.nodes = nodes
        self._site = _name(site)
        # Below /var/tmp, since nodes do not see this machine's /tmp.
        self.folder = Path(tempfile.mkdtemp(prefix="aiscale-rehearsal-", dir="/var/tmp"))
        try:
            profile = site if isinstance(site, Site) else find(site)
            self.settings = Settings(
                site=profile, nodes=nodes, folder=self.folder, accounts=tuple(accounts)
            )
            # after the checks of the arguments, which hold on every machine
            if reason := why_not():
                raise RehearsalError(reason)
            self.settings.write()
            self._write_plan(share)
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        self._init: subprocess.Popen | None = None
        self._inside = 0  # pid of process 1, outside its namespace

    def _write_plan(self, share: Sequence[str | Path]) -> None:
        plan = {
            "names": self.settings.names,
            "addresses": [address(i) for i in range(1, self.nodes + 1)],
            "login": LOGIN,
            "nvme": self.settings.habits.nvme,
            "share": _below_tmp(
                [Path.cwd(), sys.prefix, sys.base_prefix, Path(aiscale.__file__).parent, *share]
            ),
        }
        (self.folder / "plan.json").write_text(json.dumps(plan))

    def __enter__(self) -> Cluster:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> Cluster:
        self._init = subprocess.Popen(
            [*unshare(), sys.executable, Path(__file__).with_name("init.py"), self.folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self._env(),
            cwd="/",
            # a terminal's Ctrl-C ends the command; the cluster ends after it
            start_new_session=True,
        )
        try:
            if (answer := self._init.stdout.readline()) != "\n":
                why = answer.strip() or "its first process has ended"
                raise RehearsalError(f"the rehearsal could not start: {why}")
            (child,) = psutil.Process(self._init.pid).children()
            self._inside = child.pid
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End every process of the rehearsal and remove its files; returns when they are gone."""
        if self._init:
            self._init.stdin.close()
            try:
                self._init.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self._init.kill()  # --kill-child: its child, and so the namespaces, end too
                self._init.wait()
            self._init.stdout.close()
            self._init = None
        shutil.rmtree(self.folder, ignore_errors=True)

    def login(
        self,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path = "",
        **options,
    ) -> subprocess.CompletedProcess:
        """Run a command as on the cluster's login node; `options` are subprocess.run's.
        Output is text."""
        enter = ["nsenter", f"--target={self._inside}", "--net", "--mount", "--uts", "--pid"]
        if os.geteuid() != 0:
            enter += ["--user", "--preserve-credentials"]
        # nsenter forks: without setpriv the command would outlive a timeout. It enters the mount
        # namespace at /: cd.
        words = [
            "setpriv",
            "--pdeathsig=KILL",
            "sh",
            "-c",
            'cd -- "$0" && exec "$@"',
            str(cwd or Path.cwd()),
        ]
        words += map(str, command)
        return subprocess.run(
            [*enter, "--", *words], env={**self._env(), **(env or {})}, **{"text": True, **options}
        )

    def _env(self) -> dict[str, str]:
        """A login shell's environment: no variables of an outer job, the site's programs first."""
        kept = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("SLURM_", "SBATCH_", "PMI"))
        }
        # this process has been a rank, and chose the card for itself
        if kept.pop("AISCALE_GLOO_INSIDE", ""):
            kept.pop("GLOO_SOCKET_IFNAME", "")
        return {
            **kept,
            "SLURM_CONF": str(self.folder / "etc/slurm.conf"),
            "BASH_ENV": str(self.folder / "etc/bash_env.sh"),
            "PATH": f"{self.folder}/shims:{Path(sys.executable).parent}:{search_path()}",
            "USER": user_name(),
            **({"AISCALE_SITE": self._site} if self._site else {}),
        }


def _name(wanted: str | Site) -> str:
    """The site's name, or its .toml file as an absolute path; empty for a profile in no file."""
    if isinstance(wanted, Site):
        return wanted.name if wanted.name in names() else ""
    return str(Path(wanted).absolute()) if wanted.endswith(".toml") else wanted


def _below_tmp(paths: Sequence[str | Path]) -> list[str]:
    """Paths below /tmp, which a node with its own /tmp would miss, but none below another one."""
    below = sorted({path for path in map(os.path.abspath, paths) if path.startswith("/tmp/")})
    return [
        path
        for path in below
        if not any(path.startswith(other + "/") for other in below if other != path)
    ]
