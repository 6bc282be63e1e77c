"""The command `aiscale submit`: one line for each check, the price, then sbatch.

    aiscale submit launchers/frontier/ddp.sbatch --dry-run
    aiscale submit --sbatch "-q debug -t 20" launchers/frontier/ddp.sbatch --set loop.steps=20

Exit status: 0 when submitted (or, with --dry-run, when nothing is wrong), 1 when something is, 2 on bad input.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from aiscale.hpc.doctor.node import Finding
from aiscale.hpc.sites import Site, find, here, names
from aiscale.hpc.submit.checks import bad_nodes, examine
from aiscale.hpc.submit.launcher import Launcher, SubmitError

_MARKS = {"ok": "✓", "warning": "!", "wrong": "✗"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dry-run", action="store_true", help="only check, and print the file as it would be submitted"
    )
    parser.add_argument("--sbatch", default="", metavar="OPTIONS", help="for sbatch, such as '-q debug -t 20'")
    parser.add_argument(
        "--site", metavar="NAME", help="whose rules hold (default: this machine's, or the file's folder)"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("file", metavar="FILE", help="a launcher")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS", help="for the launcher, behind its name")


def run(args: argparse.Namespace) -> int:
    dry = args.dry_run or "--dry-run" in args.args
    rest = [word for word in args.args if word != "--dry-run"]
    path = Path(args.file)
    if not path.is_file():
        raise SubmitError(f"{path} is not a file: name a launcher, such as launchers/frontier/ddp.sbatch")
    job = Launcher.read(path, _site(args.site, path), sbatch=args.sbatch, args=rest)
    found = []
    for finding in [*examine(job), price(job)]:
        found.append(finding)
        if not args.json:
            print(_line(finding), file=sys.stderr, flush=True)
    wrong = [finding for finding in found if finding.state == "wrong"]
    if args.json:
        print(
            json.dumps({"ready": not wrong, "findings": [asdict(finding) for finding in found]}, indent=2), flush=True
        )
    if wrong:
        print(f"not submitted: {', '.join(finding.name for finding in wrong)}", file=sys.stderr)
        return 1
    if dry:
        if not args.json:
            print(job.final(bad_nodes(job)), end="")
        return 0
    return _submit(job)


def price(job: Launcher) -> Finding:
    """The most that it costs, in node-hours and as the site charges."""
    rules, hours = job.site.scheduler, job.price_node_hours
    charged = rules.charge(job.nodes, job.hours * job.starts, job.options.get("qos", ""))
    starts = f" x {job.starts} starts" if job.starts > 1 else ""
    nodes = f"{job.nodes} node{'s' * (job.nodes > 1)}"
    most = f"at most {nodes} x {job.hours:g} h{starts} = {hours:,.4g} node-hours"
    return Finding("price", "ok", f"{most}; charged: {charged:,.4g} {rules.charge_unit}")


def _site(name: str | None, path: Path) -> Site:
    if name:
        return find(name)
    if place := here():
        return place
    folder = path.absolute().parent.name
    if folder in names():
        return find(folder)
    raise SubmitError(
        f"this site is unknown: set --site to {', '.join(names())} or a profile of your own (.toml), before the file"
    )


def _line(finding: Finding) -> str:
    return f"{_MARKS[finding.state]} {finding.name:12} {finding.found}" + (
        f" → {finding.remedy}" * bool(finding.remedy)
    )


def _submit(job: Launcher) -> int:
    with tempfile.TemporaryDirectory(prefix="aiscale-submit-") as folder:
        file = Path(folder) / job.path.name
        file.write_text(job.final(bad_nodes(job)))
        return subprocess.run(["sbatch", str(file), *job.args]).returncode
