"""A launcher as Slurm will read it: its options, its size and time, and what it trains.

    job = Launcher.read(Path("launchers/frontier/ddp.sbatch"), site("frontier"), sbatch="-N 4")
    job.nodes, job.hours, job.training()

Nothing of the file is run but its block EDIT, which only sets variables.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from aiscale.errors import ConfigError
from aiscale.plan.config import Run
from aiscale.plan.options import run_of
from aiscale.site.profiles import Site
from aiscale.train.layout import misfit
from aiscale.train.options import options

#: what sbatch reads from the environment, of what is checked here
_VARIABLES = {
    "account": "SBATCH_ACCOUNT",
    "time": "SBATCH_TIMELIMIT",
    "qos": "SBATCH_QOS",
    "partition": "SBATCH_PARTITION",
    "constraint": "SBATCH_CONSTRAINT",
    "signal": "SBATCH_SIGNAL",
}
_OPTIONS = (
    *("-A --account", "-t --time", "-q --qos", "-p --partition", "-N --nodes", "-C --constraint"),
    *("-J --job-name", "-G --gpus", "--ntasks-per-node", "--cpus-per-task", "--gpus-per-node"),
    *("--gpus-per-task", "--gres", "--signal"),
)
_SBATCH = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
for _option in _OPTIONS:
    _SBATCH.add_argument(*_option.split())
_SBATCH.add_argument("--requeue", action="store_true")
_SBATCH.add_argument("--no-requeue", action="store_true")


@dataclass(frozen=True)
class Training:
    """A trainer and its options."""

    trainer: str
    args: argparse.Namespace

    @property
    def run(self) -> Run:
        """For the formulas."""
        return run_of(self.trainer, self.args)

    def misfit(self, ranks: int) -> str | None:
        """Why so many ranks cannot do it, or None."""
        return misfit(self.args, ranks)


@dataclass(frozen=True)
class Launcher:
    path: Path
    text: str
    site: Site
    options: Mapping[str, str]  #: of sbatch, as they will hold
    command: tuple[str, ...]  #: that submits it
    args: tuple[str, ...]  #: behind the file's name
    chain: int = 1  #: jobs, each of which goes on where the one before stopped

    @classmethod
    def read(
        cls,
        path: Path,
        site: Site,
        *,
        sbatch: str = "",
        args: Sequence[str] = (),
        chain: int = 1,
    ) -> Launcher:
        if chain < 1:
            raise ConfigError(f"--chain is {chain}: it is a number of jobs, so at least 1")
        text = path.read_text()
        if not text.startswith("#!"):
            raise ConfigError(f"{path} is no batch script: its first line must be #!/bin/bash")
        lines = " ".join(_sbatch_lines(path, text))
        options = sbatch_options(shlex.split(lines))
        for name, variable in _VARIABLES.items():
            if value := os.environ.get(variable):
                options[name] = value
        requeue = chain == 1 and os.environ.get("CHAIN") == "1" and "no-requeue" in options
        words = shlex.split(sbatch) + ["--requeue"] * requeue
        options |= sbatch_options(words)
        job = cls(path, text, site, options, (), tuple(args), chain)
        asked = site.shell.unpack_constraint
        packed = job.can_unpack and job.setting("ENVIRONMENT").endswith(".tar.gz")
        if packed and asked and "constraint" not in options:
            words.append(f"--constraint={asked}")
        command = ("sbatch", *words, str(path), *args)
        return replace(job, command=command)

    @property
    def nodes(self) -> int:
        return self._count("nodes", "price and layout follow from one number of nodes")

    @property
    def ranks_per_node(self) -> int:
        return self._count("ntasks-per-node", "it is the number of ranks on a node")

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def cpus(self) -> int:
        """Of a node, in Slurm's unit; 0: the file does not say."""
        if "cpus-per-task" not in self.options:
            return 0
        each = self._count("cpus-per-task", "it is the number of CPUs of a rank")
        return self.ranks_per_node * each

    @property
    def hours(self) -> float:
        return hours_of(self.options.get("time", ""))

    @property
    def signal_s(self) -> int:
        """So many seconds before the end Slurm sends the signal on which ranks save; 0: never."""
        _, at, seconds = self.options.get("signal", "").partition("@")
        if not at:
            return 60 if "signal" in self.options else 0
        return int(seconds) if seconds.isdigit() else 0  # Slurm refuses it

    @property
    def starts(self) -> int:
        """How often it may start: more than once in a chain, or where it requeues itself."""
        if "requeue" not in self.options:
            return self.chain
        restarts = os.environ.get("RESTARTS", "5")
        if not restarts.isdigit():
            raise ConfigError(f"RESTARTS is {restarts}: it must be a whole number, 0 or more")
        return self.chain + int(restarts)

    @property
    def place(self) -> Site:
        """The site, or its nodes without GPUs for a file that asks for no GPU."""
        asks = {"gpus-per-node", "gpus", "gpus-per-task", "gres"} & set(self.options)
        return self.site if asks or not self.site.cpus.node.ranks else self.site.on_cpus()

    @property
    def site_sh(self) -> Path | None:
        """What the file sources; None where it sources nothing of a site."""
        if "AISCALE_SITE_SH" not in self.text:
            return None
        named = os.environ.get("AISCALE_SITE_SH")
        return Path(named).absolute() if named else self.path.absolute().parent / "site.sh"

    @property
    def environ(self) -> dict[str, str]:
        """This environment, and where the job finds site.sh."""
        return os.environ | ({"AISCALE_SITE_SH": str(self.site_sh)} if self.site_sh else {})

    @property
    def modules(self) -> list[str]:
        there = self.site_sh and self.site_sh.is_file()
        text = self.text + (self.site_sh.read_text() if there else "")
        lines = re.findall(r"^(?!\s*#).*\bmodule load ([^;#\n]+)", text, re.M)
        return " ".join(lines).split()

    @property
    def can_unpack(self) -> bool:
        """Whether its nodes can unpack an environment onto their own disks."""
        return bool(self.site_sh and self.site.shell.unpack)

    def setting(self, name: str) -> str:
        """A variable of the block EDIT; empty if the file does not set it."""
        return self._expanded(f'"${{{name}-}}"')[0]

    def training(self) -> Training | None:
        """What it trains, or None. Ends as the trainer does on options that it does not have."""
        command = re.search(
            r"^launch python -m aiscale\.train\.(.*?)(?<!\\)$", self.text, re.M | re.S
        )
        if not command:
            return None
        words = self._expanded(command[1])
        trainer = words[0]
        return Training(trainer, options(trainer).parse_args(words[1:]))

    def _count(self, option: str, why: str) -> int:
        """The value of an option that is a whole number of at least 1, its default."""
        value = self.options.get(option, "1")
        if not value.isdigit() or int(value) < 1:
            raise ConfigError(f"--{option} is {value}: {why}, so give a whole number, 1 or more")
        return int(value)

    def _expanded(self, words: str) -> list[str]:
        """What bash makes of `words` after the block EDIT."""
        block = re.search(r"^# EDIT -+\n(.*?)^# -+$", self.text, re.M | re.S)
        script = "\n".join([block[1] if block else "", rf"printf '%s\0' {words}"])
        env = {**os.environ, "SLURM_SUBMIT_DIR": os.getcwd()}
        env["SLURM_JOB_NAME"] = self.options.get("job-name", self.path.name)
        command = ["bash", "-c", script, "bash", *self.args]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        return done.stdout.split("\0")[:-1]


