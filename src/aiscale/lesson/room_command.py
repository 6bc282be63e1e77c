"""`aiscale room`: the server of a class's room, whose code and pages are in workshop/room.

aiscale room                          # serve
aiscale room rehearse --seats 30      # play a half-day of seats that only post
aiscale room rehearse --kernels 4     # play it with kernels, which take memory and time
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import sys
from pathlib import Path

from aiscale.errors import require
from aiscale.lesson.workbooks import workshop


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "what",
        nargs="?",
        choices=("serve", "rehearse"),
        default="serve",
        help="serve a class (default), or play a half-day with synthetic participants",
    )
    add("--seats", type=int, default=0, help="rehearse: so many seats post, without kernels")
    add("--kernels", type=int, default=0, help="rehearse: so many run the half-day's notebooks")
    add("--hub", default="", metavar="URL", help="rehearse: kernels on this hub, of this machine")
    add("--port", type=int, default=8765, help="of the loopback; 0: any (default: 8765)")
    add("--url", default="", help="the address by which seats reach the room, if a hub serves it")
    add(
        "--file",
        type=Path,
        default=Path("build/room.json"),
        help="all that the room keeps, to delete after the class (default: build/room.json)",
    )


def run(args: argparse.Namespace) -> int:
    if args.what == "rehearse":
        return _rehearse(args.seats, args.kernels, args.hub)
    require(
        not (args.seats or args.kernels or args.hub),
        "--seats, --kernels and --hub are for a rehearsal: aiscale room rehearse --seats 30",
    )
    sys.path.insert(0, str(workshop()))
    server = importlib.import_module("room.server")  # beside the package
    args.file.parent.mkdir(parents=True, exist_ok=True)
    asyncio.run(server.serve(args.file, args.port, args.url))
    return 0


def _rehearse(seats: int, kernels: int, hub: str) -> int:
    from aiscale.lesson.rehearsal import rehearse_seats
    from aiscale.lesson.rehearsal_kernels import rehearse_kernels

    require(
        bool(seats) != bool(kernels),
        f"--seats {seats} --kernels {kernels}, but a rehearsal is of one kind: "
        "--seats 30 posts alone, --kernels 4 runs notebooks",
    )
    return rehearse_seats(seats) if seats else rehearse_kernels(kernels, hub)
