"""The command `aiscale verify SCRIPT.py`: does a script on N ranks do what it does on one?

aiscale verify train_ddp.py --nproc 4 --steps 3 -- --save '{TMP}/checkpoint'
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from aiscale.measure.referee import tasks
from aiscale.measure.referee.judge import Question, judge, say_progress
from aiscale.measure.referee.placeholders import PlaceholderError
from aiscale.measure.referee.verdict import CANNOT_TELL

_EPILOG = """\
After -- come the script's own arguments. {16//N}: a number that depends on the number of ranks N,
which is 1 in the reference; {min(2,N)}; {TMP}: a folder of each run; {PWD}: this folder. Each run
begins in an empty folder.

exit status: 0 equal within rounding, 1 the runs part, 2 cannot tell

examples:
  aiscale verify train_tp_pp.py -- --save '{TMP}/run' --tp '{min(2,N)}' --pp '{min(2,N)}'
  aiscale verify -m aiscale.train.fsdp --nproc 4 -- --save '{TMP}/run'"""


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """(the referee's options, the script's own arguments: those after --)."""
    own, arguments = list(argv), []
    if "--" in own:
        place = own.index("--")
        own, arguments = own[:place], own[place + 1 :]
    return _parser().parse_args(own), arguments


def main(argv: Sequence[str]) -> int:
    args, arguments = parse(argv)
    signal.signal(signal.SIGTERM, _end)
    refused = _refusal(args)
    if tasks.number() and tasks.count() > 1:
        if not refused:
            tasks.follow()
        return 0  # task 0 says the verdict, or what is wrong with the settings
    try:
        verdict = None if refused else judge(_question(args, arguments), say_progress)
    except PlaceholderError as error:
        refused = str(error)
    if refused:
        print(f"aiscale verify: {refused}", file=sys.stderr)
        return CANNOT_TELL
    print(json.dumps(verdict.to_dict(), indent=2) if args.json else verdict)
    return verdict.status


def _end(number: int, frame: object) -> NoReturn:
    """As Ctrl-C: what the runs have left is cleared away, their ranks among it."""
    raise SystemExit(128 + number)


def _refusal(args: argparse.Namespace) -> str:
    """What is wrong with the settings; nothing, if they can be tried."""
    if args.module and not _file_of(args.script):
        return f"-m {args.script}: Python finds no file of such a module from {os.getcwd()}"
    if not args.module and not Path(args.script).is_file():
        return f"{args.script} is no file: name a training script"
    if min(args.nproc, args.steps, args.resume_nproc or 1) < 1:
        return f"--nproc {args.nproc} and --steps {args.steps} must be at least 1"
    if 1 < tasks.count() != args.nproc:
        return f"--nproc {args.nproc}, but srun has started {tasks.count()} tasks: leave it out"
    if args.resume and tasks.count() > 1:
        return "--resume needs ranks that can be started twice: try it without srun"
    if args.resume_nproc and not args.resume:
        return "--resume-nproc needs --resume"
    if args.against and args.resume:
        return "--against and --resume are two questions: ask one at a time"
    if args.against and not Path(shlex.split(args.against)[0]).is_file():
        return f"--against {args.against}: the first word is no file"
    return ""


def _file_of(module: str) -> str:
    """Of what `python -m` would start from this folder; nothing, if there is no such module."""
    sys.path.insert(0, os.getcwd())
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # not even the package of which it would be a part
        return ""
    finally:
        sys.path.remove(os.getcwd())
    return found.origin if found and found.has_location else ""


def _question(args: argparse.Namespace, arguments: list[str]) -> Question:
    against = None
    if args.against:
        other, *others_arguments = shlex.split(args.against)
        against = (Path(other), tuple(others_arguments))
    return Question(
        Path(_file_of(args.script) if args.module else args.script),
        tuple(arguments),
        args.nproc,
        args.steps,
        args.limit,
        module=args.script if args.module else "",
        against=against,
        reference_arguments=tuple(shlex.split(args.reference_args)),
        resume=tuple(shlex.split(args.resume or "")),
        resume_ranks=args.resume_nproc or args.nproc,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="aiscale verify",
        description="Run a script on N ranks and on one, and name the first place where they part.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("script", metavar="SCRIPT.py")
    add("-m", "--module", action="store_true", help="SCRIPT.py is a module's name, as in python -m")
    ranks = tasks.count() if tasks.count() > 1 else 4
    add(
        "--nproc",
        type=int,
        default=ranks,
        metavar="N",
        help="ranks (default: 4; under srun, its tasks)",
    )
    add("--steps", type=int, default=3, metavar="K", help="optimizer steps to compare (default: 3)")
    add(
        "--limit",
        type=float,
        default=120,
        metavar="S",
        help="seconds for each of the runs (default: 120)",
    )
    add(
        "--against",
        metavar="'OTHER.py ARGUMENTS'",
        help="another script, on one rank, as the reference",
    )
    add(
        "--reference-args",
        metavar="ARGUMENTS",
        default="",
        help="further arguments of the run on one rank, such as smaller micro-batches",
    )
    add(
        "--resume",
        metavar="ARGUMENTS",
        help="stop early with these, start again, compare with a run without a stop",
    )
    add(
        "--resume-nproc",
        type=int,
        metavar="M",
        help="ranks of the second part, if they are others than those of the first",
    )
    add("--json", action="store_true", help="print the verdict as JSON")
    return parser