def _sbatch_lines(path: Path, text: str) -> Iterator[str]:
    """What follows #SBATCH; refuses such a line where sbatch reads no more of them."""
    command = 0  # number of the first line that is one
    for number, line in enumerate(text.splitlines(), 1):
        if match := re.match(r"#SBATCH[ \t]+(.*?)(?:[ \t]+#.*)?$", line):
            if command:
                what = f"{path}, line {number}: Slurm reads no #SBATCH below the first command"
                raise ConfigError(f"{what}, which is line {command}: move it above that")
            yield match[1]
        elif line.strip() and not line.lstrip().startswith("#"):
            command = command or number


def sbatch_options(words: Iterable[str]) -> dict[str, str]:
    """{long name: value} of the options of sbatch that are checked here."""
    options, _ = _SBATCH.parse_known_args(list(words))
    return {name.replace("_", "-"): value for name, value in vars(options).items() if value}


def hours_of(time: str) -> float:
    """Minutes, MM:SS, H:MM:SS, D-H, D-H:MM or D-H:MM:SS, as sbatch reads them."""
    forms = "minutes, MM:SS, H:MM:SS or D-H:MM:SS"
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if not match:
        raise ConfigError(f"--time is {time or 'not set'}: it must be {forms}")
    days, first, second, third = (int(part) if part else None for part in match.groups())
    if days is not None:
        hours = 24 * days + first + (second or 0) / 60 + (third or 0) / 3600
    elif third is not None:
        hours = first + second / 60 + third / 3600
    else:
        hours = first / 60 + (second or 0) / 3600
    if not hours:
        raise ConfigError(f"--time is {time}, which asks Slurm for no limit at all: give {forms}")
    return hours
