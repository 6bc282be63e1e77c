"""The command `aiscale verify`: does every strategy give the same result as serial training?

aiscale verify 'zero*' ddp-x2
"""

from __future__ import annotations

import argparse
import json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("rungs", nargs="*", metavar="RUNG", help="the rungs to run, such as 'zero*' (default: all)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--list", action="store_true", help="list the rungs, or those that match, and exit")


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from aiscale.verify import choose, climb, table

    if args.list:
        print(*(rung.name for rung in choose(args.rungs)), sep="\n")
        return 0
    progress, done = Console(stderr=True, highlight=False), []

    def report(verdict) -> None:
        done.append(verdict)
        state = "holds" if verdict.holds else f"differs {verdict.error}"
        progress.print(f"{len(done):3} {verdict.rung.name}: {state} ({verdict.seconds:.1f} s)", markup=False)

    verdicts = climb(args.rungs, report=report)
    if args.json:
        print(json.dumps([verdict.to_dict() for verdict in verdicts], indent=2))
    else:
        Console().print(table(verdicts))
    return 0 if all(verdict.holds for verdict in verdicts) else 1
