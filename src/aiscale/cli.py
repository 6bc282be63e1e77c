"""The `aiscale` command: argument parsing over the package's functions.

Progress goes to standard error, results to standard output. The exit status is 0 only on success, 2
after one line about bad input or a file, 1 after the traceback of any other fault, 130 after
Ctrl-C, 143 after SIGTERM.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from aiscale.environment import shorten_temporary_folder
from aiscale.private import keep_caches_private
from aiscale.train.options import TRAINERS

BAD_INPUT, INTERRUPTED, TERMINATED, NO_READER = 2, 130, 143, 141


def main(argv: Sequence[str] | None = None) -> int:
    # A rank may wait in C++, where Python hears no signal.
    if argv is None and not _may_be_a_rank():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))  # `finally` blocks run
    if argv is None and sys.argv[1:2] == ["train"]:
        # From a scheduler, whose signal may come while libraries are imported: `fit` then takes it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    shorten_temporary_folder()
    try:
        status = _run(sys.argv[1:] if argv is None else list(argv))
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("aiscale: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `aiscale ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NO_READER
    except Exception as error:
        return _report(error)


def _report(error: Exception) -> int:
    """Print an error once in the job and return the exit status.

    A rank that fails alone ends here, so that no other rank waits for it.
    """
    ours = isinstance(error, OSError) or type(error).__module__.startswith("aiscale.")
    who, alone, status = "", False, BAD_INPUT if ours else 1
    if _may_be_a_rank():
        from aiscale.launch import LOST_STATUS
        from aiscale.measure.distributed import (
            ConnectError,
            end_now,
            find_launch,
            lost_another_rank,
        )

        if not isinstance(error, ConnectError) or hasattr(error, "failed_alike"):
            place = find_launch(os.environ)
            alone = place.size > 1 and not getattr(error, "failed_alike", True)  # set by fit
            who = f"rank {place.rank} of {place.size}: " * alone
            if ours and place.rank and not alone:
                # Rank 0 says it; srun ends all with the first.
                time.sleep(20 if place.launcher == "srun" else 0)
                return status
        if lost_another_rank(error):
            gone = (
                ", ".join(map(str, getattr(error, "gone", [])))
                or "another, whose own message says why"
            )
            print(f"aiscale: {who}lost its connection to rank {gone}", file=sys.stderr)
            end_now(LOST_STATUS)
    if ours:
        print(f"aiscale: {who}{error}", file=sys.stderr)
    else:
        traceback.print_exception(error)
    if alone:
        end_now(status)
    return status


def _may_be_a_rank() -> bool:
    """Whether a launcher seems to have started this process.

    Without importing torch, which takes two seconds.
    """
    return any("RANK" in name or name == "SLURM_PROCID" for name in os.environ)


def _run(argv: list[str]) -> int:
    if argv[:1] == ["verify"] and names_a_script(argv[1:]):  # torch alone is enough for it
        from aiscale.measure.referee import command

        return command.main(argv[1:])
    if argv[:1] == ["train"] and argv[1:2] not in ([], ["-h"], ["--help"]):
        from aiscale.train import command

        keep_caches_private()
        return command.main(argv[1:])
    parser = _parser(argv[0] if argv else "")
    args = parser.parse_args(argv)
    if args.version:
        from importlib.metadata import version

        print(version("aiscale"))
        return 0
    if not hasattr(args, "run"):
        parser.print_help()
        return 0
    keep_caches_private()
    return args.run(args) or 0


def names_a_script(argv: list[str]) -> bool:
    """Whether `aiscale verify ARGV` is about a script, and not about the kit's own cases."""
    own = argv[: argv.index("--")] if "--" in argv else argv
    return any(word.endswith(".py") or word in ("-m", "--module") for word in own)


def _train(args: argparse.Namespace) -> int:
    """Without a trainer's name."""
    print(
        f"aiscale: aiscale train NAME OPTIONS: NAME is one of {', '.join(TRAINERS)}",
        file=sys.stderr,
    )
    return BAD_INPUT


