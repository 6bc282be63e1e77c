"""`aiscale slides`: decks for a talk, from the Markdown files in slides/, whose figures and numbers the package makes.

    aiscale slides                  # all: build/slides/NAME.html, and PDFs where there is a Chromium
    aiscale slides 03_ddp --as-is   # one, with the notebooks' figures as they were last run

A deck is one HTML file with reveal.js in it, which opens without a network; `aiscale.book.decks` says how to write one.
An expression is Python, with the names of NAMES. One that fails stops the build, and so do a figure that is not there,
a figure or a number without a source, and a number with a unit that is written out: it could go stale.
"""

from __future__ import annotations

import argparse
import base64
import html
import io
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import matplotlib.pyplot as plt
import numpy
from markupsafe import Markup
from pygments.formatters import HtmlFormatter

from aiscale import cost, machines, plots, published
from aiscale.book.decks import FIGURE, KINDS, NUMBER, Deck, decks, problems
from aiscale.book.gallery import loads, template, to_html
from aiscale.book.notebook import BookError, find_root, notebooks, read
from aiscale.config import require_writable, write_whole
from aiscale.recipes import recipe

SIZE = (1280, 720)  #: of a slide, in pixels
NAMES = {
    "np": numpy,
    "cost": cost,
    "machines": machines,
    "plots": plots,
    "published": published,
    "recipe": recipe,
    "bytes": plots.format_bytes,
    "count": plots.format_count,
    "seconds": plots.format_seconds,
    "gb": lambda nbytes, digits=0: f"{nbytes / 1e9:,.{digits}f} GB",
    "pct": lambda share, digits=0: f"{100 * share:.{digits}f} %",
    "row": lambda name, **wanted: next(r for r in published.table(name) if wanted.items() <= r.items()),
    "excerpt": lambda path, first, lines: _excerpt(path, first, lines),
    "axes": lambda width, height: plots.style.new_axes(None, width, height),
}


# building -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """What an expression and a figure of a slide need."""

    where: str  #: for messages
    names: dict[str, object]
    executed: Path  #: the folder of executed notebooks
    as_is: bool


def build(deck: Deck, out: str | Path = "build", as_is: bool = False) -> Path:
    """Write the deck to OUT/slides/NAME.html; as_is: a figure of a notebook that was not run is an empty frame."""
    for problem in problems(deck):
        raise BookError(f"{deck.name}: {problem}")
    at = _Place(deck.name, dict(NAMES), Path(out) / "notebooks", as_is)
    for name, expression in deck.names.items():
        at.names[name] = _value(expression, at)
    slides = [_slide(text, replace(at, where=f"{deck.name}, slide {n}")) for n, text in enumerate(deck.texts, 2)]
    ink = plots.style.text_color(deck.color)
    text = template("slides").render(deck=deck, slides=slides, size=SIZE, ink=ink, **_parts())
    if outside := loads(text):
        raise BookError(f"{deck.name} would load {outside[0]}: a deck is shown offline")
    folder = Path(out) / "slides"
    folder.mkdir(parents=True, exist_ok=True)
    return write_whole(folder / f"{deck.name}.html", text)


def _slide(text: str, at: _Place) -> dict[str, object]:
    """What the template shows of a slide."""
    text = NUMBER.sub(lambda found: str(_value(found[1], at)), text)
    body, _, notes = text.partition("\nNote:")
    title, _, body = body.partition("\n")
    source = re.search(r"^Source: (.+)$", body, re.M)
    body = body.replace(source[0], "") if source else body
    columns = re.split(r"^\|\|\|$", body, flags=re.M)
    lead, columns = (columns[0], columns[1:]) if len(columns) == 3 else ("", columns)
    kind = next((kind for kind in KINDS if source and source[1].startswith(kind)), "")
    return {
        "title": _inline(title.lstrip("# ")),
        "statement": title.startswith("# "),  # one sentence, on colour
        "lead": _html(lead),  # above two columns
        "columns": [_parts_of(column, at) for column in columns],
        "source": _inline(source[1][len(kind) :].lstrip(" ,:")) if source else Markup(),
        "kind": kind,
        "notes": _html(notes.strip()),
    }


def _parts_of(text: str, at: _Place) -> list[Markup]:
    """Prose and figures in their order."""
    parts, end = [], 0
    for found in FIGURE.finditer(text):
        parts += [_html(text[end : found.start()])]
        alt, kind, what = found.groups()
        if kind == "plots":
            kind, content = "svg+xml", _drawn(f"plots.{what}", at)
        else:
            kind, content = "png", _shown(*what.split("#"), at)
        uri = f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
        alt = html.escape(alt, quote=True)
        image = f'<img src="{uri}" alt="{alt}">' if content else f"<p>{alt}: not run yet</p>"
        parts += [Markup(f"<figure>{image}</figure>")]
        end = found.end()
    return [part for part in [*parts, _html(text[end:])] if part]


def _excerpt(path: str, first: str, lines: int) -> str:
    """`lines` lines of a file of this repository, from the one that begins with `first`."""
    text = (find_root().parent / path).read_text().splitlines()
    start = next(number for number, line in enumerate(text) if line.startswith(first))
    return "\n".join(text[start : start + lines])


def _html(text: str) -> Markup:
    return Markup(to_html(text.strip())) if text.strip() else Markup()


def _inline(text: str) -> Markup:
    return Markup(re.sub(r"^<p>(.*)</p>$", r"\1", str(_html(text)).strip(), flags=re.S))


def _value(expression: str, at: _Place) -> object:
    try:
        return eval(" ".join(expression.split()), at.names)  # a deck is code of this repository, as a notebook is
    except Exception as error:  # whatever an expression raises, the deck's author is told where
        raise BookError(f"{at.where}: {expression.strip()}: {type(error).__name__}: {error}") from None


