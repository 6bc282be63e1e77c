"""A private Slurm cluster on this machine, as a context manager, and the command `aiscale rehearse`.

Everything runs in its own namespaces and ends with the context, or with this process. Nodes share the machine's cores
and files, but each has its own /tmp, in which it sees only this Python and the folders in `share`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from aiscale.hpc.rehearsal.settings import (
    LOGIN,
    RehearsalError,
    Settings,
    address,
    search_path,
    unshare,
    user_name,
    why_not,
)
from aiscale.hpc.sites import Site, find, names


class Cluster:
    """A private Slurm cluster; see the module. Raises RehearsalError if this machine cannot run one."""

    def __init__(
        self,
        *,
        site: str | Site = "generic",
        nodes: int = 4,
        link: str = "",
        accounts: Sequence[str] = (),
        share: Sequence[str | Path] = (),
    ):
        self.nodes = nodes
        self._site = _name(site)
        # Below /var/tmp, since nodes do not see this machine's /tmp.
        self.folder = Path(tempfile.mkdtemp(prefix="aiscale-rehearsal-", dir="/var/tmp"))
        try:
            profile = site if isinstance(site, Site) else find(site)
            self.settings = Settings(site=profile, nodes=nodes, folder=self.folder, accounts=tuple(accounts))
            if reason := why_not():  # after the checks of the arguments, which hold on every machine
                raise RehearsalError(reason)
            self.settings.write()
            self._write_plan(link, share)
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        self._init: subprocess.Popen | None = None
        self._inside = 0  # pid of process 1, outside its namespace

    def _write_plan(self, link: str, share: Sequence[str | Path]) -> None:
        plan = {
            "names": self.settings.names,
            "addresses": [address(i) for i in range(1, self.nodes + 1)],
            "login": LOGIN,
            "link": link,
            "nvme": self.settings.habits.nvme,
            "share": _below_tmp([Path.cwd(), sys.prefix, sys.base_prefix, Path(__file__).parents[2], *share]),
        }
        (self.folder / "plan.json").write_text(json.dumps(plan))

    # up and down -----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Cluster:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> Cluster:
        command = [sys.executable, "-m", "aiscale.hpc.rehearsal.init", str(self.folder)]
        env = {**self._env(), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._init = subprocess.Popen(
            [*unshare(), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
            cwd="/",
            start_new_session=True,  # a terminal's Ctrl-C ends the command; the cluster ends after it
        )
        try:
            self._hear("the rehearsal could not start")
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

    def _hear(self, what: str) -> None:
        answer = self._init.stdout.readline()
        if answer != "\n":
            raise RehearsalError(f"{what}: {answer.strip() or 'its first process has ended'}")

    # use -------------------------------------------------------------------------------------------------------------

    def set_link(self, rate: str, node: int | None = None) -> None:
        """Send and receive at `rate`, such as 100mbit, "off" for no limit; on all nodes, or one, counted from 1."""
        if node is not None and not 1 <= node <= self.nodes:
            raise RehearsalError(f"node {node} of {self.nodes}: nodes count from 1")
        self._init.stdin.write(json.dumps({"link": rate, "node": node}) + "\n")
        self._init.stdin.flush()
        self._hear(f"the link could not be set to {rate}")

    def login(
        self, command: Sequence[str | Path], *, env: Mapping[str, str] | None = None, cwd: str | Path = "", **options
    ) -> subprocess.CompletedProcess:
        """Run a command as on the cluster's login node; `options` are subprocess.run's (output is text)."""
        enter = ["nsenter", f"--target={self._inside}", "--net", "--mount", "--uts", "--pid"]
        if os.geteuid() != 0:
            enter += ["--user", "--preserve-credentials"]
        # nsenter forks: without setpriv the command would outlive a timeout. It enters the mount namespace at /: cd.
        words = ["setpriv", "--pdeathsig=KILL", "sh", "-c", 'cd -- "$0" && exec "$@"', str(cwd or Path.cwd())]
        words += map(str, command)
        return subprocess.run([*enter, "--", *words], env={**self._env(), **(env or {})}, **{"text": True, **options})

    def _env(self) -> dict[str, str]:
        """The environment of a login shell: no variables of an outer job, the site's programs first."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SBATCH_", "PMI"))}
        if kept.pop("AISCALE_GLOO_INSIDE", ""):  # this process has been a rank, and chose the card for itself
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
    """The site's name, or its .toml file as an absolute path; empty for a profile that is in no file."""
    if isinstance(wanted, Site):
        return wanted.name if wanted.name in names() else ""
    return str(Path(wanted).absolute()) if wanted.endswith(".toml") else wanted


def _below_tmp(paths: Sequence[str | Path]) -> list[str]:
    """Paths below /tmp, which a node with its own /tmp would miss; without paths below another one."""
    found = sorted({str(Path(path).absolute()) for path in paths})
    found = [path for path in found if path.startswith("/tmp/")]
    return [path for path in found if not any(path.startswith(other + "/") for other in found if other != path)]


# The command ----------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--site",
        default="generic",
        metavar="SITE",
        help="the site to play: the name of a profile, or a .toml file (default: generic)",
    )
    parser.add_argument(
        "--nodes", type=int, default=4, metavar="N", help="how many virtual nodes to start (default: 4)"
    )
    parser.add_argument("--link", default="", metavar="RATE", help="limit the network of each node, such as to 1gbit")
    parser.add_argument(
        "--account",
        action="append",
        default=[],
        help="an account that jobs may use, besides the profile's example; may be repeated",
    )
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the command to run (default: a shell)"
    )


def run(args: argparse.Namespace) -> int:
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    with Cluster(site=args.site, nodes=args.nodes, link=args.link, accounts=args.account) as cluster:
        if command:
            return cluster.login(command).returncode
        return _shell(cluster)


def _shell(cluster) -> int:
    """A shell, in a new terminal if standard input is one: process 1 cannot share the outer terminal."""
    rules = cluster.settings.site.scheduler
    print(
        f"{cluster.nodes} nodes of {cluster.settings.site.title}, account {rules.account_example}: sinfo, sbatch, "
        f"squeue; the daemons' logs are in {cluster.folder / 'log'}; exit ends it all",
        file=sys.stderr,
    )
    bash = ["bash", "--rcfile", str(Path(cluster.folder, "etc/bash_env.sh")), "-i"]
    if not sys.stdin.isatty():
        return cluster.login(["bash"]).returncode
    return cluster.login(["script", "--quiet", "--return", "--command", shlex.join(bash), "/dev/null"]).returncode
