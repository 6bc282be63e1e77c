"""`aiscale room`: the server of a class's room, whose code and pages are in workshop/room."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import sys
from pathlib import Path

from aiscale.lesson.workbooks import workshop


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--port", type=int, default=8765, help="of the loopback; 0: any (default: 8765)")
    add("--url", default="", help="the address by which seats reach the room, if a hub serves it")
    add(
        "--file",
        type=Path,
        default=Path("build/room.json"),
        help="all that the room keeps, to delete after the class (default: build/room.json)",
    )


def run(args: argparse.Namespace) -> None:
    sys.path.insert(0, str(workshop()))
    server = importlib.import_module("room.server")  # beside the package
    args.file.parent.mkdir(parents=True, exist_ok=True)
    asyncio.run(server.serve(args.file, args.port, args.url))
