"""The `aiscale` command: argument parsing over the package's functions.

Progress goes to standard error, results to standard output, and the exit status is 0 only on success. Bad input ends
in one line that says what to do.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = _parser(argv[0] if argv else "")
    args = parser.parse_args(argv)
    if not hasattr(args, "run"):
        parser.print_help()
        return 0
    try:
        return args.run(args) or 0
    except KeyboardInterrupt:
        print("aiscale: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        return _fail(error)


def _fail(error: Exception) -> int:
    """Print the error, and end this rank so that no other rank waits for it; returns the exit status."""
    from aiscale.distributed import LOST_STATUS, ConnectError, end_now, find_launch, lost_another_rank

    if isinstance(error, ConnectError):
        print(f"aiscale: {error}", file=sys.stderr)
        return 2
    place = find_launch(os.environ)
    alone = not getattr(error, "failed_alike", True)  # set by fit; before ranks connect they all fail alike
    who = f"rank {place.rank} of {place.size}: " if alone else ""
    status = 2
    if place.size > 1 and lost_another_rank(error):
        gone = ", ".join(map(str, getattr(error, "gone", [])))
        what = f"rank {gone}, which has ended" if gone else "another rank, whose own message says why"
        print(f"aiscale: {who}lost its connection to {what}", file=sys.stderr)
        status = LOST_STATUS
    elif not _is_ours(error):
        traceback.print_exception(error)
        status = 1
    elif alone or place.rank == 0:
        print(f"aiscale: {who}{error}", file=sys.stderr)
    if alone:
        end_now(status)
    return status


def _is_ours(error: Exception) -> bool:
    """Whether the error is one of ours, whose message is one line for the user."""
    return type(error).__module__.startswith("aiscale.")


def _parser(wanted: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="aiscale",
        description="Train language models, from one process to many, and run the lessons about it.",
        epilog="Each command has its own --help with an example.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for add in (_add_train, _add_generate, _add_verify):
        add(commands)
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


# train ---------------------------------------------------------------------------------------------------------------


def _add_train(commands) -> None:
    parser = _command(
        commands,
        "train",
        "train a model",
        "aiscale train --recipe laptop --set parallel.strategy=ddp --nproc 2",
        _train,
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--recipe", metavar="NAME", help="a preset run; --list-recipes names them")
    source.add_argument("--config", metavar="FILE", help="a run as JSON, such as the run.json of an earlier one")
    source.add_argument("--list-recipes", action="store_true", help="name the recipes and end")
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], help="change a setting, such as model.n_layer=4"
    )
    parser.add_argument("--nproc", type=int, metavar="N", help="start N ranks on this machine")
    parser.add_argument("--runs-dir", default="runs", metavar="DIR", help="where results go (default: runs)")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint of this run")
    parser.add_argument("--resume-if-any", action="store_true", help="the same, or start where there is none yet")
    parser.add_argument("--overwrite", action="store_true", help="replace the results of an earlier run")
    parser.add_argument("--note-saved", metavar="FILE", help="write here which checkpoint is whole; `stopped`, `hung`")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("--show", action="store_true", help="print the run as JSON and end")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def _train(args: argparse.Namespace) -> int:
    from aiscale.recipes import RECIPES

    if args.list_recipes:
        for name, make in RECIPES.items():
            print(f"{name:20} {(make.__doc__ or '').strip().splitlines()[0]}")
        return 0
    run = _configured(args)
    if args.show:
        print(run.to_json())
        return 0
    if args.nproc is not None:
        return _train_here(args, run)
    from aiscale.train import AlreadyTrained, fit

    # All ranks agree: none writes this file before all have connected.
    resume = args.resume or (args.resume_if_any and (Path(args.runs_dir) / run.name / "run.json").exists())
    options = {"overwrite": args.overwrite, "progress": not args.quiet, "note_saved": args.note_saved}
    try:
        result = fit(run, runs_dir=args.runs_dir, resume=resume, **options)
    except AlreadyTrained as done:
        if not args.resume_if_any:
            raise
        if os.environ.get("RANK", "0") == "0":  # a job that was requeued after its last step
            print(f"aiscale: {done}", file=sys.stderr)
        return 0
    if os.environ.get("RANK", "0") == "0":  # connect() sets it under every launcher
        _print_summary(result, args)
    return 130 if result.stopped else 0


def _configured(args: argparse.Namespace):
    from aiscale.config import ConfigError, Run
    from aiscale.recipes import recipe

    if args.config:
        try:
            tree = json.loads(Path(args.config).read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"--config {args.config} cannot be read as JSON: {error}") from None
        run = Run.from_dict(tree.get("run", tree))
    else:
        run = recipe(args.recipe or "laptop")
    return run.override(*args.set)


def _train_here(args: argparse.Namespace, run) -> int:
    """Start this command as N ranks, after checking what can be checked before that."""
    from aiscale.config import ConfigError

    if args.nproc < 1:
        raise ConfigError(f"--nproc is {args.nproc}: it must be at least 1")
    _share_cores(args.nproc)
    from aiscale.distributed import find_launch, launch

    place = find_launch(os.environ)
    if place.size > 1 or "RANK" in os.environ:
        raise ConfigError(
            f"--nproc starts ranks, but this process is one already (rank {place.rank} of {place.size}, by "
            f"{place.launcher}): leave --nproc out"
        )
    run.check_world(args.nproc)

    def warm_up() -> None:
        import aiscale.train  # noqa: F401
        from aiscale.parallel import preload

        preload(run.parallel.strategy)

    return launch(args.nproc, ["-m", "aiscale", *_without_nproc(sys.argv[1:])], warm_up=warm_up)


def _share_cores(nproc: int) -> None:
    """Set thread counts before torch is first imported: ranks are forked from this process."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // nproc)))
    # numpy starts these threads at import, and a process with threads cannot be forked. Overrides the environment,
    # because ranks compute with torch.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"


