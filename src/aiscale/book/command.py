"""`aiscale notebooks`: run, list, check and strip notebooks, and build their gallery.

    aiscale notebooks 03_ddp -p n_steps=20
    aiscale notebooks --check

Exit status: 0 if every notebook passed, 1 if one failed, 2 on bad input, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from aiscale.book.core import Pace, is_optional, measure
from aiscale.book.form import check_form, strip
from aiscale.book.notebook import BookError, Notebook, notebooks
from aiscale.book.results import load_results
from aiscale.book.running import CELL_TIMEOUT_S, TIMEOUT_S, Progress, Result, to_run
from aiscale.book.running import run as run_notebooks

_COLORS = {"runs": "cyan", "passed": "green", "unchanged": "green", "failed": "bold red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="a notebook's name, number or path (default: all, in reading order)")
    task = parser.add_mutually_exclusive_group()
    task.add_argument("--list", action="store_true", help="list them: what they need, minutes, parameters")
    task.add_argument("--check", action="store_true", help="check their form, and that core cells need no optional one")
    task.add_argument("--strip", action="store_true", help="remove outputs and editors' metadata, format the code")
    add("-p", "--parameter", metavar="KEY=VALUE", action="append", default=[], help="set a parameter of the notebooks")
    add("--core", action="store_true", help="the lessons' core path: no optional cells, no appendices")
    add("--until", metavar="SECTION", default="", help="run the cells above the section with this heading, and stop")
    add("--gallery", action="store_true", help="also build the gallery")
    add("--resume", action="store_true", help="skip notebooks that have passed and have not changed since")
    add("--out", default="build", metavar="DIR", help="the folder for executed copies and the gallery (default: build)")
    add("--root", metavar="DIR", help="the folder of the notebooks (default: notebooks)")
    queued = "plus a day if ranks wait in a queue"
    limit = {"type": float, "metavar": "S"}
    add("--cell-timeout", **limit, help=f"seconds that a cell may take (default: {CELL_TIMEOUT_S:g}, {queued})")
    add("--timeout", **limit, help=f"seconds that a notebook may take (default: {TIMEOUT_S:g}, {queued})")
    add("--plain", action="store_true", help="print progress line by line instead of in a live table")
    add("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    if args.list:
        return _list(args)
    if args.check:
        return _check(args)
    if args.strip:
        for notebook in notebooks(args.names, args.root):
            if strip(notebook.path):
                print(notebook.path)
        return 0
    return _run(args)


def _list(args: argparse.Namespace) -> int:
    found = notebooks(args.names, args.root)
    if args.json:
        print(json.dumps([_describe(notebook, args.out) for notebook in found], indent=1))
    else:
        for notebook in found:
            header = notebook.header
            print(f"{notebook.name}: {header.title}")
            print(f"    {header.minutes} min, ranks: {header.ranks}, {header.hardware}; comes before: {header.needs}")
            for what, pace in _paces(notebook, args.out).items():
                print(f"    {what}: about {pace.minutes} min; {pace.describe()}")
            print(f"    {'  '.join(f'-p {parameter}' for parameter in notebook.parameters.values())}")
    return 0


def _describe(notebook: Notebook, out: str) -> dict:
    parameters = {parameter.name: parameter.default for parameter in notebook.parameters.values()}
    about = {"name": notebook.name, "path": str(notebook.path), **asdict(notebook.header), "parameters": parameters}
    return about | {what: {**asdict(pace), "minutes": pace.minutes} for what, pace in _paces(notebook, out).items()}


def _paces(notebook: Notebook, out: str) -> dict[str, Pace]:
    """The estimates of the core path and of all, with the seconds of the last run where it took the same path."""
    result = load_results(Path(out) / "notebooks").get(notebook.name)
    seconds = {result.core: result.seconds} if result and result.state == "passed" and not result.until else {}
    if not any(map(is_optional, notebook.cells)):
        seconds = dict.fromkeys((True, False), next(iter(seconds.values()), None))
    paths = {"all": False} if notebook.is_appendix else {"core": True, "all": False}
    return {what: measure(notebook.cells, core, seconds.get(core)) for what, core in paths.items()}


def _check(args: argparse.Namespace) -> int:
    found = {notebook.name: check_form(notebook.path) for notebook in notebooks(args.names, args.root)}
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        for name, problems in found.items():
            print("\n".join(f"{name}: {problem}" for problem in problems) or f"{name}: in order")
    return 1 if any(found.values()) else 0


def _run(args: argparse.Namespace) -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM must end the kernels too
    chosen, parameters = notebooks(args.names, args.root), _parameters(args.parameter)
    names = args.names
    if args.core and not names:
        chosen = [notebook for notebook in chosen if not notebook.is_appendix]
        names = [notebook.name for notebook in chosen]
    with progress(chosen, Console(stderr=True), args.plain, args.core, args.until) as tell:
        results = run_notebooks(
            names,
            parameters,
            root=args.root,
            out=args.out,
            cell_timeout_s=args.cell_timeout,
            timeout_s=args.timeout,
            core=args.core,
            until=args.until,
            resume=args.resume,
            progress=tell,
        )
    for result in results:
        if result.failure:
            print(f"\n{result.describe()}", file=sys.stderr)
        if result.left_behind:
            print(f"{result.name} left {result.left_behind} processes behind; they were ended", file=sys.stderr)
    interrupted = any(result.state == "interrupted" for result in results)
    gallery = None
    if args.gallery and not interrupted:
        from aiscale.book.gallery import build_gallery  # loads nbconvert, which takes a second

        gallery = build_gallery(args.root, args.out)
    _report(results, len(chosen), gallery, args.json)
    if interrupted:
        return 130
    return 0 if all(result.state == "passed" for result in results) else 1


def _report(results: list[Result], asked: int, gallery: Path | None, as_json: bool) -> None:
    if as_json:
        tree = {"notebooks": [asdict(result) for result in results], "gallery": str(gallery) if gallery else None}
        print(json.dumps(tree, indent=1))
        return
    passed = sum(result.state == "passed" for result in results)
    seconds = sum(result.seconds for result in results)
    stopped = f" up to {results[0].until!r}" if results and results[0].until else ""
    print(f"{passed} of {asked} notebooks passed{stopped} in {seconds:.0f} s")
    if gallery:
        print(f"gallery: {gallery.resolve()}")


def _parameters(assignments: list[str]) -> dict[str, str]:
    given = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals or not name.strip():
            raise BookError(f"-p {assignment!r} is not of the form key=value: write, for example, -p n_steps=20")
        given[name.strip()] = value.strip()
    return given


# progress -----------------------------------------------------------------------------------------------------------


@contextmanager
def progress(
    chosen: Sequence[Notebook], console: Console, plain: bool = False, core: bool = False, until: str = ""
) -> Iterator[Progress]:
    """Show the progress of a run: a live table on a terminal; lines for a log elsewhere, or if `plain`."""
    if plain or not console.is_terminal:
        yield _say
        return
    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), BarColumn(20), TimeElapsedColumn())
    bars = Bars(*columns, TextColumn("{task.fields[state]}"), console=console, refresh_per_second=4)
    rows = {}
    for notebook in chosen:
        cells = len(to_run(notebook, core, until))
        rows[notebook.name] = bars.add_task(notebook.name, total=cells, start=False, state="[dim]waits")

    def show(name: str, state: str, cell: int, result: Result | None) -> None:
        bars.start()  # only now: the request may be refused before
        row, color = rows[name], _COLORS.get(state, "yellow")
        if state == "runs" and not cell:
            bars.start_task(row)
        done = result.cells if state in ("passed", "unchanged") else cell - 1 if cell else None
        bars.update(row, completed=done, state=f"[{color}]{state}")
        if result:
            bars.stop_task(row)

    try:
        yield show
    finally:
        bars.stop()


def _say(name: str, state: str, cell: int, result: Result | None) -> None:
    if state == "unchanged":
        text = "passed earlier, unchanged since"
    elif result:
        where = f" in cell {result.failure.cell}" if result.failure and result.failure.cell else ""
        text = f"{state}{where} after {result.seconds:.1f} s"
    else:
        text = "runs"
    if not cell:
        print(f"{name}: {text}", file=sys.stderr, flush=True)
