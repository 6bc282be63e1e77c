"""The dataclasses of a site profile, their cross-checks, and the reader of its .toml file.

The file's tables have the names of the classes' fields, documented here.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import math
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from aiscale.errors import ConfigError, hint
from aiscale.plan.config.run import build

_HERE = Path(__file__).parent

#: Slurm's states of a job that has ended (`man squeue`, job state codes). All others pass:
#: SIGNALING, RESIZING, ...
ENDED = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL"),
    *("OUT_OF_MEMORY", "PREEMPTED", "RECONFIG_FAIL", "REVOKED", "TIMEOUT"),
)


class SiteError(ConfigError):
    """A site profile cannot be used; the message is one line that says what to change."""


@dataclass(frozen=True, kw_only=True)
class GpuKind:
    """Nodes with a given GPU memory, and the constraint that asks for them."""

    memory_gb: float  #: of one GPU, as its name says: 40, 64, 80; torch reports some per cent more
    constraint: str = ""  #: for --constraint; empty if none is needed
    machine: str = ""  #: its name in aiscale.plan.machines, if it is another than the site's
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class SiteNode:
    gpus: int  #: as torch counts them (a GCD, a tile), one rank each; 0: no GPU
    gpu: str = ""  #: what one of them is, in words
    ranks: int = 0  #: ranks per node; 0: one per GPU
    cores: int  #: that a job may use
    cpus_per_rank: int  #: for --cpus-per-task, in the scheduler's unit (cores, or hardware threads)
    kinds: tuple[GpuKind, ...] = ()  #: least memory first
    source: str = ""

    @property
    def ranks_per_node(self) -> int:
        return self.ranks or self.gpus or 1

    @property
    def threads_per_rank(self) -> int:
        """For OMP_NUM_THREADS: the cores of one rank."""
        return max(1, self.cores // self.ranks_per_node)


@dataclass(frozen=True, kw_only=True)
class Cpus:
    """Nodes without GPUs, where jobs share nodes: for ranks on CPUs."""

    #: `ranks` have room on it; 0: there are none
    node: SiteNode = SiteNode(gpus=0, cores=0, cpus_per_rank=0)
    #: asks for them, as qos and the constraint of node.kinds do; empty: the site's usual one
    partition: str = ""
    qos: str = ""
    sbatch: tuple[str, ...] = ()  #: more #SBATCH options
    charge_unit: str = "node-hours"
    charge_per_node_hour: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Limit:
    """The longest time limit of a job, by its size."""

    max_nodes: int  #: this entry is for jobs of up to this size, but larger than the entry before
    max_hours: float


@dataclass(frozen=True, kw_only=True)
class Partition:
    """The limits of a --partition."""

    limits: tuple[Limit, ...]  #: smallest jobs first
    #: the most of a node that a job gets where jobs share nodes; 0: they have whole ones
    share: float = 0.0
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Qos:
    """The limits of a --qos."""

    max_nodes: int = 0  #: of one job; 0: only the partition's limit
    max_hours: float = 0.0  #: 0: only the partition's limit
    min_hours: float = 0.0  #: a job must ask for so much at least
    max_jobs: int = 0  #: of a user, in any state; 0: no limit
    share: float = 0.0  #: as of a partition
    may_chain: bool = True  #: jobs may submit or requeue the next one
    preemptible: bool = False  #: the scheduler may end a job for another one
    charge: float = 1.0  #: what a job is charged, over the usual charge
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class Scheduler:
    """The rules by which the site's Slurm accepts a job."""

    account_example: str
    account_pattern: str = ".+"  #: a regular expression that matches accounts which may use GPUs
    account_hint: str = "your project"  #: what to enter as the account
    account_suffix: str = ""  #: of accounts for GPU nodes; may be left out of an account's name
    #: in a job on GPU nodes, the QOS is called so and by its name: gpu_debug for -q debug
    qos_prefix: str = ""
    charge_unit: str = "node-hours"  #: in which the site counts
    charge_per_node_hour: float = 1.0  #: charge_unit for a node and an hour
    default_partition: str = ""
    default_qos: str = ""
    max_jobs: int = 0  #: of a user, queued or running; 0: no limit
    required: tuple[str, ...] = ("account", "time")  #: a job without these options is refused
    #: valid --constraint names, and what each is
    features: Mapping[str, str] = field(default_factory=dict)
    partitions: Mapping[str, Partition] = field(default_factory=dict)
    qos: Mapping[str, Qos] = field(default_factory=dict)

    def qos_of(self, name: str) -> Qos | None:
        """The QOS of that name, with or without the prefix that jobs see; None if it is unknown."""
        return self.qos.get(name.removeprefix(self.qos_prefix) or self.default_qos)

    def charge(self, nodes: float, hours: float, qos: str = "") -> float:
        """What a job is charged, in `charge_unit`."""
        return nodes * hours * self.charge_per_node_hour * self.factor(qos)

    def factor(self, qos: str = "") -> float:
        """What a job in that QOS is charged, over the usual charge."""
        entry = self.qos_of(qos)
        return entry.charge if entry else 1.0

    def unknown(self, partition: str = "", qos: str = "") -> str:
        """A partition or QOS of which the profile knows nothing, in words; empty: it knows them."""
        if partition and partition not in self.partitions:
            return f"partition {partition}"
        if qos and self.qos_of(qos) is None:
            return f"QOS {qos}"
        return ""

    def hours_for(self, nodes: int, partition: str = "", qos: str = "") -> float | None:
        """The longest time limit of a job of `nodes` nodes, in partition and QOS: infinite if it is
        unknown, None if the job is too large."""
        if self.unknown(partition, qos):
            return math.inf
        hours = [math.inf]
        if entry := self.partitions.get(partition or self.default_partition):
            longest = next(
                (limit.max_hours for limit in entry.limits if nodes <= limit.max_nodes), None
            )
            if longest is None:
                return None
            hours.append(longest)
        if entry := self.qos_of(qos):
            if entry.max_nodes and nodes > entry.max_nodes:
                return None
            hours += [entry.max_hours] if entry.max_hours else []
        return min(hours)


