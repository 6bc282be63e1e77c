"""The command `aiscale verify`: does every strategy give the same result as serial training?

aiscale verify 'zero*' ddp-x2
"""

from __future__ import annotations

import argparse
import json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("cases", nargs="*", metavar="CASE", help="the cases to run, such as 'zero*' (default: all)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--list", action="store_true", help="list the cases, or those that match, and exit")


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from aiscale.verify import choose, table, verify

    if args.list:
        print(*(case.name for case in choose(args.cases)), sep="\n")
        return 0
    progress, done = Console(stderr=True, highlight=False), []

    def report(verdict) -> None:
        done.append(verdict)
        state = "holds" if verdict.holds else f"differs {verdict.error}"
        progress.print(f"{len(done):3} {verdict.case.name}: {state} ({verdict.seconds:.1f} s)", markup=False)

    verdicts = verify(args.cases, report=report)
    if args.json:
        print(json.dumps([verdict.to_dict() for verdict in verdicts], indent=2))
    else:
        Console().print(table(verdicts))
    return 0 if all(verdict.holds for verdict in verdicts) else 1
