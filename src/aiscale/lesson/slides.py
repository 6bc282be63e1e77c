"""`aiscale slides`: decks for a talk, from slides/*.md, with the package's figures and numbers.

    aiscale slides                  # all: build/slides/NAME.html
    aiscale slides 03_ddp --as-is   # one, with the notebooks' figures as they were last run

A deck is one HTML file with reveal.js in it. Its source, in which an expression is Python with the
names of NAMES:

    title: Data parallelism            front matter; also subtitle, minutes, color (a strategy's)
    large = model_of("22b")            a name for its expressions
    ---                                between slides
    ## Every rank holds everything     the title of a slide; `# ` makes a slide of one sentence
    GPT-2 has {{ count(cost.parameter_count(model_of("gpt2"))) }} parameters.
    |||                                between two columns
    ![what it shows](plots:memory_bars({...}))          a figure of `aiscale.measure.plots`
    ![what it shows](../notebooks/figures/layer.svg)    a drawing of notebooks/figures/draw.py
    ![what it shows](notebook:03_ddp#c20c3268)          the figure of an executed cell; a second
                                                        one waits for a key
    Source: predicted by `cost`        under the figure, one of KINDS
    Note: what the speaker says, until the end of the slide

The slides behind `## Now you` are for the end of the block: they answer what the lesson asks to
predict, and say *after the lesson* in their corner.
"""

from __future__ import annotations

import argparse
import base64
import html
import io
import re
from collections.abc import Sequence
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import jinja2
import latex2mathml.converter
import matplotlib.pyplot as plt
import numpy
from markupsafe import Markup
from nbconvert.filters import markdown2html
from pygments.formatters import HtmlFormatter

from aiscale.errors import write_whole
from aiscale.lesson.notebook import LessonError, choose, find_root, notebooks, read
from aiscale.lesson.runner import execute
from aiscale.measure import plots
from aiscale.plan import cost, machines, published
from aiscale.plan.options import planned
from aiscale.plan.presets import model_of

SIZE = (1280, 720)  #: of a slide, in pixels
KINDS = ("measured here", "predicted", "published", "drawn")  #: of what a source says
NUMBER = re.compile(r"\{\{(.+?)\}\}", re.S)
_FROM, _END = r"plots|notebook|\.\./notebooks/figures", r"$(?=\n\s*\n|\n*\Z|\n\|\|\||\nSource:)"
FIGURE = re.compile(rf"^!\[([^\]]+)\]\(({_FROM})[:/](.*?)\){_END}", re.M | re.S)
_CODE_OR_MATH = re.compile(
    r"(?P<code>```.*?```|`[^`\n]+`)|\$\$(?P<block>.+?)\$\$|\$(?P<inline>[^$\n]+)\$", re.S
)
NAMES = {
    "np": numpy,
    "cost": cost,
    "machines": machines,
    "plots": plots,
    "published": published,
    "model_of": model_of,
    "planned": planned,
    "bytes": plots.format_bytes,
    "count": plots.format_count,
    "seconds": plots.format_seconds,
    "gb": lambda nbytes, digits=0: f"{nbytes / 1e9:,.{digits}f} GB",
    "pct": lambda share, digits=0: f"{100 * share:.{digits}f} %",
}


