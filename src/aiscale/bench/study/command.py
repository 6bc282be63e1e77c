"""`aiscale bench study FILE.toml` and `bench compare A.csv B.csv`: see the package."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from aiscale.bench.study.engine import run_study, turns
from aiscale.bench.study.grid import read_study
from aiscale.bench.study.results import agreement, facts, load, show, show_side_by_side, side_by_side, summary
from aiscale.config import ConfigError

#: name -> (files it takes, the options that it has)
COMMANDS = {"study": (1, ("out", "budget", "list")), "compare": (2, ())}


def run(args: argparse.Namespace) -> int:
    count, own = COMMANDS[args.name]
    if len(args.files) != count:
        words = {"study": "FILE.toml, or the name of a study", "compare": "A.csv B.csv"}[args.name]
        raise ConfigError(f"bench {args.name} takes {words}, but {len(args.files)} files are given")
    for option in ("out", "budget", "list"):
        if getattr(args, option) and option not in own:
            raise ConfigError(f"bench {args.name} takes no --{option}")
    return {"study": _study, "compare": _compare}[args.name](args)


def _study(args: argparse.Namespace) -> int:
    study = read_study(args.files[0])
    if args.budget is not None and args.budget <= 0:
        raise ConfigError(f"--budget {args.budget:g}: it must be more than 0 minutes")
    if args.list:
        print(*(study.label(turn.cell) for turn in turns(study) if turn.round == 0), sep="\n")
        return 0
    out = Path(args.out or f"runs/{study.name}.csv")
    rows = run_study(
        study, out, budget_minutes=args.budget, report=lambda line: print(line, file=sys.stderr, flush=True)
    )
    if args.json:
        print(json.dumps(summary(rows), indent=2))
    else:
        show(rows)
        print(out)
    return 0


def _compare(args: argparse.Namespace) -> int:
    both = [load(file) for file in args.files]
    entries = side_by_side(*both)
    near, of = agreement(entries)
    if args.json:
        about = {"study": both[0][0]["study"], "command": f"aiscale bench study {both[0][0]['study']}, twice"}
        about |= {"machines": [facts(rows) for rows in both], "within_10_pct": near, "of": of}
        print(json.dumps({**about, "cells": entries}, indent=1))
    else:
        show_side_by_side(entries, (Path(args.files[0]).stem, Path(args.files[1]).stem))
        print(f"ratios to the base agree within 10 % in {near} of {of} cells")
    return 0
