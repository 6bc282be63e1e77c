"""The command `aiscale launchers`: render the files of a site, list them, or check that they are up to date.

    aiscale launchers --site lumi --out my_launchers

Exit status: 0 when written, listed or unchanged, 1 when --check found a difference, 2 on bad input.
"""

from __future__ import annotations

import argparse
import sys

from aiscale.hpc.launchers.lessons import LESSONS
from aiscale.hpc.launchers.render import BUILD, SHIPPED, drift, fits, nodes_of, write
from aiscale.hpc.sites import Site, find, names, site


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--site",
        metavar="FILE",
        help=f"a profile of your own (.toml), or one of {', '.join(names())} (default: {' and '.join(SHIPPED)})",
    )
    parser.add_argument("--out", default="launchers", metavar="DIR", help="where files go (default: launchers)")
    task = parser.add_mutually_exclusive_group()
    task.add_argument("--check", action="store_true", help="write nothing; say what would change")
    task.add_argument("--list", action="store_true", help="name the files, what each is for and what it asks for")


def run(args: argparse.Namespace) -> int:
    places = [find(args.site)] if args.site else [site(name) for name in SHIPPED]
    if args.list:
        for place in places:
            _list(place)
        return 0
    if args.check:
        problems = drift(args.out, places)
        print(*problems, sep="\n", end="\n" * bool(problems))
        if problems:
            print("to put this right: aiscale launchers", file=sys.stderr)
        else:
            print(f"{args.out}: the files of {', '.join(place.name for place in places)} are up to date")
        return 1 if problems else 0
    for place in places:
        print(*write(place, args.out), sep="\n")
    return 0


def _list(place: Site) -> None:
    print(f"{place.title}, as of {place.read}:")
    for lesson in LESSONS.values():
        if fits(lesson, place):
            nodes = nodes_of(lesson, place)
            print(f"  {place.name + '/' + lesson.name + '.sbatch':32} {lesson.title}; {nodes} nodes")
    if place.build.create:
        print(f"  {place.name + '/' + BUILD:32} makes the environment in which they run")