def _drawn(expression: str, at: _Place) -> bytes:
    plt.switch_backend("agg")
    plt.close("all")
    plots.use_style()
    _value(expression, at)
    if not plt.get_fignums():
        raise BookError(f"{at.where}: {expression} draws no figure")
    file = io.BytesIO()
    with plt.rc_context({"svg.hashsalt": "aiscale"}):  # the same file from the same figure
        plt.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    plt.close("all")
    return file.getvalue()


def _shown(name: str, cell_id: str, at: _Place) -> bytes:
    copy = at.executed / f"{notebooks([name])[0].name}.ipynb"
    cells = read(copy).cells if copy.exists() else []
    outputs = [output for cell in cells if cell.get("id") == cell_id for output in cell.get("outputs", ())]
    images = [output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    if not images and not at.as_is:
        raise BookError(f"{at.where}: cell {cell_id} of {copy} has no figure: aiscale notebooks --core {name}")
    return base64.b64decode(images[0]) if images else b""


@cache
def _parts() -> dict[str, Markup]:
    """What all decks share: style, font, syntax colours, and reveal.js with its speaker's view."""
    spec = find_spec("pyreveal")
    if spec is None:
        raise BookError("reveal.js is not installed: `make setup`, or pip install pyreveal, which contains it")
    reveal = Path(spec.submodule_search_locations[0]) / "revealjs"
    css = [(reveal / "dist/reveal.css").read_text()]
    for weight, cut in ((400, "regular"), (600, "semibold")):
        font = reveal / f"css/theme/fonts/source-sans-pro/source-sans-pro-{cut}.woff"
        uri = f"data:font/woff;base64,{base64.b64encode(font.read_bytes()).decode()}"
        css += [f'@font-face {{ font-family: "Source Sans Pro"; font-weight: {weight}; src: url({uri}); }}']
    css += [(files("aiscale.book") / "templates" / "slides.css").read_text()]
    css += [HtmlFormatter(style="friendly").get_style_defs(".highlight")]
    scripts = [(reveal / "dist" / name).read_text() for name in ("reveal.js", "plugin/notes.js")]
    return {"css": Markup("\n".join(css)), "script": Markup("\n;\n".join(scripts).replace("</script", "<\\/script"))}


# printing -----------------------------------------------------------------------------------------------------------


def find_chromium() -> str:
    """A browser that prints; empty if there is none."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), "")


def print_pdf(page: Path) -> Path:
    """The deck as a PDF beside it, a page for each slide, printed by a Chromium that reaches no network."""
    pdf = page.with_suffix(".pdf")
    options = "--headless --disable-gpu --disable-dev-shm-usage --no-pdf-header-footer --virtual-time-budget=5000"
    root = ["--no-sandbox"] if os.geteuid() == 0 else []
    closed = ["--host-resolver-rules=MAP * ~NOTFOUND", f"--print-to-pdf={pdf}", f"{page.resolve().as_uri()}?print-pdf"]
    command = [find_chromium(), *options.split(), *root, *closed]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    if done.returncode or not pdf.exists():
        raise BookError(f"{command[0]} did not print {page}: {(done.stderr.splitlines() or ['it said nothing'])[-1]}")
    return pdf


# the command --------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="a deck's name, number or path (default: all of slides/)")
    add("--pdf", action=argparse.BooleanOptionalAction, help="print PDFs too (default: where there is a Chromium)")
    add("--as-is", action="store_true", help="run no notebook: take their figures as they were last run, or leave room")
    add("--out", default="build", metavar="DIR", help="the decks go to DIR/slides (default: build)")


def run(args: argparse.Namespace) -> int:
    chosen = decks(args.names)
    require_writable(args.out, "--out")
    pdf = bool(find_chromium()) if args.pdf is None else args.pdf
    if pdf and not find_chromium():
        raise BookError("there is no Chromium on this machine to print with: install one, or leave --pdf out")
    for deck in chosen:
        for problem in problems(deck):
            raise BookError(f"{deck.name}: {problem}")
    _parts()
    needed = sorted(set().union(*(deck.notebooks for deck in chosen)))
    if needed and not args.as_is and (status := _run_notebooks(needed, args.out)):
        return status
    for deck in chosen:
        page = build(deck, args.out, args.as_is)
        page.with_suffix(".pdf").unlink(missing_ok=True)  # of an earlier build
        if pdf:
            print_pdf(page)
        print(f"{deck.name}: {len(deck.texts) + 1} slides", file=sys.stderr, flush=True)
    if not pdf and args.pdf is None:
        print("no PDFs: there is no Chromium here", file=sys.stderr)
    print(f"slides: {(Path(args.out) / 'slides').resolve()}")
    return 0


def _run_notebooks(names: Sequence[str], out: str) -> int:
    """Run those notebooks that have changed since they last ran, as they ran then: their core path, or whole."""
    from rich.console import Console

    from aiscale.book.command import progress
    from aiscale.book.results import load_results
    from aiscale.book.running import run as run_notebooks

    earlier = load_results(Path(out) / "notebooks")
    whole = [name for name in names if (found := earlier.get(notebooks([name])[0].name)) and not found.core]
    ways = ((whole, False), ([name for name in names if name not in whole], True))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM must end the kernels too
    for chosen, core in ways:
        if not chosen:
            continue
        with progress(notebooks(chosen), Console(stderr=True), core=core) as tell:
            results = run_notebooks(chosen, out=out, core=core, resume=True, progress=tell)
        for result in results:
            if result.state != "passed":
                print(f"\n{result.describe()}", file=sys.stderr)
                return 130 if result.state == "interrupted" else 1
    return 0
