"""The bug clinic: training programs with a fault each, as colleagues report them. Find it, mend it, have it checked.

    python workshop/clinic/clinic.py list
    python workshop/clinic/clinic.py run 01                    # runs your copy, mine/01_files.py, and shows what each rank did
    python workshop/clinic/clinic.py check 01 --because c      # your diagnosis, and your copy against serial training
    python workshop/clinic/clinic.py hint 01                   # one hint more each time
    python workshop/clinic/clinic.py explain 01                # what it was, once you have solved it (or --give-up)

Each program has a page beside it, 01_files.md. What you solve is kept in progress/clinic.json, on this machine only.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import shutil
import sys
from pathlib import Path

PROGRAMS = Path(__file__).resolve().parent
SOLUTIONS = PROGRAMS.parent / "solutions" / "clinic"
sys.path[:0] = [str(PROGRAMS), str(SOLUTIONS)]
os.environ["JPY_SESSION_NAME"] = "clinic"  # the name under which aiscale.book.progress keeps what is solved


class Refused(Exception):
    """A wrong word on the command line; the message is one line."""


def cases() -> dict[str, str]:
    """name -> the heading of its page."""
    pages = sorted(PROGRAMS.glob("[0-9][0-9]_*.md"))
    return {page.stem: page.read_text().splitlines()[0].removeprefix("# ") for page in pages}


def named(word: str) -> str:
    found = [name for name in cases() if word and name.startswith(word.zfill(2) if word.isdigit() else word)]
    if len(found) != 1:
        raise Refused(f"no case is called {word!r}: it may be one of {', '.join(cases())}")
    return found[0]


def solution(name: str):
    spec = importlib.util.spec_from_file_location(f"solution_{name}", SOLUTIONS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def mine(name: str, folder: Path) -> Path:
    """The participant's copy of a program; made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in (f"{name}.py", "model.py"):
        if not (folder / file).exists():
            shutil.copy(PROGRAMS / file, folder / file)
    return (folder / f"{name}.py").resolve()


def known(folder: Path) -> dict:
    """name -> {"diagnosis", "mended", "hints"} of what this participant has done."""
    file = folder / "clinic.json"
    return json.loads(file.read_text()) if file.exists() else {}


def note(folder: Path, name: str, **done) -> dict:
    """Keep what was done, also for the progress card; returns all that is known of the case."""
    everything = known(folder)
    entry = everything[name] = {**everything.get(name, {}), **done}
    (folder / "clinic.json").write_text(json.dumps(everything, indent=1) + "\n")
    if "hints" not in done:
        from aiscale.book.progress import save

        right, solved = entry.get("diagnosis") is True, entry.get("diagnosis") is True and entry.get("mended") is True
        grade = "exact" if solved else "near" if right or entry.get("mended") else "off"
        guess = [word for word in ("diagnosis", "mended") if entry.get(word)]
        save(f"clinic {name}", {"kind": "choice", "unit": "", "guess": " and ".join(guess) or "not yet",
                                "measured": "diagnosis and mended", "ratio": None, "grade": grade})  # fmt: skip
    return entry


def list_(args) -> dict:
    done = known(args.mine)
    found = {}
    for name, title in cases().items():
        state = done.get(name, {})
        parts = [word for word in ("diagnosis", "mended") if state.get(word)]
        found[name] = {"title": title, "done": parts}
        if not args.json:
            print(f"{name:16} {title:60} {'solved' if len(parts) == 2 else ', '.join(parts)}".rstrip())
    return found


def run(args) -> dict:
    """Run the participant's copy, and show what each rank printed and counted."""
    from jobs import start

    name = named(args.case)
    program, ranks = mine(name, args.mine), args.ranks or solution(name).RANKS
    options = dict(word.lstrip("-").partition("=")[::2] for word in args.options)
    job = start(program, ranks, folder=args.mine, **options)
    if not args.json:
        print(f"torchrun --nproc-per-node={ranks} {os.path.relpath(program)}\n")
        for rank, seen in enumerate(job.ranks):
            errors = job.said(rank, "err").strip().splitlines() if job.codes[rank] and not job.stacks else []
            for line in [*job.said(rank).splitlines(), *errors[-6:]]:
                print(f"[rank {rank}] {line}")
        for rank, seen in enumerate(job.ranks):
            work = sum(step["work"] for step in seen["steps"])
            print(f"[rank {rank}] {len(seen['steps'])} optimizer steps, {work} bytes through the model")
        print(f"\n{job.trouble() or 'it ran to its end'}", f"Its page: {PROGRAMS.name}/{name}.md", sep="\n")
    return {"case": name, "trouble": job.trouble(), "losses": job.losses}