@dataclass(frozen=True, kw_only=True)
class Shell:
    """Pieces of bash for launchers, each with its reasons and sources as comments."""

    modules: str = ""  #: what the site's software stack needs, before an environment is active
    #: puts the environment on PATH, sets the words that start a container (`container`), and ends
    #: where there is no Python
    activate: str = """
export PATH="$ENVIRONMENT/bin:$PATH" PYTHONNOUSERSITE=1 PYTHONUNBUFFERED=1
ls "$ENVIRONMENT/bin/python" > /dev/null
"""
    unpack: str = ""  #: a folder on each node's own disk, for an environment that is one .tar.gz
    unpack_constraint: str = ""  #: for --constraint, if that folder is only there on request
    network: str = ""  #: variables of NCCL, RCCL and libfabric
    master: str = ""  #: sets MASTER_ADDR
    #: where libraries may write code that they load later, below $caches, this user's own folder
    caches: str = 'export TORCHINDUCTOR_CACHE_DIR="$caches/inductor"'
    one_node: str = ""  #: a command before a step on one node, inside a job of several
    many_nodes: str = ""  #: a command before a step on several nodes


@dataclass(frozen=True, kw_only=True)
class Build:
    """How the site's environment is built, in pieces of bash.

    They may read $PREFIX (its folder), $WHEELHOUSE (of wheels, if any) and $MODE: build, download
    (only fill $WHEELHOUSE) or offline (only from $WHEELHOUSE).
    """

    python: str = ""  #: version
    torch: str = ""  #: version, also in the site's requirements.lock
    torch_index: str = ""  #: the address of its package index; empty: a module has torch
    #: a Python expression that is true for the right build of torch (imported)
    torch_check: str = "True"
    where: str = ""  #: a good place for the environment, in a sentence
    modules: str = ""  #: modules to load
    create: str = ""  #: makes $PREFIX/bin/python
    before_mpi: str = ""  #: before mpi4py is compiled
    mpicc: str = "mpicc"  #: the compiler of the site's MPI
    pack: str = ""  #: makes $PREFIX.tar.gz, for nodes to unpack; empty: not needed