def commands(wanted: str = "") -> dict[str, argparse.ArgumentParser]:
    """The parser of each command.

    Arguments that a module of their own defines are there for `wanted` only.
    """
    return dict(_parser(wanted)._subparsers._group_actions[0].choices)


def _parser(wanted: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="aiscale",
        description="Train language models, from one process to many, and run the lessons "
        "about it.",
        epilog="Each command has its own --help with an example.",
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _command(
        commands,
        "train",
        "train a model",
        "aiscale train ddp --nproc 4; aiscale train ddp --help",
        _train,
    )
    _add_delegated(commands, wanted)
    return parser


def _command(commands, name: str, help: str, example: str, run) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=help,
        description=help[0].upper() + help[1:] + ".",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


#: name -> (help, example, the module that has add_arguments(parser) and run(args))
_DELEGATED = {
    "generate": (
        "continue a text with a trained model",
        "aiscale generate run --tokens 200",
        "train.generate",
    ),
    "verify": (
        "check that strategies, or a script of your own, agree with one process",
        "aiscale verify 'zero*' ddp-x2; aiscale verify train_ddp.py --nproc 4",
        "measure.command",
    ),
    "study": (
        "time settings, each against the same base",
        "aiscale study laptop --budget 30",
        "measure.study.command",
    ),
    "doctor": (
        "check whether this machine is ready to train",
        "srun aiscale doctor",
        "site.doctor",
    ),
    "data": (
        "prepare a corpus",
        "aiscale data prepare my_texts/ --out corpus/",
        "train.prepare.prepare",
    ),
    "compare": (
        "compare finished runs with a baseline",
        "aiscale compare runs/dense runs/radius",
        "measure.compare",
    ),
    "evaluate": (
        "run lm-eval on a model",
        "aiscale evaluate run --tasks aiscale_last_word",
        "train.evaluate",
    ),
    "export": (
        "write a model as a Hugging Face folder",
        "aiscale export run mine/",
        "train.export",
    ),
    "kernel": (
        "make Jupyter kernels for a site",
        "aiscale kernel install --site perlmutter",
        "site.kernel",
    ),
    "submit": (
        "check and submit a job",
        "aiscale submit launchers/frontier/ddp.sbatch --dry-run",
        "site.submit",
    ),
    "launchers": (
        "render the sbatch files of a site",
        "aiscale launchers --check",
        "site.launchers.render",
    ),
    "plan": (
        "plan a job",
        "aiscale plan --model forge-m --machine frontier --nodes 64",
        "plan.command",
    ),
    "exercises": (
        "make or grade exercises",
        "aiscale exercises --check 03",
        "lesson.exercise_command",
    ),
    "slides": (
        "build the decks, with figures and numbers of today",
        "aiscale slides 03_ddp",
        "lesson.slides",
    ),
    "room": (
        "show a class's guesses on the wall, and helpers who is stuck",
        "aiscale room --port 8765",
        "lesson.room_command",
    ),
    "take-home": (
        "zip what you have written and run",
        "aiscale take-home",
        "lesson.take_home",
    ),
    "notebooks": (
        "run the lessons headless",
        "aiscale notebooks 03 -p n_steps=20",
        "lesson.runner",
    ),
}


def _add_delegated(commands, wanted: str) -> None:
    """Of the modules that define arguments only the wanted one is imported: all start fast."""
    for name, (help, example, module) in _DELEGATED.items():
        parser = _command(commands, name, help, example, None)
        if name == wanted:
            face = importlib.import_module(f"aiscale.{module}")
            face.add_arguments(parser)
            parser.set_defaults(run=_plan if name == "plan" else face.run)


def _plan(args: argparse.Namespace) -> int:
    from aiscale.plan import browser, command

    if not args.page:
        return command.run(args)
    print(browser.write_page(Path(args.page)))
    return 0
