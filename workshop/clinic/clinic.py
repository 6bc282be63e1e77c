"""The bug clinic: training programs with a fault each, as colleagues report them. Find it, mend it, have it checked.

    python workshop/clinic/clinic.py list
    python workshop/clinic/clinic.py run 01                    # runs your copy, mine/01_files.py
    python workshop/clinic/clinic.py check 01 --because c      # your diagnosis, and your copy against serial training
    python workshop/clinic/clinic.py hint 01                   # one hint more each time
    python workshop/clinic/clinic.py explain 01                # what it was, once you have solved it (or --give-up)

Each program has a page beside it, 01_files.md. What you solve is kept in progress/clinic.json, on this machine only.
"""

import argparse
import importlib
import json
import os
import random
import shlex
import shutil
import sys
from pathlib import Path

PROGRAMS = Path(__file__).resolve().parent
sys.path[:0] = [str(PROGRAMS), str(PROGRAMS.parent / "solutions" / "clinic")]
SOLVED = ["diagnosis", "mended"]


class Refused(Exception):
    """A wrong word on the command line; the message is one line."""


def cases():
    """name -> the heading of its page."""
    pages = sorted(PROGRAMS.glob("[0-9][0-9]_*.md"))
    return {page.stem: page.read_text().splitlines()[0].removeprefix("# ") for page in pages}


def named(word):
    found = [name for name in cases() if word and name.startswith(word.zfill(2) if word.isdigit() else word)]
    if len(found) != 1:
        raise Refused(f"no case is called {word!r}: it may be one of {', '.join(cases())}")
    return found[0]


def solution(name):
    return importlib.import_module(f"{name}_solved")


def mine(name, folder):
    """The participant's copy of a program; made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in (f"{name}.py", "model.py"):
        if not (folder / file).exists():
            shutil.copy(PROGRAMS / file, folder / file)
    return (folder / f"{name}.py").resolve()


def known(folder):
    """name -> {"done": what is solved of it, "hints": how many were shown, ...}."""
    file = folder / "clinic.json"
    return json.loads(file.read_text()) if file.exists() else {}


def note(folder, name, hints=0, gave_up=False, **found):
    """Keep what was shown or found, also for the progress card; returns what is solved of the case."""
    from aiscale.lesson.progress import save

    everything = known(folder)
    entry = everything.setdefault(name, {"done": [], "hints": 0, "tries": 0, "solution": False})
    entry["done"] = [what for what in SOLVED if found.get(what, what in entry["done"])]
    entry["hints"], entry["tries"] = max(hints, entry["hints"]), entry["tries"] + ("mended" in found)
    entry["solution"] |= gave_up and entry["done"] != SOLVED
    (folder / "clinic.json").write_text(json.dumps(everything, indent=1) + "\n")
    card = {key: entry[key] for key in ("tries", "hints", "solution")}
    card |= {"state": "right" if entry["done"] == SOLVED else "wrong", "title": cases()[name]}
    save("exercises", f"clinic.{name[:2]}", card, "clinic")
    return entry["done"]


# the commands: each returns what --json prints, and the lines for a person --------------------------------------------


def list_(args):
    done = {name: known(args.mine).get(name, {}).get("done", []) for name in cases()}
    says = {name: "solved" if parts == SOLVED else ", ".join(parts) for name, parts in done.items()}
    return done, [f"{name:16} {title:60} {says[name]}".rstrip() for name, title in cases().items()]


def run(args):
    """Run the participant's copy, and show what each rank printed and counted."""
    name = named(args.case)
    from jobs import start  # loads torch

    program, ranks = mine(name, args.mine), args.ranks or solution(name).RANKS
    job = start(program, ranks, folder=args.mine, **dict(word.partition("=")[::2] for word in args.options))
    lines = [f"torchrun --nproc-per-node={ranks} {shlex.quote(os.path.relpath(program))}", ""]
    for rank, code in enumerate(job.codes):
        errors = job.said(rank, "err").strip().splitlines()[-6:] if code else []
        lines += [f"[rank {rank}] {line}" for line in (*job.said(rank).splitlines(), *errors)]
    for rank, seen in enumerate(job.ranks):
        work = sum(step["work"] for step in seen["steps"])
        lines += [f"[rank {rank}] {len(seen['steps'])} optimizer steps, {work} bytes through the model"]
    lines += ["", job.trouble() or "it ran to its end", f"its page: {PROGRAMS / name}.md"]
    return {"case": name, "trouble": job.trouble(), "losses": job.losses, "failed": bool(job.trouble())}, lines