def _without_nproc(argv: list[str]) -> list[str]:
    rest, skip = [], False
    for word in argv:
        if skip or word.startswith("--nproc="):
            skip = False
        elif word == "--nproc":
            skip = True
        else:
            rest.append(word)
    return rest


def _print_summary(result, args: argparse.Namespace) -> None:
    summary = result.summary
    if args.json:
        print(json.dumps({"path": str(result.path), "stopped": result.stopped, **summary}))
        return
    if args.quiet:
        return
    evaluated = ""
    if summary["val_loss"] is not None:  # None if the run was stopped
        evaluated = f"validation loss {summary['val_loss']:.3f}, perplexity {summary['val_perplexity']:.2f}; "
    print(
        f"{result.path}: {summary['steps']} steps, {summary['tokens']:,} tokens in {summary['seconds']:.1f} s "
        f"({summary['tokens_per_s']:,.0f} tokens/s); {evaluated}"
        f"at most {summary['peak_memory_bytes'] / 2**20:,.0f} MiB a rank"
    )
    if result.stopped:
        print("stopped early; the same command with --resume goes on from here", file=sys.stderr)


# generate ------------------------------------------------------------------------------------------------------------


def _add_generate(commands) -> None:
    parser = _command(
        commands,
        "generate",
        "continue a text with a trained model",
        "aiscale generate runs/laptop --prompt 'The ' --tokens 200",
        _generate,
    )
    parser.add_argument("path", help="a run folder, such as runs/laptop")
    parser.add_argument("--best", action="store_true", help="use the checkpoint with the lowest validation loss")
    parser.add_argument("--prompt", default="The ", help="the text to continue (default: 'The ')")
    parser.add_argument("--tokens", type=int, default=200, help="tokens to add (default: 200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 is greedy (default: 0.8)")
    parser.add_argument("--top-k", type=int, default=0, help="keep the k likeliest tokens; 0: all")
    parser.add_argument("--top-p", type=float, default=1.0, help="keep the likeliest tokens of this total probability")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: 0)")


def _generate(args: argparse.Namespace) -> int:
    import torch

    from aiscale.train import open_trained

    model, tokenizer = open_trained(args.path, best=args.best)
    prompt = torch.tensor([tokenizer.encode(args.prompt)])
    generator = torch.Generator().manual_seed(args.seed)
    text = model.generate(
        prompt,
        args.tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        generator=generator,
    )
    print(tokenizer.decode(text[0].tolist()))
    return 0


