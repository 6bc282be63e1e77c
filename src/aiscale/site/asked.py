"""What the Slurm of this machine says of its QOS, partitions, accounts and nodes.

    rules = ask("m1234")  # None where no Slurm answers, as on a laptop
    rules.qos["gpu_regular"].max_hours

What Slurm does not print is unknown: the profile's numbers never stand in for it on the machine.
"""

from __future__ import annotations

import getpass
import math
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field

from aiscale.site.sbatch import hours_of

LIMIT_S = 60  #: for one program
_QOS = "show qos format=Name,UsageFactor,MaxWall,MaxTRES,MinTRES"
_DEFAULT_QOS = "show assoc user={user} format=Account,DefaultQOS"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The limits of one job in a QOS or a partition."""

    name: str  #: in words, such as "QOS gpu_debug"
    command: str  #: that printed it
    max_hours: float = math.inf
    max_nodes: float = math.inf
    max_gpus: float = math.inf
    min_nodes: int = 0
    min_gpus: int = 0
    usage_factor: float = 1.0  #: what a job is charged, over the usual charge
    qos: str = ""  #: a partition's own QOS, whose limits hold, too


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Empty tables: that program does not answer, so that nothing is known of it."""

    partitions: Mapping[str, Rule]
    qos: Mapping[str, Rule] = field(default_factory=dict)
    default_partition: str = ""
    default_qos: Mapping[str, str] = field(default_factory=dict)  #: by account, which is lower-case
    accounts: tuple[str, ...] = ()  #: of this user
    nodes: tuple[tuple[frozenset[str], float], ...] = ()  #: (features, GB of memory)

    def node_gb(self, constraint: str) -> float | None:
        """The least memory of a node that has the features of --constraint; None: unknown."""
        wanted = set(filter(None, re.split(r"[&,]", constraint)))
        return min((gb for features, gb in self.nodes if wanted <= features), default=None)


def ask() -> Rules | None:
    """What Slurm says here; None where none answers."""
    partitions = _said("scontrol --oneliner show partition")
    if not partitions:
        return None
    found = {}
    default = ""
    for line in partitions:
        values = dict(word.partition("=")[::2] for word in line.split())
        rule = _partition(values)
        found[values["PartitionName"]] = rule
        if values.get("Default") == "YES":
            default = values["PartitionName"]
    user = getpass.getuser()
    assoc = _table("sacctmgr --noheader --parsable2 " + _DEFAULT_QOS.format(user=user))
    share = _table(f"sshare --noheader --parsable2 --users={user} --format=Account,User")
    return Rules(
        partitions=found,
        default_partition=default,
        qos={row[0]: _qos(*row) for row in _table(f"sacctmgr --noheader --parsable2 {_QOS}")},
        default_qos={account.lower(): qos for account, qos in assoc if qos},
        accounts=tuple(account.strip().lower() for account, who in share if who == user),
        nodes=tuple(map(_node, _table("sinfo --noheader --Node --format=%f|%m"))),
    )


def _qos(name: str, factor: str, wall: str, most: str, least: str) -> Rule:
    # MaxTRES: cpu=64,gres/gpu=8,node=2
    most, least = (dict(re.findall(r"([\w/]+)=(\d+)", text)) for text in (most, least))
    return Rule(
        name=f"QOS {name}",
        command="sacctmgr show qos",
        usage_factor=float(factor or 1),
        max_hours=_hours(wall),
        max_nodes=float(most.get("node", math.inf)),
        max_gpus=float(most.get("gres/gpu", math.inf)),
        min_nodes=int(least.get("node", 0)),
        min_gpus=int(least.get("gres/gpu", 0)),
    )


def _partition(values: Mapping[str, str]) -> Rule:
    most = values.get("MaxNodes", "UNLIMITED")
    qos = values.get("QoS", "N/A")
    return Rule(
        name=f"partition {values['PartitionName']}",
        command="scontrol show partition",
        max_hours=_hours(values.get("MaxTime", "")),
        max_nodes=float(most) if most.isdigit() else math.inf,
        min_nodes=int(values.get("MinNodes", 0)),
        qos="" if qos == "N/A" else qos,
    )


def _node(row: list[str]) -> tuple[frozenset[str], float]:
    features, mib = row
    return frozenset(features.split(",")), int(mib.rstrip("+")) * 2**20 / 1e9


def _hours(text: str) -> float:
    return math.inf if text in ("", "UNLIMITED", "INFINITE") else hours_of(text)


def _table(command: str) -> list[list[str]]:
    return [line.split("|") for line in _said(command)]


def _said(command: str) -> list[str]:
    """The lines that a program prints; none where it is not here, or fails."""
    try:
        done = subprocess.run(
            command.split(), capture_output=True, text=True, timeout=LIMIT_S, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []
