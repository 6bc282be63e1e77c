"""The command `aiscale verify`: does every strategy give the same result as serial training?

With a script, `aiscale verify train.py`, it is `measure.referee.command`.
"""

from __future__ import annotations

import argparse
import json
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("cases", nargs="*", metavar="CASE", help="the cases to run, such as 'zero*' (default: all)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--list", action="store_true", help="list the cases, or those that match, and exit")


def run(args: argparse.Namespace) -> int:
    from aiscale.verify import choose, verify

    if args.list:
        print(*(case.name for case in choose(args.cases)), sep="\n")
        return 0
    verdicts = verify(args.cases, report=lambda verdict: print(verdict, file=sys.stderr, flush=True))
    if args.json:
        print(json.dumps([verdict.to_dict() for verdict in verdicts], indent=2))
    held = sum(verdict.holds for verdict in verdicts)
    print(f"{held} of {len(verdicts)} hold", file=sys.stderr if args.json else sys.stdout)
    return 0 if held == len(verdicts) else 1