# verify --------------------------------------------------------------------------------------------------------------


def _add_verify(commands) -> None:
    parser = _command(
        commands, "verify", "hold every strategy to the serial result", "aiscale verify 'zero*' ddp-x2", _verify
    )
    parser.add_argument("rungs", nargs="*", metavar="RUNG", help="which ones, such as 'zero*' (default: all)")
    parser.add_argument("--json", action="store_true", help="print the verdicts as JSON")
    parser.add_argument("--list", action="store_true", help="name the rungs and end")


def _verify(args: argparse.Namespace) -> int:
    from rich.console import Console

    from aiscale.verify import RUNGS, climb, table

    if args.list:
        print(*RUNGS, sep="\n")
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


# bench, data, notebooks ----------------------------------------------------------------------------------------------

#: name -> (help, example, the module that has add_arguments(parser) and run(args))
_DELEGATED = {
    "bench": ("measure this machine", "aiscale bench model --json", "aiscale.bench.command"),
    "doctor": (
        "say whether this machine, or job, is ready to train",
        "srun aiscale doctor",
        "aiscale.hpc.doctor.command",
    ),
    "data": ("prepare a corpus", "aiscale data prepare my_texts/ --out corpus/", "aiscale.data.command"),
    "evaluate": (
        "run tasks of the lm-eval harness on a trained model",
        "aiscale evaluate runs/laptop --tasks aiscale_last_word,aiscale_rolling",
        "aiscale.train.evaluate.command",
    ),
    "export": (
        "write a trained model as a Hugging Face folder",
        "aiscale export runs/laptop mine/",
        "aiscale.train.export",
    ),
    "kernel": (
        "make a Jupyter kernel that loads a site's modules",
        "aiscale kernel install --site perlmutter",
        "aiscale.hpc.jupyter.kernel",
    ),
    "launchers": ("render the sbatch files of a site", "aiscale launchers --check", "aiscale.hpc.launchers.command"),
    "plan": (
        "say how many nodes, which layout, how long, and whether it fits",
        "aiscale plan --model forge-m --machine frontier --nodes 64",
        "aiscale.plan.command",
    ),
    "rehearse": (
        "run a command beside a private Slurm cluster of virtual nodes",
        "aiscale rehearse --site frontier --nodes 2 -- sbatch --wait job.sbatch",
        "aiscale.hpc.rehearsal.command",
    ),
    "notebooks": ("run the lessons headless", "aiscale notebooks 03 -p n_steps=20", "aiscale.book.command"),
}


def _add_delegated(commands, wanted: str) -> None:
    """Commands whose arguments are defined in their own module; only the wanted one is imported, so all start fast."""
    for name, (help, example, module) in _DELEGATED.items():
        parser = _command(commands, name, help, example, None)
        if name == wanted:
            face = importlib.import_module(module)
            face.add_arguments(parser)
            parser.set_defaults(run=_plan if name == "plan" else face.run)


def _plan(args: argparse.Namespace) -> int:
    """The plan; with --launcher also the batch file of the layout, from the site's profile."""
    from aiscale.plan import command

    if not args.launcher:
        return command.run(args)
    from aiscale.hpc.launchers.lessons import Lesson
    from aiscale.hpc.launchers.render import render
    from aiscale.hpc.sites import find

    settings, answer = command.launch_plan(args)
    figures = f"{answer.step.total_s:.3g} s a step, {answer.memory_gb:.0f} GB a device"
    lesson = Lesson(
        name=Path(args.launcher).stem,
        title=f"{args.model}, planned",
        about=f"{answer.layout.name()}: planned at {figures}.",
        recipe=args.model,
        settings=tuple((setting, "as planned") for setting in settings),
        ranks=answer.layout.gpus,
    )
    Path(args.launcher).write_text(render(lesson, find(args.machine)))
    print(f"{args.launcher}: {lesson.about}")
    return 0
