"""python launchers/rehearsal --site frontier --nodes 2 -- sbatch --wait job.sbatch

README.md says more.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from aiscale.errors import ConfigError

#: Without a command: a shell in a terminal of its own, since process 1 of the cluster cannot share
#: the outer one.
SHELL = ["script", "--quiet", "--return", "--command", 'bash --rcfile "$BASH_ENV" -i', "/dev/null"]


def main() -> int:
    from rehearsal import Cluster

    parser = argparse.ArgumentParser(
        prog="python launchers/rehearsal",
        description="Run a command in a private Slurm cluster of virtual nodes.",
        epilog="example: python launchers/rehearsal --site frontier --nodes 2 -- "
        "sbatch --wait job.sbatch",
    )
    add = parser.add_argument
    add(
        "--site",
        default="generic",
        help="the site to play: the name of a profile, or a .toml file (default: generic)",
    )
    add(
        "--nodes",
        type=int,
        default=4,
        metavar="N",
        help="how many virtual nodes to start (default: 4)",
    )
    add(
        "--account", action="append", default=[], help="one more that jobs may use; may be repeated"
    )
    add(
        "command",
        nargs=argparse.REMAINDER,
        metavar="-- COMMAND",
        help="the command to run (default: a shell)",
    )
    args = parser.parse_args()
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    try:
        with Cluster(site=args.site, nodes=args.nodes, accounts=args.account) as cluster:
            account = cluster.settings.site.scheduler.account_example
            print(
                f"account {account}; the daemons' logs are in {cluster.folder}/log", file=sys.stderr
            )
            return cluster.login(command or SHELL).returncode
    except ConfigError as error:
        print(f"rehearsal: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    # launchers/, where this folder is a package
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    sys.exit(main())
