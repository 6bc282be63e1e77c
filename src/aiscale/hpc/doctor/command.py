"""`aiscale doctor`: says yes or no before anything is trained.

aiscale doctor                    # this machine, and two ranks on it
srun aiscale doctor               # in a job: all its nodes and ranks; exit status 1 if anything is wrong
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import tempfile
from pathlib import Path

from aiscale.config import ConfigError
from aiscale.hpc.doctor.node import Finding, examine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nproc", type=int, default=2, metavar="N", help="ranks to start where no job did (default: 2)"
    )
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"], help="where ranks run")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--out", metavar="FILE", help=argparse.SUPPRESS)  # result file of ranks that we started


def run(args: argparse.Namespace) -> int:
    from aiscale.distributed import connect, find_launch

    if args.nproc < 1:
        raise ConfigError(f"--nproc is {args.nproc}: it must be at least 1")
    if find_launch(os.environ).size > 1:
        world = connect(args.device)
        try:
            return _as_rank(args, world)
        finally:
            world.close()
    nodes = {os.uname().nodename: list(examine())}
    return _report(args, nodes, _start_ranks(args))


def _as_rank(args: argparse.Namespace, world) -> int:
    from aiscale.hpc.doctor.preflight import preflight

    # Ranks that we started ourselves are on the node that their parent has examined.
    mine = list(examine()) if world.local_rank == 0 and not args.out else []
    nodes = {node: findings for node, findings in world.gather((os.uname().nodename, mine)) if findings}
    found = dataclasses.asdict(preflight(world))
    if world.is_main:
        if args.out:
            Path(args.out).write_text(json.dumps(found))
        else:
            _report(args, nodes, found)
    return 0 if args.out else _status(nodes, found)


def _start_ranks(args: argparse.Namespace) -> dict:
    from aiscale.distributed import launch

    found = {"seats": [], "problems": [], "warnings": []}
    if args.nproc == 1:
        return found
    with tempfile.TemporaryDirectory(prefix="aiscale-doctor-") as folder:
        out = Path(folder) / "preflight.json"
        words = ["-m", "aiscale", "doctor", "--device", args.device, "--out", str(out)]
        if launch(args.nproc, words) == 0:
            return json.loads(out.read_text())
    return found | {"problems": [f"{args.nproc} ranks could not be joined; why stands above"]}


def _status(nodes: dict[str, list[Finding]], found: dict) -> int:
    wrong = any(finding.state == "wrong" for findings in nodes.values() for finding in findings)
    return 1 if wrong or found["problems"] else 0


def _report(args: argparse.Namespace, nodes: dict[str, list[Finding]], found: dict) -> int:
    status = _status(nodes, found)
    if args.json:
        told = {node: [dataclasses.asdict(finding) for finding in findings] for node, findings in nodes.items()}
        print(json.dumps({"ready": status == 0, "nodes": told, "preflight": found}, indent=2))
    else:
        _show(nodes, found, status)
    return status


def _show(nodes: dict[str, list[Finding]], found: dict, status: int) -> None:
    for finding, where in alike(nodes):
        print(dataclasses.replace(finding, found=finding.found + f"  [{where}]" * bool(where)).line())
    for state, lines in (("wrong", found["problems"]), ("warning", found["warnings"])):
        for line in lines:
            print(Finding("ranks", state, line).line())
    if found["seats"]:
        print(Finding("ranks", "wrong" if found["problems"] else "ok", summary(found)).line())
        print(Finding("binding", "ok", binding(found["seats"])).line())
    print("yes: this is ready to train" if status == 0 else "no: what is marked ✗ must be put right first")


def binding(seats: list[dict]) -> str:
    """The cores and the device of each rank of the first node."""
    here = [seat for seat in seats if seat["host"] == seats[0]["host"]]
    return "; ".join(f"rank {seat['rank']}: cores {_ranges(seat['cores'])}, {seat['device']}" for seat in here[:8])


def _ranges(cores: list[int]) -> str:
    """0-3,8 for [0, 1, 2, 3, 8]."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and core == parts[-1][-1] + 1:
            parts[-1][1:] = [core]
        else:
            parts.append([core])
    return ",".join("-".join(map(str, part)) for part in parts)


def alike(nodes: dict[str, list[Finding]]) -> list[tuple[Finding, str]]:
    """(finding, nodes); nodes is empty for a finding that all nodes share."""
    told: dict[Finding, list[str]] = {}
    for node, findings in nodes.items():
        for finding in findings:
            told.setdefault(finding, []).append(node)
    names = list(dict.fromkeys(finding.name for finding in told))
    rows = sorted(told.items(), key=lambda item: names.index(item[0].name))
    return [(finding, "" if len(where) == len(nodes) else ", ".join(where)) for finding, where in rows]


def summary(found: dict) -> str:
    ranks, nodes = len(found["seats"]), len({seat["host"] for seat in found["seats"]})
    text = f"{ranks} on {nodes} node{'s' * (nodes > 1)}"
    if not found["pairs"]:
        return text
    rates = sorted(rate / 2**20 for _, _, rate in found["pairs"])
    spread = f"{rates[0]:,.0f} to {rates[-1]:,.0f}" if len(rates) > 1 else f"{rates[0]:,.0f}"
    return (
        f"{text}: an all-reduce of {found['all_reduce_bytes'] >> 20} MiB in {found['all_reduce_s'] * 1e3:,.1f} ms "
        f"({found['bus_bytes_s'] / 2**20:,.0f} MiB/s a rank), pairs {spread} MiB/s each way"
    )
