"""Renders the files that a rehearsal's daemons read, such as slurm.conf, from a site's profile.

    Settings(site=site("frontier"), nodes=4, folder=Path("/var/tmp/x")).write()

The rules for accepting jobs come from the profile (aiscale.site.profiles); here is only what no
launcher has to know, such as how the site's Slurm shows GPUs to a task.
"""

from __future__ import annotations

import functools
import json
import os
import pwd
import re
import shutil
import string
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path

from aiscale.errors import ConfigError
from aiscale.site.profiles import Site

LOGIN = "10.77.0.254"
MAX_NODES = 64


@dataclass(frozen=True, kw_only=True)
class Habits:
    """What a site's Slurm does to tasks, beyond the rules in its profile."""

    gpu_flag: str = "nvidia_gpu_env"  #: gres.conf: which vendor's variables name a task's GPUs
    closest: tuple[int, ...] = ()  #: --gpu-bind=closest: the GPU of each local rank
    nvme: str = ""  #: the folder on each node for jobs with the constraint nvme


HABITS = {
    "frontier": Habits(gpu_flag="amd_gpu_env", closest=(4, 5, 2, 3, 6, 7, 0, 1), nvme="/mnt/bb"),
    "lumi": Habits(gpu_flag="amd_gpu_env"),
    "odo": Habits(gpu_flag="amd_gpu_env", closest=(4, 5, 2, 3, 6, 7, 0, 1)),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One rehearsal: the site, the number of nodes, and the folder for its files."""

    site: Site
    nodes: int
    folder: Path
    accounts: tuple[str, ...] = ()  #: besides the profile's example

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= MAX_NODES:
            raise RehearsalError(
                f"--nodes is {self.nodes}: a rehearsal has 1 to {MAX_NODES} virtual nodes"
            )
        rules = self.site.scheduler
        for account in self.accounts:
            if not re.fullmatch(rules.account_pattern, account):
                hint = f" ({rules.account_hint})" if rules.account_hint else ""
                raise RehearsalError(
                    f"--account {account}: {self.site.title} has no such account for GPUs{hint}; "
                    f"one looks like {rules.account_example}"
                )

    @property
    def habits(self) -> Habits:
        return HABITS.get(self.site.name, Habits())

    @property
    def names(self) -> list[str]:
        return [f"node{i}" for i in range(1, self.nodes + 1)]

    @property
    def valid_accounts(self) -> list[str]:
        """Every account that jobs may name, with the suffix that may be left out and without it."""
        rules = self.site.scheduler
        names = [name.lower() for name in (rules.account_example, *self.accounts)]
        return list(
            dict.fromkeys([*names, *(name.removesuffix(rules.account_suffix) for name in names)])
        )

    def write(self) -> None:
        etc = self.folder / "etc"
        for name in ("etc", "state", "log", "munge", "spool", "dev", "shims"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(self.site.node.gpus):
            (self.folder / "dev" / f"gpu{number}").touch()
        hosts = ["127.0.0.1 localhost", f"{LOGIN} login"]
        hosts += [f"{address(i)} {name}" for i, name in enumerate(self.names, 1)]
        (etc / "hosts").write_text("\n".join(hosts) + "\n")
        # torch's store looks up ::ffff:10.77.0.x, which is in no file: with DNS each rank would
        # wait 10 s
        (etc / "nsswitch.conf").write_text(
            "passwd: files\ngroup: files\nshadow: files\nhosts: files\n"
        )
        (etc / "slurm.conf").write_text(self._slurm_conf())
        (etc / "plugstack.conf").write_text("")
        (etc / "gres.conf").write_text(self._gres_conf())
        (etc / "job_submit.lua").write_text(
            f"local site = {_lua(self._rules())}\n\n" + _template("job_submit.lua")
        )
        for name, rows in self._tables().items():
            (etc / name).write_text("".join(f"{'|'.join(row)}\n" for row in rows))
        self._write_scripts(etc)

    def _tables(self) -> dict[str, list[tuple[str, ...]]]:
        """{file: rows} that sacctmgr and sshare print, by the profile; each file may be edited."""
        rules, user = self.site.scheduler, user_name()
        qos = [("Name", "UsageFactor", "MaxWall", "MaxTRES", "MinTRES")]
        for name, each in rules.qos.items():
            minutes = round(each.max_hours * 60)
            wall = f"{minutes // 1440}-{minutes // 60 % 24:02}:{minutes % 60:02}:00"
            most = f"node={each.max_nodes}" if each.max_nodes else ""
            row = (f"{each.charge:.6f}", wall if minutes else "", most, "")
            # for jobs on GPU nodes and for those on others
            names = dict.fromkeys([rules.qos_prefix + name, name])
            qos += [(shown, *row) for shown in names]
        accounts = self.valid_accounts
        assoc = [(account, rules.default_qos) for account in accounts]
        share = [(account, user) for account in accounts]
        return {
            "qos": qos,
            "assoc": [("Account", "DefaultQOS"), *assoc],
            "share": [("Account", "User"), *share],
        }

    def _slurm_conf(self) -> str:
        node = self.site.node
        threads = max(1, round(node.cpus_per_rank * node.ranks_per_node / node.cores))
        lines = [
            f"NodeName={name} NodeHostname={name} NodeAddr={address(i)} Port=17000"
            for i, name in enumerate(self.names, 1)
        ]
        partitions = self.site.scheduler.partitions
        longest = {
            name: max(limit.max_hours for limit in each.limits) for name, each in partitions.items()
        }
        longest = longest or {"nodes": 48.0}
        first = self.site.partition or self.site.scheduler.default_partition or next(iter(longest))
        every = ",".join(self.names)
        for name, hours in longest.items():
            default = "YES" if name == first else "NO"
            lines.append(
                f"PartitionName={name} Nodes={every} Default={default} MaxTime={round(hours * 60)}"
            )
        # preemptible jobs go here; see job_submit.lua
        lines.append(
            f"PartitionName=preemptible Nodes={every} Hidden=YES PriorityTier=1 "
            "PreemptMode=REQUEUE GraceTime=3"
        )
        gres = f" Gres=gpu:{node.gpus}" if node.gpus else ""
        features = sorted(self.site.scheduler.features)  # every virtual node has all of them
        feature = f" Feature={','.join(features)}" if features else ""
        return string.Template(_template("slurm.conf")).substitute(
            site=self.site.title,
            folder=self.folder,
            login=LOGIN,
            user=user_name(),
            node=f"CPUs={node.cores * threads} Sockets=1 CoresPerSocket={node.cores}"
            f" ThreadsPerCore={threads} RealMemory=512000{gres}{feature}",
            nodes_and_partitions="\n".join(lines),
        )

    def _gres_conf(self) -> str:
        gpus = self.site.node.gpus
        if not gpus:
            return ""
        devices = f"{self.folder}/dev/gpu[0-{gpus - 1}]" if gpus > 1 else f"{self.folder}/dev/gpu0"
        names = ",".join(self.names)
        return f"NodeName={names} Name=gpu File={devices} Flags={self.habits.gpu_flag}\n"

    def _rules(self) -> dict:
        """The profile's rules under its own field names, for job_submit.lua."""
        rules = self.site.scheduler
        return {
            **vars(rules),
            "accounts": dict.fromkeys(self.valid_accounts, True),
            "required": {name: True for name in rules.required},
        }

    def _write_scripts(self, etc: Path) -> None:
        values = {
            "folder": str(self.folder),
            "nvme": self.habits.nvme,
            "closest": " ".join(map(str, self.habits.closest)),
        }
        for name in (
            "prolog.sh",
            "epilog.sh",
            "ended.sh",
            "task_prolog.sh",
            "bash_env.sh",
            "shim.sh",
        ):
            text = _template(name)
            for key, value in values.items():  # as @key@, since shell scripts use $
                text = text.replace(f"@{key}@", value)
            (etc / name).write_text(text)
            (etc / name).chmod(0o755)
        for name in SHIMS:
            (self.folder / "shims" / name).symlink_to("../etc/shim.sh")


#: Programs of a site that are replaced or wrapped here: each call is recorded.
SHIMS = (
    "srun",
    "sbcast",
    "sacctmgr",
    "sshare",
    "lfs",
    "shifter",
    "singularity",
    "apptainer",
    "podman-hpc",
    "conda-unpack",
    "pigz",
)


def address(i: int) -> str:
    """The address of node i, from 1."""
    return f"10.77.0.{i}"


def user_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        raise RehearsalError(
            f"user {os.geteuid()} has no name in /etc/passwd, which Slurm asks for"
        ) from None


def _template(name: str) -> str:
    return (Path(__file__).parent / "templates" / name).read_text()


def _lua(value: object) -> str:
    if is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        return (
            "{" + ", ".join(f"[{_lua(key)}] = {_lua(entry)}" for key, entry in value.items()) + "}"
        )
    if isinstance(value, (list, tuple)):
        return "{" + ", ".join(map(_lua, value)) + "}"
    return json.dumps(value, ensure_ascii=False)  # Lua writes \\u otherwise


# What this machine must have ---------------------------------------------------------------------


#: Daemons and network tools are in folders that are not on an ordinary user's PATH.
SYSTEM_PATH = "/usr/local/sbin:/usr/sbin:/sbin"

_PROGRAMS = "slurmctld slurmd munged srun sbatch ip unshare nsenter setpriv mount hostname".split()
_REMEDY = "sudo apt-get install slurm-wlm munge iproute2"

#: Namespaces of a rehearsal: network, mounts, hostname, processes.
NAMESPACES = [
    "--net",
    "--mount",
    "--uts",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
    "--propagation=private",
]


class RehearsalError(ConfigError):
    """A rehearsal is impossible here; the message is one line that says what to change."""


def search_path() -> str:
    return f"{os.environ.get('PATH', os.defpath)}:{SYSTEM_PATH}"


def unshare() -> list[str]:
    """The command that runs another one in new namespaces."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-current-user", "--keep-caps"]
    return ["unshare", *user, *NAMESPACES]


@functools.cache
def why_not() -> str:
    """Why this machine cannot rehearse, in one line with the remedy; empty if it can."""
    for program in _PROGRAMS:
        if not shutil.which(program, path=search_path()):
            return f"{program} is not here: {_REMEDY}"
    env = {**os.environ, "PATH": search_path()}
    tried = subprocess.run(
        [*unshare(), "true"], capture_output=True, text=True, timeout=60, env=env
    )
    if tried.returncode == 0:
        return ""
    why = tried.stderr.strip().splitlines()[-1:] or [
        f"unshare ended with status {tried.returncode}"
    ]
    if os.geteuid() == 0:
        return (
            f"namespaces are not allowed here ({why[0]}): "
            "in a container, start it with --privileged"
        )
    return (
        f"namespaces are not allowed here ({why[0]}): rehearse as root, or "
        "sudo sysctl kernel.unprivileged_userns_clone=1 "
        "kernel.apparmor_restrict_unprivileged_userns=0"
    )
