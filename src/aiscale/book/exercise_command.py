"""`aiscale exercises`: make the participants' notebooks, grade the graders, grade a notebook, collect a class's cards.

    aiscale exercises                            # workshop/solutions -> workshop/exercises
    aiscale exercises --check 03                 # every solution passes, every stub and wrong answer is refused
    aiscale exercises --grade my/03_ddp.ipynb
    aiscale exercises --collect cards/           # cards/anna.json, cards/ben.json, ...: progress/card.json of each

Exit status: 0 if all is well, 1 if an answer or a grader is not, 2 on bad input.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from aiscale.book.notebook import BookError, read
from aiscale.book.seat import Row, Seat, check_graders, grade
from aiscale.book.workbooks import lessons, make_all, problems, workshop
from aiscale.config import require_writable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="a lesson's name or number (default: all that have exercises)")
    task = parser.add_mutually_exclusive_group()
    task.add_argument("--in-step", action="store_true", help="check that sources, graders and notebooks fit together")
    task.add_argument("--check", action="store_true", help="the same, and try every solution, stub and wrong answer")
    task.add_argument("--grade", metavar="NOTEBOOK", help="run a participant's notebook and say which exercises pass")
    task.add_argument("--collect", metavar="FOLDER", help="the class's table, from progress/card.json of each member")
    add("--out", metavar="DIR", help="the folder to write notebooks to (default: workshop/exercises)")
    add("--seed", type=int, metavar="N", help="of the inputs that --check draws (default: a new one each time)")
    add("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Run the command with these arguments; returns the exit status."""
    if args.grade:
        read(args.grade)  # raises BookError
        with Seat() as seat:
            return _report(list(grade(seat, Path(args.grade))), {}, args.json)
    if args.collect:
        return _collect(Path(args.collect), args.json)
    root, chosen = workshop(), lessons(args.names)
    if args.in_step or args.check:
        return _check(list(chosen), root, args)
    out = Path(args.out) if args.out else root / "exercises"
    require_writable(out, "--out")
    for path in make_all(list(chosen), root, out):
        print(path)
    return 0


def _check(chosen: list[str], root: Path, args: argparse.Namespace) -> int:
    found = {lesson: problems(lesson, root) for lesson in chosen}
    rows: list[Row] = []
    if args.check:
        with Seat() as seat:
            for lesson in chosen if not any(found.values()) else []:
                for row in check_graders(seat, lesson, root, args.seed):
                    rows.append(row)
                    print(f"{row.exercise} {row.answer}: {'ok' if row.ok else 'NOT OK'}", file=sys.stderr, flush=True)
    return _report(rows, found, args.json)


def _report(rows: list[Row], found: Mapping[str, list[str]], as_json: bool) -> int:
    if as_json:
        print(json.dumps({"problems": found, "answers": [asdict(row) for row in rows]}, indent=1))
    else:
        table = Table("exercise", "answer", "", "what was said", "s", box=None, pad_edge=False)
        for row in rows:
            table.add_row(row.exercise, row.answer, "ok" if row.ok else "NOT OK", row.said, f"{row.seconds:.1f}")
        if rows:
            Console(markup=False, highlight=False).print(table)
        for lesson, lines in found.items():
            print("\n".join(f"{lesson}: {line}" for line in lines) or f"{lesson}: in step")
        if rows:
            print(f"{sum(row.ok for row in rows)} of {len(rows)} ok, in {sum(row.seconds for row in rows):.0f} s")
    return 0 if all(row.ok for row in rows) and not any(found.values()) else 1


# the class ----------------------------------------------------------------------------------------------------------


def _collect(folder: Path, as_json: bool) -> int:
    """For each exercise who has tried and done it, with medians; then how many participants have done how many."""
    entries, done = defaultdict(list), Counter()
    for who, lessons_of in _cards(folder).items():
        done[who] = 0
        for lesson in lessons_of.values():
            for id, entry in lesson["exercises"].items():
                entries[id].append(entry)
                done[who] += entry["state"] == "right"
    rows = {id: _row(entries[id]) for id in sorted(entries)}
    if as_json:
        print(json.dumps({"participants": len(done), "exercises": rows, "done": done}, indent=1))
        return 0
    table = Table("exercise", *list(next(iter(rows.values()), {}))[1:], box=None, pad_edge=False)
    for id, row in rows.items():
        title, *numbers = row.values()
        table.add_row(f"{id} {title}", *map(str, numbers))
    Console(markup=False, highlight=False).print(table)
    print(f"\n{len(done)} participants; tries, hints and minutes are medians. Exercises done by each:")
    for count, people in sorted(Counter(done.values()).items()):
        print(f"{count:3} {'█' * people} {people}")
    return 0


def _row(entries: list[dict]) -> dict:
    right = [entry for entry in entries if entry["state"] == "right"]
    names = {"tries": "tries", "hints": "hints", "taken": "minutes"}
    medians = {name: statistics.median(e.get(key, 0) for e in right) if right else "" for key, name in names.items()}
    counts = {"title": entries[0]["title"], "tried": len(entries), "done": len(right)}
    return {**counts, **medians, "planned": entries[0]["minutes"]}


def _cards(folder: Path) -> dict[str, dict]:
    """Each participant's lessons, of FOLDER/anna.json."""
    found, what = {}, "collect the files progress/card.json that check.card() writes"
    for path in sorted(folder.glob("*.json")):
        try:
            card = json.loads(path.read_text())["lessons"]
            for entry in (entry for lesson in card.values() for entry in lesson["exercises"].values()):
                _ = entry["state"], entry["title"], entry["minutes"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise BookError(f"{path} is not a card: {what}") from None
        found[path.stem] = card
    if not found:
        raise BookError(f"there are no cards in {folder}: {what}")
    return found
