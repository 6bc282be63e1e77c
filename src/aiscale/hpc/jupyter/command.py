"""The command `aiscale kernel`: make a Jupyter kernel that has a site's modules, list those there are, remove one.

    aiscale kernel install                                        # on a login node: its site, this environment
    aiscale kernel install --site perlmutter --module pytorch/2.8.0
    aiscale kernel install --prefix /shared/class --name class    # for a class; says how Jupyter finds it there
    aiscale kernel list
    aiscale kernel uninstall aiscale-perlmutter

Exit status: 0 when done, 2 on bad input.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from pathlib import Path

from aiscale.hpc.jupyter.kernel import Spec, install, installed, kernels_dir, uninstall
from aiscale.hpc.sites import find, here, names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `aiscale kernel`."""
    tasks = parser.add_subparsers(title="tasks", metavar="TASK", required=True, dest="task")
    add = tasks.add_parser("install", help="make a kernel, or make it anew", description="Make a kernel.")
    add.add_argument(
        "--site",
        metavar="SITE",
        help=f"whose modules it loads: {', '.join(names())}, a profile of your own (.toml), or none "
        "(default: the site of this machine, if it is known)",
    )
    add.add_argument("--name", metavar="NAME", help="of its folder (default: aiscale, or aiscale-SITE)")
    add.add_argument("--display-name", metavar="TEXT", help="what Jupyter shows (default: aiscale, and the site)")
    add.add_argument(
        "--environment", metavar="DIR", help="a venv or conda environment with aiscale in it (default: this one)"
    )
    add.add_argument(
        "--module",
        metavar="NAME",
        action="append",
        default=[],
        help="load this, in place of the site's; may be repeated",
    )
    drop = tasks.add_parser("uninstall", help="remove a kernel", description="Remove a kernel.")
    drop.add_argument("name", metavar="NAME", help="as `aiscale kernel list` has it")
    seen = tasks.add_parser("list", help="name the kernels that were made", description="Name the kernels.")
    for task in (add, drop, seen):
        where = task.add_mutually_exclusive_group()
        where.add_argument("--user", action="store_true", help="your own kernels" + " (default)" * (task is not seen))
        where.add_argument(
            "--prefix", metavar="DIR", help="those in DIR/share/jupyter/kernels, which a class may share"
        )


def run(args: argparse.Namespace) -> int:
    """Carry out what the arguments ask for; returns the exit status."""
    where = kernels_dir(args.prefix)
    if args.task == "list":
        _list(where if args.user or args.prefix else None)
    elif args.task == "uninstall":
        print(f"removed {uninstall(args.name, where)}")
    else:
        _install(args, where)
    return 0


def _install(args: argparse.Namespace, where: Path) -> None:
    place = None if args.site == "none" else find(args.site) if args.site else here()
    mine = (args.site or "").endswith(".toml")
    spec = Spec(
        name=args.name or (f"aiscale-{place.name}" if place else "aiscale"),
        title=args.display_name or (f"aiscale, {place.title}" if place else "aiscale"),
        environment=Path(args.environment or sys.prefix).absolute(),
        site=place,
        profile=str(Path(args.site).absolute()) if mine else "",
        modules=tuple(args.module),
    )
    folder = install(spec, where)
    print(folder)
    print(f"In JupyterLab choose the kernel {spec.title!r}; reload the page if it was open.", file=sys.stderr)
    if args.prefix:
        share = where.parent
        print(f"Jupyter finds it there where JUPYTER_PATH has {share}, or runs from {args.prefix}.", file=sys.stderr)
    if place and place.jupyter:
        print(textwrap.fill(re.sub(r" \[[a-z0-9, ]+\]", "", place.jupyter), 100), file=sys.stderr)


def _list(where: Path | None) -> None:
    found = installed(where)
    if not found:
        print("no kernel of aiscale's here: aiscale kernel install makes one", file=sys.stderr)
    for kernel in found:
        state = f"does not start: {kernel.problem}" if kernel.problem else f"{kernel.environment}"
        print(f"{kernel.name:24} {kernel.site or '-':12} {state}")