def check(args) -> dict:
    """The diagnosis, if one is given, and the participant's copy."""
    from jobs import Unmended

    name, said = named(args.case), {}
    case = solution(name)
    if args.because:
        letter = args.because.lower()
        if letter != case.RIGHT and letter not in case.REPLIES:
            raise Refused(f"--because is {args.because!r}: it must be one of the letters on {name}.md")
        right = letter == case.RIGHT
        said["diagnosis"] = "right" if right else case.REPLIES[letter]
        note(args.mine, name, diagnosis=right)
    program = mine(name, args.mine)
    try:
        case.check(program, seed=random.SystemRandom().randrange(1, 10**6))
        said["program"] = "mended"
    except Unmended as found:
        said["program"] = str(found)
    entry = note(args.mine, name, mended=said["program"] == "mended")
    solved = bool(entry.get("mended") and entry.get("diagnosis"))
    if not args.json:
        for what, text in said.items():
            print(f"{'✓' if text in ('right', 'mended') else '✗'} {what}: {text}")
        if solved:
            print(f"Case {name} is solved. `explain {name[:2]}` says more about it.")
        elif entry.get("mended"):
            print("The program is mended. What was it? Add your diagnosis: --because, with a letter from the page")
    return {"case": name, "solved": solved, **said}


def hint(args) -> dict:
    name = named(args.case)
    hints = solution(name).HINTS
    mine(name, args.mine)
    shown = min(known(args.mine).get(name, {}).get("hints", 0) + 1, len(hints))
    note(args.mine, name, hints=shown)
    if not args.json:
        for number, text in enumerate(hints[:shown], 1):
            print(f"{number} of {len(hints)}: {text}")
    return {"case": name, "hints": hints[:shown]}


def explain(args) -> dict:
    name = named(args.case)
    done, case = known(args.mine).get(name, {}), solution(name)
    if not args.give_up and not (done.get("mended") and done.get("diagnosis")):
        raise Refused(f"case {name} is not solved yet: `hint {name[:2]}` helps; --give-up shows the explanation now")
    change = [{"before": old, "after": new} for old, new in case.MENDED]
    if not args.json:
        print(f"{case.EXPLANATION}\nOne way to mend it:")
        for old, new in case.MENDED:
            print(
                "", *(f"- {line}" for line in old.splitlines()), *(f"+ {line}" for line in new.splitlines()), sep="\n"
            )
    return {"case": name, "right": case.RIGHT, "explanation": case.EXPLANATION, "change": change}


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, action, about in (
        ("list", list_, "the cases, and which you have solved"),
        ("run", run, "run your copy of a program on its ranks"),
        ("check", check, "check your diagnosis and your copy"),
        ("hint", hint, "one hint more"),
        ("explain", explain, "what it was"),
    ):
        command = commands.add_parser(name, help=about)
        command.set_defaults(action=action)
        if name != "list":
            command.add_argument("case", metavar="CASE", help="its number or name, such as 01")
        command.add_argument("--json", action="store_true", help="print one JSON object")
        command.add_argument("--mine", type=Path, default=PROGRAMS / "mine", metavar="FOLDER", help="your copies")
        if name == "run":
            command.add_argument("--ranks", type=int, metavar="N")
            command.add_argument("options", nargs="*", metavar="OPTION=VALUE", help="of the program, such as steps=20")
        if name == "check":
            command.add_argument("--because", metavar="LETTER", help="your diagnosis, a letter from the page")
        if name == "explain":
            command.add_argument("--give-up", action="store_true", help="also if it is not solved")
    args = parser.parse_args(argv)
    try:
        found = args.action(args)
    except (Refused, OSError) as refusal:
        print(f"clinic: {refusal}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(found))
    return 0 if found.get("solved", True) and not found.get("trouble") else 1


if __name__ == "__main__":
    sys.exit(main())
