"""`aiscale rehearse`: runs one command, or a shell, beside a private Slurm cluster that ends with it.

aiscale rehearse --site frontier --nodes 2 -- sbatch --wait launchers/frontier/ddp.sbatch
aiscale rehearse --site perlmutter --link 1gbit         # a shell; `exit` ends the cluster

The exit status is the command's.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path


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
    from aiscale.hpc.rehearsal import Cluster

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
