"""A Jupyter kernel that loads a site's modules and activates an environment before Python starts.

A hub starts kernels without the modules that an environment's libraries need. So the kernel is a
script (start.sh), and Jupyter's own installer puts it in its place; `jupyter kernelspec list` and
`remove` do the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from aiscale.errors import ConfigError, require_writable
from aiscale.site.launchers.render import sourced, templates
from aiscale.site.profiles import Shell, Site, find, here, names


def install(
    name: str, title: str, script: str, prefix: str | None = None, site: Site | None = None
) -> Path:
    """Install or replace the kernel that `script` starts, for this user or below `prefix`.

    A site's site.sh lies beside the script, which sources it.

    Returns its folder.
    """
    from jupyter_client.kernelspec import KernelSpecManager

    argv = ["{resource_dir}/start.sh", "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    about = {
        "argv": argv,
        "display_name": title,
        "language": "python",
        "metadata": {"debugger": True},
    }
    with tempfile.TemporaryDirectory() as place:
        files = Path(place, "kernel")
        files.mkdir()
        (files / "start.sh").write_text(script)
        (files / "kernel.json").write_text(json.dumps(about, indent=1) + "\n")
        # Whatever the umask. Others in a class may use a shared kernel, but not change it; nobody
        # else may read one's own, for its variables may be secrets.
        if site:
            (files / "site.sh").write_text(sourced(site)["site.sh"])
            (files / "site.sh").chmod(0o644 if prefix else 0o600)
        (files / "kernel.json").chmod(0o644 if prefix else 0o600)
        for path in (files / "start.sh", files):
            path.chmod(0o755 if prefix else 0o700)
        try:
            return Path(
                KernelSpecManager().install_kernel_spec(
                    str(files), name, user=not prefix, prefix=prefix
                )
            )
        except ValueError as error:
            raise ConfigError(f"--name: {error}") from None


def start_script(
    name: str, environment: Path, site: Site | None, profile: str, variables: Mapping[str, str]
) -> str:
    """The kernel's start.sh; profile: the .toml file that the site was read from, else empty.

    It sources the centre's own site.sh, which AISCALE_SITE_SH names, or else the one beside it.
    """
    if not (environment / "bin/python").exists():
        raise ConfigError(
            f"environment {environment} has no bin/python: name a venv or conda environment"
        )
    values = {"name": name, "environment": environment, "site": site, "profile": profile}
    named = os.environ.get("AISCALE_SITE_SH")
    values["site_sh"] = str(Path(named).absolute()) if named else ""
    values |= {"variables": variables, "caches": (site.shell if site else Shell()).caches}
    return templates().get_template("start_kernel.sh.j2").render(values)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    tasks = parser.add_subparsers(title="tasks", metavar="TASK", required=True, dest="task")
    add = tasks.add_parser("install", help="make a kernel, or replace it").add_argument
    known = f"{', '.join(names())}, a .toml file, or none"
    add("--site", help=f"{known} (default: this machine's site, if known)")
    add("--name", help="the name of the kernel (default: aiscale, or aiscale-SITE)")
    add(
        "--display-name",
        metavar="TEXT",
        help="the name that Jupyter shows (default: aiscale, and the site)",
    )
    add(
        "--environment",
        metavar="DIR",
        default=sys.prefix,
        help="a venv or conda environment (default: this one)",
    )
    add(
        "--env",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="set this variable; may be repeated",
    )
    add(
        "--prefix",
        metavar="DIR",
        help="in DIR/share/jupyter/kernels, which a class may share (default: your own)",
    )


def run(args: argparse.Namespace) -> int:
    place = None if args.site == "none" else find(args.site) if args.site else here()
    profile = str(Path(args.site).absolute()) if (args.site or "").endswith(".toml") else ""
    name = args.name or (f"aiscale-{place.name}" if place else "aiscale")
    title = args.display_name or (f"aiscale, {place.title}" if place else "aiscale")
    variables = dict(word.partition("=")[::2] for word in args.env)
    script = start_script(name, Path(args.environment).absolute(), place, profile, variables)
    if args.prefix:
        require_writable(args.prefix, "--prefix")
    print(install(name, title, script, args.prefix, place))
    if args.prefix and variables:
        print(f"All who can read {args.prefix} can read {', '.join(variables)}.", file=sys.stderr)
    print(
        f"In JupyterLab choose the kernel {title!r}; reload the page if it was open.",
        file=sys.stderr,
    )
    return 0