def check(args):
    """The diagnosis, if one is given, and the participant's copy."""
    name = named(args.case)
    if args.because not in (None, "a", "b", "c", "d"):
        raise Refused(f"--because is {args.because!r}: it must be one of the letters on {name}.md")
    from jobs import Unmended  # loads torch

    case, program, said = solution(name), mine(name, args.mine), {}
    if args.because:
        said["diagnosis"] = {case.RIGHT: "right", **case.REPLIES}[args.because]
        note(args.mine, name, diagnosis=args.because == case.RIGHT)
    try:
        case.check(program, seed=random.SystemRandom().randrange(1, 10**6))
        said["mended"] = "right"
    except Unmended as found:
        said["mended"] = f"not yet: {found}"
    done = note(args.mine, name, mended=said["mended"] == "right")
    lines = [f"{'✓' if text == 'right' else '✗'} {what}: {text}" for what, text in said.items()]
    if done == SOLVED:
        lines += [f"Case {name} is solved. `explain {name[:2]}` says more about it."]
    elif "mended" in done:
        lines += ["What was it? Add your diagnosis: --because, with a letter from the page"]
    return {"case": name, "solved": done == SOLVED, **said, "failed": done != SOLVED}, lines


def hint(args):
    name = named(args.case)
    mine(name, args.mine)
    hints = solution(name).HINTS
    shown = min(known(args.mine).get(name, {}).get("hints", 0) + 1, len(hints))
    note(args.mine, name, hints=shown)
    return {"case": name, "hints": hints[:shown]}, [f"{i + 1} of {len(hints)}: {hints[i]}" for i in range(shown)]


def explain(args):
    name = named(args.case)
    if not args.give_up and known(args.mine).get(name, {}).get("done") != SOLVED:
        raise Refused(f"case {name} is not solved yet: `hint {name[:2]}` helps; --give-up shows the explanation now")
    mine(name, args.mine)
    note(args.mine, name, gave_up=args.give_up)
    case = solution(name)
    lines = [case.EXPLANATION, "One way to mend it:"]
    for old, new in case.MENDED:
        lines += ["", *(f"- {line}" for line in old.splitlines()), *(f"+ {line}" for line in new.splitlines())]
    return {"case": name, "right": case.RIGHT, "explanation": case.EXPLANATION, "change": case.MENDED}, lines


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    added = {}
    for action in (list_, run, check, hint, explain):
        name = action.__name__.strip("_")
        command = added[name] = commands.add_parser(name)
        command.set_defaults(action=action)
        if name != "list":
            command.add_argument("case", metavar="CASE", help="its number or name, such as 01")
        command.add_argument("--json", action="store_true", help="print one JSON object")
        command.add_argument("--mine", type=Path, default=PROGRAMS / "mine", metavar="FOLDER", help="your copies")
    added["run"].add_argument("--ranks", type=int, metavar="N")
    added["run"].add_argument("options", nargs="*", metavar="OPTION=VALUE", help="of the program, such as steps=20")
    added["check"].add_argument("--because", metavar="LETTER", help="your diagnosis, a letter from the page")
    added["explain"].add_argument("--give-up", action="store_true", help="also if it is not solved")
    args = parser.parse_args(argv)
    try:
        found, lines = args.action(args)
    except (Refused, OSError) as refusal:
        print(f"clinic: {refusal}", file=sys.stderr)
        return 2
    print(json.dumps(found) if args.json else "\n".join(lines))
    return int(found.get("failed", False))


if __name__ == "__main__":
    sys.exit(main())
