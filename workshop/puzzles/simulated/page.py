"""A puzzle in a web page: Pyodide runs the simulated ranks in the reader's browser, and nothing leaves it.

    cd workshop/puzzles && python -m simulated.page OUT    # puzzle.html, beside the planner's page or alone

A browser has no threads, so there a rank is a call that lends its stack (Pyodide's `run_sync`) until its turn comes.
"""

from __future__ import annotations

import asyncio
import json
import linecache
import sys
import traceback
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from simulated import world as worlds
from simulated.chunks import CHUNKS
from simulated.trial import figures_of, measured, missed, run

FILES = ("chunks", "machine", "page", "ranks", "trial", "world")


def attempt(name: str, source: str) -> str:
    """JSON of what a program did: `text`, `solved`, `ranks` and `messages` of its first wrong case, or its first."""
    lines, names, drawn, problem = [], {}, None, ""
    linecache.cache["program"] = (len(source), None, source.splitlines(keepends=True), "program")
    try:
        exec(compile(source, "program", "exec"), names)
        for case in CHUNKS[name].cases:
            world, problem = run(CHUNKS[name], case, names[name])
            drawn = world if drawn is None or problem else drawn
            if world:
                figures = measured(world)
                lines += [] if problem else [figures_of(case, figures)]
                problem = problem or missed(CHUNKS[name], case, figures)
            if problem:
                break
    except Exception as error:
        at = next((f.lineno for f in reversed(traceback.extract_tb(error.__traceback__)) if f.filename == "program"), 0)
        problem = f"{type(error).__name__}: {error}" + (f" (line {at})" if at else "")
    sent = [(m.source, m.to, m.start_s, m.arrived_s) for m in drawn.messages] if drawn else []
    text = "\n".join([problem or "solved", *lines])
    return json.dumps({"text": text, "solved": not problem, "ranks": drawn.size if drawn else 0, "messages": sent})


class Semaphore:
    """Of threading's, what `World` uses."""

    def __init__(self, free: int) -> None:
        self.free, self.waiting = free, []

    def acquire(self) -> None:
        from pyodide.ffi import run_sync

        self.free -= 1
        if self.free < 0:
            self.waiting.append(asyncio.get_event_loop().create_future())
            run_sync(self.waiting[-1])

    def release(self) -> None:
        self.free += 1
        if self.waiting:
            self.waiting.pop(0).set_result(None)


class Thread:
    """A call that may wait, on a stack of its own."""

    def __init__(self, target: Callable, args: tuple, daemon: bool) -> None:
        self.call = lambda: target(*args)

    def start(self) -> None:
        from pyodide.code import run_js
        from pyodide.ffi import create_proxy

        run_js("call => { call.callPromising() }")(create_proxy(self.call))


if sys.platform == "emscripten":
    worlds.threading = SimpleNamespace(Semaphore=Semaphore, Thread=Thread)


def write(out: Path) -> None:
    """Write the page, what it runs, and Pyodide to a folder."""
    import aiscale
    from aiscale.plan import browser

    out.mkdir(parents=True, exist_ok=True)
    kit, here = Path(aiscale.__file__).parent, Path(__file__).parent
    with zipfile.ZipFile(out / "puzzle.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for package in ("aiscale", "simulated"):
            archive.writestr(f"{package}/__init__.py", "")
        archive.writestr("aiscale/lesson/__init__.py", "class LessonError(Exception): ...\n")
        for file in (file for room in browser.ROOMS for file in (kit / room).rglob("*.*")):
            if file.suffix in (".py", ".toml"):
                archive.write(file, f"aiscale/{file.relative_to(kit)}")
        for name in FILES:
            archive.write(here / f"{name}.py", f"simulated/{name}.py")
    (out / "puzzle.html").write_bytes((here / "page.html").read_bytes())
    browser.fetch_pyodide(out)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
