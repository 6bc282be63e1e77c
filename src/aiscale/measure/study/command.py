"""`aiscale study FILE.toml` and `aiscale study --compare A B`: see the package."""

from __future__ import annotations

import argparse
import json
import os

from aiscale.errors import ConfigError
from aiscale.measure.study.engine import load, run_study
from aiscale.measure.study.grid import read_study
from aiscale.measure.study.results import facts, side_by_side, summary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    files = "a file, or laptop, node, grid, grid-node or quick (default)"
    add("study", nargs="?", default="quick", metavar="STUDY", help=files)
    add(
        "--out",
        metavar="FOLDER",
        help="where results go, a file for each run (default: runs/STUDY)",
    )
    add("--budget", type=float, metavar="MINUTES", help="begin no run that would end later")
    add("--compare", nargs=2, metavar="FOLDER", help="put the results of two studies side by side")
    add("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    if args.compare:
        both = [load(folder) for folder in args.compare]
        if not all(both):
            raise ConfigError(
                f"one of {' and '.join(args.compare)} has no results: "
                "name two folders of aiscale study"
            )
        entries, name = side_by_side(*both), both[0][0]["study"]
        near = [entry["within_10_pct"] for entry in entries if entry["cell"] != "base"]
        result = {
            "study": name,
            "command": f"aiscale study {name}, twice",
            "machines": [facts(rows) for rows in both],
        }
        result |= {"within_10_pct": sum(near), "of": len(near), "cells": entries}
    else:
        study = read_study(args.study)
        # For ranks: the profiler would warn in each run.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        rows = run_study(study, args.out or f"runs/{study.name}", args.budget)
        result = {"study": study.name, "machines": [facts(rows)], "cells": summary(rows)}
    if args.json:
        print(json.dumps(result, indent=1))
    else:
        print(*result["machines"], *map(_line, result["cells"]), sep="\n")
    return 0


def _line(entry: dict) -> str:
    """An entry of `summary` or of `side_by_side`."""
    if "times" in entry:
        return f"{entry['cell']}: {' and '.join(map(_interval, entry['ratio']))} of the base"
    if "ratio" in entry:
        time = (
            f"{_interval(entry['ratio'])} of the base, {entry['epoch_s']['median']:.3f} s an epoch"
        )
        return f"{entry['cell']}: {time}, {entry['peak_bytes'] / 2**20:.1f} MiB"
    return f"{entry['cell']}: {entry['status']} {entry['error']}"


def _interval(values: dict) -> str:
    return f"{values['median']:.2f} ({values['low']:.2f} to {values['high']:.2f})"