class Deck:
    """The source of a deck, and what its expressions may name."""

    def __init__(self, path: Path) -> None:
        head, *self.texts = re.split(r"^---$", path.read_text(encoding="utf-8"), flags=re.M)
        self.name, self.about = path.stem, dict(re.findall(r"^(\w+): *(.+)$", head, re.M))
        self.assigned = dict(re.findall(r"^(\w+) = (.+)$", head, re.M))
        self.color = plots.STRATEGY_COLORS[self.about.get("color", "serial")]
        figures = [figure for text in self.texts for figure in FIGURE.findall(text)]
        self.notebooks = {what.split("#")[0] for _, kind, what in figures if kind == "notebook"}
        ends = [at for at, text in enumerate(self.texts) if text.strip().startswith("## Now you")]
        #: how many slides stand before the lesson
        self.before = ends[0] + 1 if ends else len(self.texts)

    def value(self, expression: str) -> object:
        try:
            # code of this repository, as a notebook's is
            return eval(" ".join(expression.split()), self.names)
        except Exception as error:
            raise LessonError(
                f"{self.name}: {expression.strip()}: {type(error).__name__}: {error}"
            ) from None

    def build(self, out: Path, as_is: bool = False) -> Path:
        """Write OUT/slides/NAME.html; as_is: a figure that was not run is an empty frame."""
        self.names, self.executed, self.as_is = dict(NAMES), out / "notebooks", as_is
        for name, expression in self.assigned.items():
            self.names[name] = self.value(expression)
        page = jinja2.Template(
            (files("aiscale.lesson") / "templates/slides.html.j2").read_text(), autoescape=True
        )
        shown = [self.slide(text.strip()) for text in self.texts]
        for slide in shown[self.before :]:
            slide["after"] = True
        text = page.render(
            deck=self, slides=shown, size=SIZE, ink=plots.style.text_color(self.color), **_parts()
        )
        (out / "slides").mkdir(parents=True, exist_ok=True)
        return write_whole(out / "slides" / f"{self.name}.html", text)

    def slide(self, text: str) -> dict[str, object]:
        text = NUMBER.sub(lambda number: str(self.value(number[1])), text)
        body, _, notes = text.partition("\nNote:")
        title, _, body = body.partition("\n")
        source = re.search(rf"^Source: ({'|'.join(KINDS)})?[ ,:]*(.*)$", body, re.M)
        body = body.replace(source[0], "") if source else body
        return {
            "title": _inline(title.lstrip("# ")),
            "statement": title.startswith("# "),  # one sentence, on colour
            "columns": [self.column(column) for column in re.split(r"^\|\|\|$", body, flags=re.M)],
            "source": _inline(source[2]) if source else Markup(),
            "kind": source[1] or "" if source else "",
            "notes": _html(notes.strip()),
        }

    def column(self, text: str) -> list[Markup]:
        """Prose and figures in their order."""
        parts, end = [], 0
        for figure in FIGURE.finditer(text):
            alt, kind, what = figure.groups()
            if kind == "notebook":
                form, content = "png", self.shown(*what.split("#"))
            elif kind == "plots":
                form, content = "svg+xml", self.drawn(what)
            else:
                form, content = "svg+xml", (find_root() / "figures" / what).read_bytes()
            alt, then = html.escape(alt, quote=True), ' class="fragment"' if end else ""
            image = (
                f'<img src="{_data(f"image/{form}", content)}" alt="{alt}">'
                if content
                else f"{alt}: not run yet"
            )
            parts += [_html(text[end : figure.start()]), Markup(f"<figure{then}>{image}</figure>")]
            end = figure.end()
        return [part for part in [*parts, _html(text[end:])] if part]

    def drawn(self, expression: str) -> bytes:
        plt.switch_backend("agg")
        plt.close("all")
        plots.use_style()
        self.value(f"plots.{expression}")
        file = io.BytesIO()
        with plt.rc_context({"svg.hashsalt": "aiscale"}):  # the same file from the same figure
            plt.savefig(file, format="svg", transparent=True, metadata={"Date": None})
        return file.getvalue()

    def shown(self, name: str, cell_id: str) -> bytes:
        copy = self.executed / f"{notebooks([name])[0].name}.ipynb"
        cells = read(copy).cells if copy.exists() else []
        outputs = [
            output for cell in cells if cell.id == cell_id for output in cell.get("outputs", ())
        ]
        images = [
            output.data["image/png"] for output in outputs if "image/png" in output.get("data", ())
        ]
        if not images and not self.as_is:
            raise LessonError(
                f"{self.name}: cell {cell_id} of {copy} has no figure: "
                f"aiscale notebooks --core {name}"
            )
        return base64.b64decode(images[0]) if images else b""


def decks(names: Sequence[str] = (), root: str | Path | None = None) -> list[Deck]:
    """The decks of a folder, or those that `names` select by name, number or path."""
    root = Path(root) if root else find_root().parent / "slides"
    return [Deck(path) for path in choose("deck", names, sorted(root.glob("*.md")), root)]


def _data(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _mathml(part: re.Match) -> str:
    display = "block" if part["block"] else "inline"
    return part["code"] or latex2mathml.converter.convert(
        part["block"] or part["inline"], display=display
    )


def _html(text: str) -> Markup:
    if not text.strip():
        return Markup()
    return Markup(markdown2html(_CODE_OR_MATH.sub(_mathml, text.strip())))


def _inline(text: str) -> Markup:
    return Markup(re.sub(r"^<p>(.*)</p>$", r"\1", str(_html(text)).strip(), flags=re.S))


def _parts() -> dict[str, Markup]:
    """What all decks share: style, font, syntax colours, and reveal.js with its speaker's view."""
    # reveal.js as a wheel
    reveal = Path(find_spec("pyreveal").submodule_search_locations[0]) / "revealjs"
    css = [(reveal / "dist/reveal.css").read_text()]
    for weight, cut in ((400, "regular"), (600, "semibold")):
        uri = _data(
            "font/woff",
            (reveal / f"css/theme/fonts/source-sans-pro/source-sans-pro-{cut}.woff").read_bytes(),
        )
        face = f'font-family: "Source Sans Pro"; font-weight: {weight}; src: url({uri});'
        css += [f"@font-face {{ {face} }}"]
    css += [(files("aiscale.lesson") / "templates/slides.css").read_text()]
    css += [HtmlFormatter(style="friendly").get_style_defs(".highlight")]
    script = "\n;\n".join(
        (reveal / name).read_text() for name in ("dist/reveal.js", "dist/plugin/notes.js")
    )
    return {
        "css": Markup("\n".join(css)),
        "script": Markup(script.replace("</script", "<\\/script")),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "names",
        nargs="*",
        metavar="NAME",
        help="a deck's name, number or path (default: all of slides/)",
    )
    add(
        "--as-is",
        action="store_true",
        help="run no notebook: take their figures as they were last run, or leave room",
    )
    add("--out", default="build", metavar="DIR", help="the decks go to DIR/slides (default: build)")


def run(args: argparse.Namespace) -> int:
    selection, out = decks(args.names), Path(args.out)
    needed = notebooks(sorted(set().union(*(deck.notebooks for deck in selection))))
    missing = [
        notebook
        for notebook in needed
        if not (out / "notebooks" / f"{notebook.name}.ipynb").exists()
    ]
    for result in execute(missing, out=out, core=True) if missing and not args.as_is else []:
        if result.error:
            raise LessonError(
                f"{result.name} failed: aiscale notebooks --core {result.name} shows where"
            )
    for deck in selection:
        print(f"{deck.build(out, args.as_is)}: {len(deck.texts) + 1} slides")
    return 0
