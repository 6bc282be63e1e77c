"""`make soak`: jobs are disturbed repeatedly under a private Slurm, and checkpoints damaged; is anything lost?

make soak                                     # 20 rounds, 50 damages; resumes an interrupted soak
make soak ARGS='--seed 0 --only 7'            # repeat round 7

In each round one run of the shipped launcher is disturbed once in every way, at steps drawn from the seed, and resumed
each time. The exit status is 0 only if all rounds end with the undisturbed run's weights and losses, bit for bit.
"""

from __future__ import annotations

import argparse
import queue
import shutil
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from aiscale.hpc.rehearsal import RehearsalError, why_not
from soak.journal import Journal
from soak.plan import KINDS, SoakError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the soak; returns the exit status: 2 on bad input, 1 if anything was lost."""
    parser = argparse.ArgumentParser(
        prog="make soak",
        description="Disturb jobs over and over under a private Slurm, and damage checkpoints: does anything get lost?",
        epilog="example: make soak ARGS='--rounds 3'",
    )
    _add_arguments(parser)
    try:
        return _run(parser.parse_args(argv))
    except KeyboardInterrupt:
        print("soak: interrupted; the same command goes on", file=sys.stderr)
        return 130
    except (RehearsalError, SoakError) as error:
        print(f"soak: {error}", file=sys.stderr)
        return 2


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="runs to disturb (default: 20)")
    parser.add_argument("--variants", type=int, default=50, metavar="N", help="checkpoints to damage (default: 50)")
    parser.add_argument("--seed", type=int, default=0, help="decides what happens when (default: 0)")
    parser.add_argument("--only", type=int, metavar="ROUND", help="this round alone, and no damages")
    parser.add_argument(
        "--kinds",
        default=",".join(KINDS),
        metavar="KIND,...",
        help="how to disturb: " + "; ".join(f"{kind}: {what}" for kind, what in KINDS.items()),
    )
    parser.add_argument(
        "--strategy", default="ddp", metavar="NAME", help="parallel.strategy of the runs (default: ddp)"
    )
    parser.add_argument("--parallel", type=int, default=2, metavar="N", help="rounds side by side (default: 2)")
    parser.add_argument("--dir", default="build/soak", metavar="DIR", help="where all goes (default: build/soak)")
    parser.add_argument("--fresh", action="store_true", help="start anew where an interrupted one would go on")


def _run(args: argparse.Namespace) -> int:
    kinds, wanted = _checked(args)
    if wanted["round"] and (reason := why_not()):
        raise SoakError(f"{reason}; damaged checkpoints alone: --rounds 0")
    folder = Path(args.dir).absolute()
    if args.only is not None:
        folder = folder.with_name(f"{folder.name}-only")
    about = {"seed": args.seed, "kinds": kinds, "strategy": args.strategy}
    journal = Journal.open(folder, about, wanted, fresh=args.fresh or args.only is not None)
    if journal.entries:
        _say(f"goes on in {folder}, where {len(journal.entries)} of {sum(map(len, wanted.values()))} are done")
    _damage(journal, wanted["damage"])
    _disturb(journal, [n for n in wanted["round"] if ("round", n) not in journal.entries], args, kinds)
    return _report(journal, kinds)


def _checked(args: argparse.Namespace) -> tuple[list[str], dict[str, list[int]]]:
    """(kinds of disturbance, numbers of all rounds and damages)"""
    kinds = args.kinds.split(",")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise SoakError(f"--kinds {args.kinds}: there is no {unknown[0]!r}, but {', '.join(KINDS)}")
    for name, least in (("rounds", 0), ("variants", 0), ("parallel", 1)):
        if getattr(args, name) < least:
            raise SoakError(f"--{name} is {getattr(args, name)}: it must be at least {least}")
    if args.only is not None:
        return kinds, {"round": [args.only], "damage": []}
    return kinds, {"round": list(range(1, args.rounds + 1)), "damage": list(range(args.variants))}


def _damage(journal, seeds: Sequence[int]) -> None:
    from soak import damage

    seeds = [seed for seed in seeds if ("damage", seed) not in journal.entries]
    if not seeds:
        return
    with tempfile.TemporaryDirectory() as place:
        whole = Path(place, "whole")
        losses = damage.train_whole(whole)
        for seed in seeds:
            wrong = damage.resume_after_damage(whole, Path(place, str(seed)), seed=seed, losses=losses)
            shutil.rmtree(Path(place, str(seed)))
            journal.add("damage", seed, wrong=wrong)
            if wrong:
                _say(f"damage {seed}: {wrong}")
    _say(f"{len(seeds)} damaged checkpoints tried")


def _disturb(journal, numbers: Sequence[int], args: argparse.Namespace, kinds: Sequence[str]) -> None:
    if not numbers:
        return
    todo, done = queue.Queue(), queue.Queue()
    for number in numbers:
        todo.put(number)
    workers = _Workers(journal.folder, args, kinds, todo, done)
    # Daemon threads, and a Slurm that ends with its owner: after an interrupt there is nothing to wait for.
    each = range(1, min(args.parallel, len(numbers)) + 1)
    threads = [threading.Thread(target=workers.work, args=(worker,), daemon=True) for worker in each]
    for thread in threads:
        thread.start()
    for _ in numbers:
        answer = done.get()
        if isinstance(answer, Exception):
            raise answer
        number, outcome = answer
        journal.add("round", number, wrong=outcome.wrong, hits=outcome.hits, seconds=round(outcome.seconds, 1))
        hits = ", ".join(f"{kind} at step {at} (went on from {start})" for kind, at, start in outcome.hits)
        _say(f"round {number}: {hits}: {outcome.wrong or 'nothing lost'}; {outcome.seconds:.0f} s")
        if outcome.wrong:
            _say(f"round {number} again: {_repeat(args, kinds, number)}; its files: {outcome.folder}")
    for thread in threads:
        thread.join()


def _repeat(args: argparse.Namespace, kinds: Sequence[str], number: int) -> str:
    words = f"--seed {args.seed} --only {number}"
    words += f" --kinds {','.join(kinds)}" if kinds != list(KINDS) else ""
    words += f" --strategy {args.strategy}" if args.strategy != "ddp" else ""
    return f"make soak ARGS='{words}'"


class _Workers:
    """Play rounds until none is left, each thread in its own testbed."""

    def __init__(self, folder: Path, args, kinds, todo: queue.Queue, done: queue.Queue) -> None:
        self.folder, self.args, self.kinds, self.todo, self.done = folder, args, kinds, todo, done
        self.reference, self.first = None, threading.Lock()

    def work(self, worker: int) -> None:
        from soak import Testbed, plan, play, reference

        try:
            with Testbed(self.folder / f"testbed{worker}", strategy=self.args.strategy) as testbed:
                with self.first:  # one thread makes the reference, the others wait
                    self.reference = self.reference or reference(testbed, "undisturbed")
                while True:
                    number = self.todo.get_nowait()
                    events = plan(seed=self.args.seed, number=number, kinds=self.kinds)
                    self.done.put((number, play(testbed, f"round-{number}", events, self.reference)))
        except queue.Empty:
            pass
        except Exception as error:
            self.done.put(error)


def _report(journal, kinds: Sequence[str]) -> int:
    entries = journal.entries.values()
    hits = [hit[0] for entry in entries for hit in entry.get("hits", ())]
    for kind in kinds if hits else ():
        print(f"{KINDS[kind]:40} {hits.count(kind):3} times")
    for what, text in (
        ("round", "rounds that ended as if undisturbed"),
        ("damage", "damaged checkpoints never resumed from"),
    ):
        held = [not entry["wrong"] for entry in entries if entry["what"] == what]
        if held:
            print(f"{text:40} {sum(held):3} of {len(held)}")
    return 1 if any(entry["wrong"] for entry in entries) else 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