@dataclass(frozen=True, kw_only=True)
class Site:
    """A computing centre's machine, as its documentation described it on one day."""

    name: str  #: the folder of its launchers
    title: str
    read: datetime.date  #: when the sources were read
    sources: Mapping[str, str]  #: key -> source; rules and comments name the keys
    machine: str = ""  #: its name in aiscale.plan.machines, if it is there
    #: environment variables that identify the site
    marks: Mapping[str, str] = field(default_factory=dict)
    node: SiteNode
    scheduler: Scheduler
    partition: str = ""  #: for launchers; empty: the site's default
    qos: str = ""  #: for launchers; empty: the site's default
    sbatch: tuple[str, ...] = ()  #: more #SBATCH options, as --option=value  # why
    srun: str  #: options of a step with one rank per GPU
    #: LOCAL_RANK of scripts written for torchrun, which take it for their GPU
    local_rank: str = "$SLURM_LOCALID"
    #: variables of each rank that srun would overwrite
    rank_env: Mapping[str, str] = field(default_factory=dict)
    #: for what needs no GPU; without them it gets a whole node
    cpus: Cpus = field(default_factory=Cpus)
    submit: str = "aiscale submit"  #: what submits a launcher
    environment: str = ""  #: the default of ENVIRONMENT in launchers
    environment_hint: str = ""  #: alternatives to it
    #: where RUNS lies, and how long files stay there
    runs_hint: str = "results; all nodes must see it"
    pbs: tuple[str, ...] = ()  #: #PBS options of a site without Slurm, whose `srun` has mpiexec's
    shell: Shell = field(default_factory=Shell)
    build: Build = field(default_factory=Build)

    def on_cpus(self) -> Site:
        """This site's nodes without GPUs."""
        cpus, rules = self.cpus, self.scheduler
        changed = {
            "charge_unit": cpus.charge_unit,
            "charge_per_node_hour": cpus.charge_per_node_hour,
        }
        changed["account_example"] = rules.account_example.removesuffix(rules.account_suffix)
        return dataclasses.replace(
            self,
            node=cpus.node,
            scheduler=dataclasses.replace(rules, **changed),
            partition=cpus.partition or self.partition,
            qos=cpus.qos or self.qos,
            sbatch=cpus.sbatch,
            srun=f"--cpus-per-task={cpus.node.cpus_per_rank}",
            rank_env={},
        )

    def share_of(self, cpus: int, partition: str = "", qos: str = "") -> float:
        """The share of a node that a job pays for, which has so many of its CPUs; 0: all."""
        whole = self.node.cpus_per_rank * self.node.ranks_per_node
        return min(1.0, cpus / whole) if cpus and self._shares(partition, qos) else 1.0

    def _shares(self, partition: str, qos: str) -> float:
        """The most of a node that a job gets where jobs share nodes; 0: they have whole ones."""
        rules = self.scheduler
        places = rules.partitions.get(partition or rules.default_partition), rules.qos_of(qos)
        return max(place.share if place else 0.0 for place in places)

    def part(self, ranks: int) -> Site:
        """With a part of a node for a few ranks, where partition or QOS shares nodes."""
        rules, node, each = self.scheduler, self.node, self.node.ranks_per_node
        if ranks >= each or ranks > self._shares(self.partition, self.qos) * each:
            return self
        cut = {
            "ranks": ranks,
            "gpus": min(node.gpus, ranks),
            "cores": max(1, node.cores * ranks // each),
        }
        cpus = f"--cpus-per-task={node.cpus_per_rank}"
        whole = [line for line in self.sbatch if not line.startswith("--cpus-per-task")]
        gpus = f" --gpus-per-node={ranks}" if node.gpus else ""
        return dataclasses.replace(
            self,
            node=dataclasses.replace(node, **cut),
            scheduler=dataclasses.replace(
                rules, charge_per_node_hour=rules.charge_per_node_hour * ranks / each
            ),
            sbatch=(*whole, f"{cpus}  # others have the rest of the node"),
            srun=cpus + gpus,
            rank_env={},  # it numbers all GPUs of a node
        )

    def step_prefix(self, nodes: int) -> list[str]:
        """Words before a step's command that give its ranks what a launcher would export."""
        shell, variables = self.shell, [f"{name}={value}" for name, value in self.rank_env.items()]
        lines = [shell.network, shell.many_nodes if nodes > 1 else shell.one_node]
        script = "\n".join(line.strip() for line in lines if line.strip())
        words = ["bash", "-c", f'{script}\nexec "$@"', "rank"] if script else []
        return words + (["env", *variables] if variables else [])

    def __post_init__(self) -> None:
        rules = self.scheduler
        settings = {
            "partitions": self.partition or rules.default_partition,
            "qos": self.qos or rules.default_qos,
        }
        for table, value in settings.items():
            kind, valid = table.removesuffix("s" * (table != "qos")), getattr(rules, table)
            if value and value not in valid:
                raise SiteError(
                    f"{kind} {value} is not among scheduler.{kind}: add [scheduler.{table}.{value}]"
                )
        named = {
            word for kind in self.node.kinds for word in re.split(r"[&|]", kind.constraint) if word
        }
        if unknown := sorted(named - set(rules.features)):
            raise SiteError(
                f"node.kinds names the constraint {unknown[0]}, "
                "which scheduler.features lacks: add it"
            )


def names() -> list[str]:
    return sorted(path.stem for path in _HERE.glob("*.toml"))


@functools.cache
def site(name: str) -> Site:
    """The shipped profile of that name; raises SiteError and names the nearest if there is none."""
    if name not in names():
        raise SiteError(f"unknown site {name!r}: {hint(name, names())}")
    return load(_HERE / f"{name}.toml")


def here() -> Site | None:
    """The profile that AISCALE_SITE names, or whose marks are all in the environment, or None."""
    if name := os.environ.get("AISCALE_SITE"):
        return find(name)
    shipped = map(site, names())
    return next(
        (one for one in shipped if one.marks and one.marks.items() <= os.environ.items()), None
    )


def find(text: str) -> Site:
    """The shipped profile of that name, or the one in that .toml file."""
    return load(text) if text.endswith(".toml") else site(text)


def load(path: str | Path) -> Site:
    """The profile in a file; raises SiteError with one line that says what is wrong with it."""
    try:
        return build(Site, tomllib.loads(Path(path).read_text()))
    except OSError as error:
        raise SiteError(
            f"site profile {path}: {(error.strerror or str(error)).lower()}; to copy: {_HERE}"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SiteError(f"site profile {path} is not TOML: {error}") from None
    except ConfigError as error:
        raise SiteError(f"site profile {path}: {error}") from None
