"""Jupyter kernels that load a site's modules and activate an environment before Python starts.

    aiscale kernel install                                        # on a login node: its site, this environment
    aiscale kernel install --site perlmutter --module pytorch/2.8.0
    aiscale kernel install --prefix /shared/class --name class    # for a class; says how Jupyter finds it there

`jupyter kernelspec list` and `remove` do the rest. Exit status: 0 when done, 2 on bad input. From Python:

    spec = Spec("mine", "My kernel", environment=Path(sys.prefix), site=site("frontier"))
    install(spec, kernels_dir())                  # ~/.local/share/jupyter/kernels/mine

A hub starts kernels without the modules that an environment's libraries need. NERSC recommends a script that runs
before Python, named in kernel.json; OLCF a kernel installed from the environment. This does both: a folder with
kernel.json and start.sh, rendered from start_kernel.sh.j2, beside the templates of launchers.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from aiscale.config import ConfigError
from aiscale.hpc.launchers.render import sources_of, templates, write_files
from aiscale.hpc.sites import Site, find, here, names

_MARK = "aiscale"  #: key of our own kernels in kernel.json's metadata


@dataclass(frozen=True)
class Spec:
    name: str  #: of its folder, and for `jupyter run --kernel`
    title: str  #: what Jupyter shows
    environment: Path  #: the folder of a venv or conda environment with aiscale in it
    site: Site | None = None  #: its modules are loaded; None: none
    profile: str = ""  #: the name of the site, or the .toml file it was read from; empty: the site's name
    modules: tuple[str, ...] = ()  #: loaded in this order instead of the site's own
    variables: Mapping[str, str] = field(default_factory=dict)  #: which notebooks, and the jobs of their ranks, find

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9._-]+", self.name):  # as jupyter_client allows
            raise ConfigError(f"kernel name {self.name!r}: it may have letters, digits, '.', '_' and '-' only")
        if bad := [name for name in self.variables if not re.fullmatch(r"[A-Za-z_]\w*", name)]:
            raise ConfigError(f"--env {bad[0]}: it must be NAME=VALUE")


def kernels_dir(prefix: str | Path | None = None) -> Path:
    """The folder of kernels: the user's own, or that of a Jupyter with `prefix` on its path."""
    if prefix is not None:
        return Path(prefix).absolute() / "share/jupyter/kernels"
    from jupyter_core.paths import jupyter_data_dir

    return Path(jupyter_data_dir()) / "kernels"


def install(spec: Spec, where: Path) -> Path:
    """Write the kernel into the folder `where`; returns its own folder. Replaces one of ours with the same name."""
    _check_environment(spec.environment)
    folder = where / spec.name
    if folder.exists() and not _ours(folder):
        raise ConfigError(f"{folder} is a kernel that aiscale has not made: choose another with --name")
    files = {"start.sh": start_script(spec), "kernel.json": json.dumps(_kernel_json(spec), indent=1) + "\n"}
    new = not folder.exists()
    write_files(folder, files, "--prefix, or --user")
    if new:
        folder.chmod(0o755)  # whatever the umask: others in a class may use it, but not change it
    return folder


def start_script(spec: Spec) -> str:
    modules = "\n".join(f"module load {shlex.quote(name)}" for name in spec.modules)
    if not modules and spec.site:
        modules = spec.site.shell.modules
    text = templates().get_template("start_kernel.sh.j2").render(spec=spec, site=spec.site, modules=modules)
    return text + (sources_of(text, spec.site) if spec.site else "")


def _kernel_json(spec: Spec) -> dict:
    about = {"environment": str(spec.environment), "site": spec.site.name if spec.site else ""}
    return {
        "argv": ["{resource_dir}/start.sh", "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": spec.title,
        "language": "python",
        "metadata": {"debugger": True, _MARK: about},
    }


def _ours(folder: Path) -> bool:
    try:
        return _MARK in json.loads((folder / "kernel.json").read_text()).get("metadata", {})
    except (OSError, ValueError):
        return False


def _check_environment(environment: Path) -> None:
    python = environment / "bin/python"
    if not python.exists():
        raise ConfigError(
            f"environment {environment} has no bin/python: name the folder of a venv or conda environment, unpacked"
        )
    # Without the modules: this only looks for packages.
    looked = "from importlib.util import find_spec as f; print(*(n for n in ('ipykernel', 'aiscale') if not f(n)))"
    done = subprocess.run([python, "-c", looked], capture_output=True, text=True, timeout=120)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise ConfigError(f"{python} does not run here ({last}): load the modules it needs, then install again")
    if lacking := done.stdout.split():
        raise ConfigError(f"{python} has no {' and no '.join(lacking)}: pip install that there, then install again")


# ---- the command line ------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    tasks = parser.add_subparsers(title="tasks", metavar="TASK", required=True, dest="task")
    add = tasks.add_parser("install", help="make a kernel, or replace it", description="Make a kernel.")
    add.add_argument(
        "--site",
        metavar="SITE",
        help=f"whose modules it loads: {', '.join(names())}, a profile of your own (.toml), or none "
        "(default: the site of this machine, if it is known)",
    )
    add.add_argument("--name", metavar="NAME", help="the name of the kernel (default: aiscale, or aiscale-SITE)")
    add.add_argument(
        "--display-name", metavar="TEXT", help="the name that Jupyter shows (default: aiscale, and the site)"
    )
    add.add_argument(
        "--environment", metavar="DIR", help="a venv or conda environment with aiscale in it (default: this one)"
    )
    add.add_argument(
        "--module",
        metavar="NAME",
        action="append",
        default=[],
        help="load this module instead of the site's; may be repeated",
    )
    add.add_argument(
        "--env", metavar="NAME=VALUE", action="append", default=[], help="set this variable; may be repeated"
    )
    where = add.add_mutually_exclusive_group()
    where.add_argument("--user", action="store_true", help="among your own kernels (default)")
    where.add_argument("--prefix", metavar="DIR", help="in DIR/share/jupyter/kernels, which a class may share")


def run(args: argparse.Namespace) -> int:
    where = kernels_dir(args.prefix)
    place = None if args.site == "none" else find(args.site) if args.site else here()
    mine = (args.site or "").endswith(".toml")
    spec = Spec(
        name=args.name or (f"aiscale-{place.name}" if place else "aiscale"),
        title=args.display_name or (f"aiscale, {place.title}" if place else "aiscale"),
        environment=Path(args.environment or sys.prefix).absolute(),
        site=place,
        profile=str(Path(args.site).absolute()) if mine else "",
        modules=tuple(args.module),
        variables=dict(word.partition("=")[::2] for word in args.env),
    )
    folder = install(spec, where)
    print(folder)
    print(f"In JupyterLab choose the kernel {spec.title!r}; reload the page if it was open.", file=sys.stderr)
    if args.prefix:
        share = where.parent
        print(f"Jupyter finds it there where JUPYTER_PATH has {share}, or runs from {args.prefix}.", file=sys.stderr)
    if place and place.jupyter:
        print(textwrap.fill(re.sub(r" \[[a-z0-9, ]+\]", "", place.jupyter), 100), file=sys.stderr)
    return 0
