"""The command `aiscale verify`: does every trainer give the same result as serial training?

With a script, `aiscale verify train.py`, it is `measure.referee.command`.
"""

from __future__ import annotations

import argparse
import json
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("cases", nargs="*", metavar="CASE", help="cases, such as 'zero*' (default: all)")
    add("--json", action="store_true", help="print the results as JSON")
    add("--list", action="store_true", help="list the cases, or those that match, and exit")


def run(args: argparse.Namespace) -> int:
    from aiscale.measure.jobs import choose, verify

    if args.list:
        print(*(case.name for case in choose(args.cases)), sep="\n")
        return 0
    verdicts = verify(args.cases, report=lambda each: print(each, file=sys.stderr, flush=True))
    if args.json:
        print(json.dumps([verdict.to_dict() for verdict in verdicts], indent=2))
    held = sum(verdict.holds for verdict in verdicts)
    out = sys.stderr if args.json else sys.stdout
    print(f"{held} of {len(verdicts)} hold", file=out)
    for verdict in verdicts:
        if not verdict.holds and verdict.case.ranks > 1:
            print(f"where {verdict.case.name} parts: {verdict.case.referee()}", file=out)
    return 0 if held == len(verdicts) else 1
