"""The puzzles in a web page: Pyodide runs the simulated ranks in the reader's browser, and nothing leaves it.

    cd workshop/puzzles && python -m simulated.page OUT    # puzzle.html, beside the planner's page or alone

Texts and stubs are those of the notebook. A browser has no threads, so there a rank is a call that lends its stack
(Pyodide's `run_sync`) until its turn comes; nor has it NumPy, whose place `arrays` takes. A program without an end is
stopped twice: here, by counting its lines, and by the page, which ends the worker in which Python runs.
"""

from __future__ import annotations

import asyncio
import json
import linecache
import re
import sys
import threading
import traceback
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType, SimpleNamespace

if sys.platform == "emscripten":
    from simulated import arrays

    sys.modules["numpy"] = arrays

from simulated import world as worlds
from simulated.machine import SimulationError
from simulated.problems import PUZZLES
from simulated.trial import figures_of, measured, missed, run
from simulated.world import World

FILES = ("arrays", "chunks", "machine", "page", "problems", "ranks", "trial", "world")
PAGES = ("page.css", "page.js", "worker.js")
NOTEBOOK = Path(__file__).parents[1] / "puzzles.ipynb"
_STUB = r'(.*?)\s+check\("([\w-]+)", (\w+)\)'  #: a cell: the program, the puzzle's name, the function's
MOST_LINES = 500_000  #: of a program on all ranks, against loops without end; our answers run a few thousand


# In the browser -------------------------------------------------------------------------------------------------------


def attempt(name: str, function: str, given: str, source: str) -> str:
    """JSON of what a program did: `text`, `solved`, and a picture of its first wrong case, or its first.

    function: the program's name; given: what the puzzle defines before it.
    """
    lines, drawn, problem = [], None, ""
    names = {"check": lambda *_: None}
    linecache.cache["program"] = (len(source), None, source.splitlines(keepends=True), "program")
    try:
        exec(compile(given, "given", "exec"), names)
        exec(compile(source, "program", "exec"), names)
        if function not in names:
            raise SimulationError(f"your text does not define {function}, which every rank is to run")
        puzzle, program = PUZZLES[name], _counted(names[function])
        for case in puzzle.cases:
            world, problem = run(puzzle, case, program)
            if world and (drawn is None or problem):
                drawn = _picture(world, case.targets)
            if world:
                figures = measured(world)
                lines += [] if problem else [figures_of(case, figures)]
                problem = problem or missed(puzzle, case, figures)
            if problem:
                break
    except SimulationError as error:
        problem = str(error)
    except Exception as error:
        frames = reversed(traceback.extract_tb(error.__traceback__))
        at = getattr(error, "lineno", 0) or next((f.lineno for f in frames if f.filename == "program"), 0)
        problem = f"{type(error).__name__}: {error}" + (f" (line {at})" if at else "")
    finally:
        sys.settrace(None)
    text = "\n".join([problem or "solved", *lines])
    return json.dumps({"text": text, "solved": not problem, "picture": drawn})


def _counted(program: Callable) -> Callable:
    """The program, which fails after too many lines."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Callable | None:
        nonlocal count
        if frame.f_code.co_filename != "program":
            return None
        count += 1
        if count > MOST_LINES:
            raise SimulationError(
                f"stopped after {MOST_LINES:,} lines, in line {frame.f_lineno}: does a loop never end?"
            )
        return trace

    def traced(*arguments: object) -> object:
        sys.settrace(trace)  # a thread of its own outside of browsers
        return program(*arguments)

    return traced


def _picture(world: World, targets: dict[str, float]) -> dict:
    """What page.js draws: work and messages of each rank over time, and the memory of each."""
    bars = [(e.rank, e.name.removeprefix("chunk "), e.start_s, e.end_s, e.kind) for e in world.events]
    arrows = []
    for message in world.messages:
        starts_s = (message.start_s + message.arrived_s) / 2 if not world.layers else message.start_s
        arrows.append((message.source, message.to, starts_s, message.arrived_s))
    memory = []
    for rank in range(world.size):
        memory.append([(at_s, sum(held.values())) for at_s, held in world.memory(rank)])
    stuck = [(rank, since_s) for rank, (since_s, _) in world.stuck.items()]
    page = {"ranks": world.size, "end": world.time_s, "targets": targets, "bars": bars, "arrows": arrows}
    asks = "memory" in targets and world.memory_gb > 0
    return page | {"stuck": stuck, "memory": memory if asks else []}


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
    worlds.threading = SimpleNamespace(Semaphore=Semaphore, Thread=Thread, __file__=threading.__file__)


# The page that is written ---------------------------------------------------------------------------------------------


def texts(notebook: Path = NOTEBOOK) -> dict:
    """What the page shows of the participants' notebook: {"introductions": [...], "puzzles": [...]}, texts as HTML."""
    introductions, puzzles, given = [], [], []
    for heading, cells in _sections(notebook):
        stub = next((at for at, cell in enumerate(cells) if "NotImplementedError" in cell["source"]), None)
        before = cells if stub is None else cells[:stub]
        if heading.startswith(("What", "Ranks")):
            introductions.append({"title": heading, "text": "".join(map(_html, before))})
        if stub is None:
            continue
        given += [cell["source"] for cell in before if cell["cell_type"] == "code"]
        program, name, function = re.match(_STUB, cells[stub]["source"], re.S).groups()
        about = {"name": name, "function": function, "title": heading, "stub": f"{program}\n"}
        about |= {"text": "".join(map(_html, before)), "after": "".join(map(_html, cells[stub + 1 :]))}
        puzzles.append(about | {"given": "\n".join(given)})
    return {"introductions": introductions, "puzzles": puzzles}


def _sections(notebook: Path) -> list[tuple[str, list[dict]]]:
    """Headings and the cells below them; a text with a heading in its midst is cut."""
    sections = [("", [])]
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            sections[-1][1].append({"cell_type": "code", "source": source})
            continue
        for part in re.split(r"^(?=## )", source, flags=re.M):
            heading = re.match(r"## (.*)\n", part)
            if heading:
                sections.append((heading[1], []))
                part = part[heading.end() :]
            if part.strip():
                sections[-1][1].append({"cell_type": "markdown", "source": part})
    return sections


def _html(cell: dict) -> str:
    import html

    import latex2mathml.converter
    from markdown_it import MarkdownIt
    from mdit_py_plugins.dollarmath import dollarmath_plugin

    if cell["cell_type"] == "code":
        return f'<pre tabindex="0"><code>{html.escape(cell["source"])}</code></pre>'
    markdown = MarkdownIt("commonmark", {"html": True}).enable("table")
    markdown.use(dollarmath_plugin, renderer=lambda text, _: latex2mathml.converter.convert(text))
    return markdown.render(cell["source"])


def write(out: Path) -> None:
    """Write the page, what it runs, and Pyodide to a folder."""
    from aiscale.plan import browser

    out.mkdir(parents=True, exist_ok=True)
    here = Path(__file__).parent
    with zipfile.ZipFile(out / "puzzle.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        browser.pack(archive)
        archive.writestr("aiscale/lesson/__init__.py", "class LessonError(Exception): ...\n")
        archive.writestr("simulated/__init__.py", "")
        for name in FILES:
            archive.write(here / f"{name}.py", f"simulated/{name}.py")
    told = json.dumps(texts()).replace("<", "\\u003c")  # inside a script of the page
    (out / "puzzle.html").write_text((here / "page.html").read_text().replace("{{texts}}", told))
    for name in PAGES:
        (out / f"puzzle_{name}").write_bytes((here / name).read_bytes())
    browser.fetch_pyodide(out)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
