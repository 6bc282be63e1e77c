"""The command `aiscale verify SCRIPT.py`: does a script on N ranks do what it does on one?

aiscale verify train_ddp.py --nproc 4 --steps 3 -- --save '{TMP}/checkpoint'
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from aiscale.measure.referee.judge import Question, judge, say_progress
from aiscale.measure.referee.placeholders import PlaceholderError
from aiscale.measure.referee.verdict import CANNOT_TELL

_EPILOG = """\
After -- come the script's own arguments. {16//N}: a number that depends on the number of ranks N, which is 1 in the
reference; {min(2,N)}; {TMP}: a folder of each run; {PWD}: this folder. Each run begins in an empty folder.

exit status: 0 equal within rounding, 1 the runs part, 2 cannot tell

example:
  aiscale verify train_tp_pp.py --nproc 4 -- --save '{TMP}/checkpoint' --tp '{min(2,N)}' --pp '{min(2,N)}'
"""


def main(argv: Sequence[str]) -> int:
    own, arguments = list(argv), []
    if "--" in own:
        place = own.index("--")
        own, arguments = own[:place], own[place + 1 :]
    args = _parser().parse_args(own)
    script = Path(args.script)
    if not script.is_file():
        print(f"aiscale verify: {script} is no file: name a training script", file=sys.stderr)
        return CANNOT_TELL
    if args.nproc < 1 or args.steps < 1:
        print(f"aiscale verify: --nproc {args.nproc} and --steps {args.steps} must be at least 1", file=sys.stderr)
        return CANNOT_TELL
    try:
        verdict = judge(Question(script, tuple(arguments), args.nproc, args.steps, args.limit), say_progress)
    except PlaceholderError as error:
        print(f"aiscale verify: {error}", file=sys.stderr)
        return CANNOT_TELL
    print(json.dumps(verdict.to_dict(), indent=2) if args.json else verdict)
    return verdict.status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="aiscale verify",
        description="Run a training script on N ranks and on one, and name the first place where the two part.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("script", metavar="SCRIPT.py")
    add("--nproc", type=int, default=4, metavar="N", help="ranks (default: 4)")
    add("--steps", type=int, default=3, metavar="K", help="optimizer steps to compare (default: 3)")
    add("--limit", type=float, default=120, metavar="S", help="seconds for each of the runs (default: 120)")
    add("--json", action="store_true", help="print the verdict as JSON")
    return parser
