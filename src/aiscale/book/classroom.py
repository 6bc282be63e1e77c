"""`aiscale class`: a seat made as new for the next participant, the price of a class. (`make class` packs the archive.)

    aiscale class reset --from class.tar.gz      # on a seat: engines ended, notebooks as they were, progress cleared
    aiscale class price 30 --hours 2             # at a centre: nodes that a class takes, and what they are charged

Nothing that a participant wrote is deleted: `reset` moves it to kept/TIME in the seat's folder, and asks before.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

from aiscale.book.notebook import BookError
from aiscale.config import require_writable
from aiscale.hpc.sites import Site, find, names, site
from aiscale.processes import kill_marked

TOP = "aiscale"  #: the folder that the archive opens to
#: What a participant changes, and what `reset` restores.
SHELVES = ("notebooks", "workshop/exercises", "workshop/clinic", "workshop/puzzles")
_MARKER = "AISCALE_CLUSTER"  #: `aiscale.cluster.guard.MARKER`, whose import would load ipyparallel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    reset_it = actions.add_parser("reset", help="make a seat as new: engines, notebooks, progress")
    reset_it.add_argument("seat", metavar="SEAT", nargs="?", default=".", help="its folder (default: this one)")
    reset_it.add_argument("--from", dest="archive", metavar="ARCHIVE", help="originals (default: from git)")
    reset_it.add_argument("--yes", action="store_true", help="do not ask")
    reset_it.set_defaults(act=lambda args: reset(args.seat, args.archive, args.yes))
    price_it = actions.add_parser("price", help="nodes that a class takes at each centre, and what they are charged")
    price_it.add_argument("seats", metavar="SEATS", type=int, help="participants at the same time")
    price_it.add_argument("--hours", type=float, default=1.0, metavar="H", help="of each one's job (default: 1)")
    price_it.add_argument("--ranks", type=int, default=4, metavar="N", help="of each one's job (default: 4)")
    price_it.add_argument("--site", metavar="SITE", help="one only, or a profile of your own (.toml)")
    price_it.set_defaults(act=lambda args: price(args.seats, args.hours, args.ranks, args.site))


def run(args: argparse.Namespace) -> int:
    print(args.act(args))
    return 0


# price ---------------------------------------------------------------------------------------------------------------


def price(seats: int, hours: float, ranks: int, wanted: str | None = None) -> str:
    """A table: the nodes that a class takes at each centre, where jobs share nodes too, and the charge."""
    if min(seats, hours, ranks) <= 0:
        raise BookError("SEATS, --hours and --ranks must be more than 0")
    places = [find(wanted)] if wanted else [site(name) for name in names() if name != "generic"]
    head = (f"{seats} jobs of {ranks} ranks, {hours:g} h", "where", "on a node", "nodes", "charged at most")
    rows = [head, *(row for place in places for row in _prices(place, seats, hours, ranks))]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _prices(place: Site, seats: int, hours: float, ranks: int) -> Iterator[tuple[str, ...]]:
    rules = place.scheduler
    usual = place.partition or rules.default_partition, place.qos or rules.default_qos
    shared = [(name, "") for name, entry in rules.partitions.items() if entry.share and name != place.cpus.partition]
    shared += [(usual[0], name) for name, entry in rules.qos.items() if entry.share]
    offers = [dataclasses.replace(place, partition=partition, qos=qos) for partition, qos in [usual, *shared]]
    offers += [place.on_cpus()] if place.cpus.node.ranks else []
    for there in offers:
        partition, qos, nodes = there.partition, there.qos, -(-ranks // there.node.ranks_per_node)
        part, longest = there.part(ranks), rules.hours_for(nodes, partition, qos) or 0.0
        if part is there and (partition, qos) != usual:  # it would have a whole node there too, or is too large
            continue
        fit = there.node.ranks_per_node // ranks if part is not there else 1
        charge = f"{seats * part.scheduler.charge(nodes, hours, qos):,.4g} {there.scheduler.charge_unit}"
        charge = charge if hours <= longest else f"not allowed: {longest:g} h at most"
        where = " ".join(filter(None, (partition, qos, "" if there.node.gpus else "(CPUs)")))
        yield place.name, where, str(fit), str(-(-seats // fit) * nodes), charge


# reset ---------------------------------------------------------------------------------------------------------------


def reset(seat: str | Path = ".", archive: str | Path | None = None, yes: bool = False) -> str:
    """Make a seat as new, after asking; returns what was done. Raises BookError without originals or an answer."""
    seat = Path(seat).resolve()
    require_writable(seat, "")
    originals = _originals(seat, archive)
    present = {path: seat / path for path in originals if (seat / path).exists()}
    if not present:
        raise BookError(f"{seat} has none of the class's notebooks: name the folder that notebooks/ is in")
    changed = [path for path, there in present.items() if there.read_bytes() != originals[path]]
    missing = [path for path in originals if path not in present and (seat / path).parent.exists()]
    folders = [seat / "progress", *(path for shelf in SHELVES for path in (seat / shelf).rglob("progress"))]
    progress = [path for path in folders if path.is_dir()]
    clusters = engines(seat)
    what = f"{len(changed)} changed files, {len(missing)} missing ones, progress in {len(progress)} folders, "
    what += f"{len(clusters)} clusters that still run"
    if not yes and not _agreed(f"{seat}: {what}. Reset it? [y/N] "):
        return "nothing was changed"
    for cluster in clusters:
        kill_marked(_MARKER, cluster)
    kept = seat / "kept" / time.strftime("%Y-%m-%d_%H%M%S")
    for path in [*(seat / path for path in changed), *progress]:
        aside = kept / path.relative_to(seat)
        aside.parent.mkdir(parents=True, exist_ok=True)
        path.rename(aside)
    for path in (*changed, *missing):
        (seat / path).write_bytes(originals[path])
    aside = f"; what was there is in {kept}" if kept.exists() else ""
    return f"reset: {what}{aside}"


def _agreed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise BookError("reset asks before it changes anything, but nobody can answer here: give --yes")
    return input(question).strip().lower() in ("y", "yes")


def _originals(seat: Path, archive: str | Path | None) -> dict[str, bytes]:
    """path -> content of what a participant is given, from the archive or from the last commit."""
    if archive is None:
        done = subprocess.run(["git", "archive", "HEAD"], cwd=seat if seat.is_dir() else ".", capture_output=True)
        if done.returncode:
            raise BookError(f"{seat} is not under git: name the class's archive with --from")
        source, prefix = {"fileobj": io.BytesIO(done.stdout)}, ""
    else:
        source, prefix = {"name": archive}, f"{TOP}/"
    try:
        with tarfile.open(**source) as tar:
            files = {member.name.removeprefix(prefix): member for member in tar if member.isfile()}
            shelves = tuple(f"{shelf}/" for shelf in SHELVES)
            return {name: tar.extractfile(file).read() for name, file in files.items() if name.startswith(shelves)}
    except FileNotFoundError:
        raise BookError(f"--from {archive} cannot be read: there is no such file") from None
    except (tarfile.TarError, EOFError, OSError) as error:
        raise BookError(f"--from {archive} is not an archive, or only a part of one ({error}): copy it again") from None


def engines(seat: Path) -> list[str]:
    """The clusters of which a process works in the seat's folder; empty where there is no /proc."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if seat not in [(there := Path(os.readlink(process / "cwd"))), *there.parents]:
                continue
            environment = (process / "environ").read_bytes().split(b"\0")
        except OSError:  # it has ended, or belongs to somebody else
            continue
        mark = f"{_MARKER}=".encode()
        found |= {entry.removeprefix(mark).decode() for entry in environment if entry.startswith(mark)}
    return sorted(found - {os.environ.get(_MARKER)})
