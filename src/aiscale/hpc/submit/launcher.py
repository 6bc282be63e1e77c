"""What a launcher asks for, read from its text without running it.

    job = Launcher.read(Path("ddp.sbatch"), site("frontier"), sbatch="-q debug", args=["--set", "loop.steps=5"])
    job.nodes, job.hours, job.settings["ENVIRONMENT"], job.run()

The order is sbatch's: its command line before SBATCH_... of the environment before the file's own lines.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aiscale.config import ConfigError, Run
from aiscale.hpc.sites import Site
from aiscale.recipes import recipe

_SHORT = {"A": "account", "t": "time", "q": "qos", "p": "partition", "N": "nodes", "C": "constraint", "J": "job-name"}
_SHORT |= {"o": "output", "d": "dependency"}
_VARIABLES = {"account": "SBATCH_ACCOUNT", "time": "SBATCH_TIMELIMIT", "qos": "SBATCH_QOS"}
_VARIABLES |= {"partition": "SBATCH_PARTITION", "reservation": "SBATCH_RESERVATION", "constraint": "SBATCH_CONSTRAINT"}
_VARIABLE = re.compile(r"\$\{(\w+):-([^}]*)\}|\$\{(\w+)\}|\$(\w+)")


@dataclass(frozen=True)
class Launcher:
    path: Path
    text: str
    site: Site
    options: Mapping[str, str]  #: of sbatch, as they will hold
    settings: Mapping[str, str]  #: variables of the block EDIT, expanded
    args: tuple[str, ...]  #: behind the file's name

    @classmethod
    def read(cls, path: Path, site: Site, *, sbatch: str = "", args: Sequence[str] = ()) -> Launcher:
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            why = (getattr(error, "strerror", "") or str(error)).lower()
            raise ConfigError(f"{path} cannot be read: {why}") from None
        if not text.startswith("#!"):
            raise ConfigError(f"{path} is no batch script: its first line must be #!/bin/bash")
        lines = re.findall(r"^#SBATCH[ \t]+(.*?)(?:[ \t]+#.*)?$", text, re.M)
        options = parse_options(word for line in lines for word in shlex.split(line))
        options |= {name: value for name, key in _VARIABLES.items() if (value := os.environ.get(key))}
        options |= parse_options(shlex.split(sbatch))
        if os.environ.get("CHAIN") == "1" and options.pop("no-requeue", None) is not None:
            options["requeue"] = ""
        return cls(path, text, site, options, read_settings(text), tuple(args))

    @property
    def nodes(self) -> int:
        try:
            return int(self.options.get("nodes", "1").partition("-")[0])
        except ValueError:
            raise ConfigError(f"--nodes is {self.options['nodes']}: it must be a number") from None

    @property
    def ranks(self) -> int:
        return self.nodes * int(self.options.get("ntasks-per-node", "1"))

    @property
    def hours(self) -> float:
        if "time" not in self.options:
            raise ConfigError(f"{self.path} has no --time: add #SBATCH --time=00:30:00")
        return hours_of(self.options["time"])

    @property
    def starts(self) -> int:
        """How often it may start: more than once where it requeues itself."""
        chained = os.environ.get("CHAIN") == "1" and "requeue" in self.options
        return 1 + chained * int(os.environ.get("RESTARTS", "5"))

    @property
    def place(self) -> Site:
        """The site, or its nodes without GPUs for a file that asks for no GPU."""
        asks = {"gpus-per-node", "gpus", "gpus-per-task", "gres"} & set(self.options)
        return self.site if asks or not self.site.cpus.node.ranks else self.site.on_cpus()

    @property
    def modules(self) -> list[str]:
        return " ".join(re.findall(r"^(?!\s*#).*\bmodule load ([^;#\n]+)", self.text, re.M)).split()

    def run(self) -> Run | None:
        """The run that it trains, or None."""
        block = re.search(r"^run=\(\n(.*?)^\)$", self.text, re.M | re.S)
        if not block:
            return None
        known = {**os.environ, **self.settings}
        words = shlex.split(expand(block[1].replace('"$@"', ""), known), comments=True) + [*self.args]
        if "--recipe" not in words:
            return None
        name = [after for word, after in zip(words, words[1:], strict=False) if word == "--recipe"][-1]
        changed = [after for word, after in zip(words, words[1:], strict=False) if word == "--set"]
        return recipe(name).override(*changed)

    def final(self, exclude: Sequence[str] = ()) -> str:
        """The text with the options as they will hold, and without the nodes in `exclude`."""
        options = dict(self.options)
        if exclude:
            options["exclude"] = ",".join(filter(None, [options.get("exclude", ""), *exclude]))
        lines, told = [], set()
        for line in self.text.splitlines():
            if match := re.match(r"#SBATCH\s+--([\w-]+)(?:=\S+)?(.*)", line):
                name = {"no-requeue": "requeue"}.get(match[1], match[1]) if "requeue" in options else match[1]
                if name not in options or name in told:
                    continue
                told.add(name)
                line = _directive(name, options[name]) + match[2]
            lines.append(line)
        more = [_directive(name, value) for name, value in options.items() if name not in told]
        return "\n".join([lines[0], *more, *lines[1:], ""])


def _directive(name: str, value: str) -> str:
    return f"#SBATCH --{name}" + (f"={value}" if value else "")


def parse_options(words) -> dict[str, str]:
    """{long name: value} of options as sbatch takes them."""
    found, words = {}, list(words)
    while words:
        word = words.pop(0)
        if word.startswith("--"):
            name, has_value, value = word[2:].partition("=")
            if not has_value and words and not words[0].startswith("-"):
                value = words.pop(0)
        elif word.startswith("-") and word[1:2] in _SHORT:
            name, value = _SHORT[word[1]], word[2:] or (words.pop(0) if words else "")
        else:
            raise ConfigError(f"{word!r} is no option of sbatch that is known here: use its long form, --name=value")
        found[name] = value
    return found


def read_settings(text: str) -> dict[str, str]:
    """The variables of the block EDIT, with what the environment says."""
    block = re.search(r"^# EDIT -+\n(.*?)^# -+$", text, re.M | re.S)
    found = {"SLURM_SUBMIT_DIR": os.getcwd()}
    for line in (block[1] if block else "").splitlines():
        for name, value in re.findall(r'(?:^|export |\s)([A-Z_]+)=("[^"]*"|\S+)', line.partition("  #")[0]):
            if not line.startswith("#"):
                found[name] = expand(value.strip('"'), {**os.environ, **found})
    return found


def expand(text: str, known: Mapping[str, str]) -> str:
    """Like a shell: $NAME, ${NAME} and ${NAME:-default}; an unknown name stays as it is."""

    def put(match: re.Match) -> str:
        name = match[1] or match[3] or match[4]
        if match[1]:
            return known.get(name) or expand(match[2], known)
        return known.get(name, match[0])

    return _VARIABLE.sub(put, text)


def hours_of(time: str) -> float:
    """Minutes, MM:SS, H:MM:SS, D-H, D-H:MM or D-H:MM:SS, as sbatch reads them."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if not match:
        raise ConfigError(f"--time is {time}: it must be minutes, MM:SS, H:MM:SS or D-H:MM:SS")
    days, first, second, third = (int(part) if part else None for part in match.groups())
    if days is not None:
        return 24 * days + first + (second or 0) / 60 + (third or 0) / 3600
    if third is not None:
        return first + second / 60 + third / 3600
    return first / 60 + (second or 0) / 3600
