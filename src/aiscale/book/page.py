"""An executed notebook as one HTML file that loads nothing: no script, no font, no style sheet from anywhere.

text = render(notebook, executed, result, earlier, later)
loads(text)    # -> [] or the addresses that a browser would fetch
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from html.parser import HTMLParser
from importlib.resources import files

import jinja2
from markupsafe import Markup
from nbconvert.filters import Highlight2HTML, ansi2html
from nbformat import NotebookNode
from pygments.formatters import HtmlFormatter

from aiscale.book.formula import to_html
from aiscale.book.notebook import Notebook, tags
from aiscale.book.results import Result

_IMAGES = {"image/png": "png", "image/jpeg": "jpeg"}
#: What a drawing call returns, which says nothing beside its figure.
_RETURNED = re.compile(r"\s*[\[(]*(array\(\[*)?<(Axes|Figure|matplotlib)")
_FROM_PAPERMILL = ("papermill-error-cell-tag",)


@dataclass(frozen=True)
class Cell:
    """What the template shows of a cell."""

    kind: str  #: prose, aims or code
    number: int
    body: Markup
    outputs: tuple[Markup, ...] = ()
    note: str = ""  #: where it ran, how long


def render(
    notebook: Notebook,
    executed: NotebookNode,
    result: Result | None,
    earlier: Notebook | None = None,
    later: Notebook | None = None,
) -> str:
    """The page of a notebook. `executed` may be its source, where it has not been run (result None)."""
    cells = [_cell(number, cell, notebook) for number, cell in _numbered(notebook, executed)]
    return (
        environment()
        .get_template("page.html.j2")
        .render(
            notebook=notebook,
            header=notebook.header,
            cells=cells,
            sections=_sections(cells),
            result=result,
            earlier=earlier,
            later=later,
            css=Markup(style()),
        )
    )


@cache
def environment() -> jinja2.Environment:
    templates = str(files("aiscale.book") / "templates")
    made = jinja2.Environment(loader=jinja2.FileSystemLoader(templates), autoescape=True, trim_blocks=True)
    made.filters["duration"] = duration
    return made


@cache
def style() -> str:
    """The style sheet, with the colours of code for a light and a dark screen."""
    text = (files("aiscale.book") / "templates" / "book.css").read_text()
    light = HtmlFormatter(style="friendly").get_style_defs(".highlight")
    dark = HtmlFormatter(style="github-dark").get_style_defs(".highlight")
    # Backgrounds are the page's own.
    light, dark = (re.sub(r"^(pre|td\.|span\.|\.highlight \{).*$", "", part, flags=re.M) for part in (light, dark))
    return f"{text}\n{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n"


def duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else f"{int(seconds // 60)} min {int(seconds % 60)} s"


def _numbered(notebook: Notebook, executed: NotebookNode) -> list[tuple[int, NotebookNode]]:
    """Cells with their number in the source; what papermill inserted has 0, its own error banners are left out."""
    numbers = {cell.get("id"): number for number, cell in enumerate(notebook.content.cells, 1)}
    return [
        (numbers.get(cell.get("id"), 0), cell)
        for cell in executed.cells
        if not any(tag in _FROM_PAPERMILL for tag in tags(cell)) and cell.cell_type != "raw"
    ]


def _cell(number: int, cell: NotebookNode, notebook: Notebook) -> Cell:
    if cell.cell_type == "markdown":
        source, kind = cell.source, "prose"
        if number == 1:  # the page shows title, promise and table in its own way
            source, kind = source.partition("\n## ")[2], "aims"
            source = f"## {source}" if source else ""
        return Cell(kind, number, Markup(_prose(source, cell)))
    where = "on every rank" if cell.source.lstrip().startswith("%%px") else ""
    given = "parameters of this run" if number == 0 else ""
    seconds = cell.metadata.get("papermill", {}).get("duration")
    took = duration(seconds) if seconds and seconds >= 0.05 else ""
    return Cell(
        kind="code",
        number=number,
        body=Markup(Highlight2HTML()(cell.source, "ipython3")),
        outputs=tuple(Markup(text) for text in map(_output, cell.outputs, [number] * len(cell.outputs)) if text),
        note=" · ".join(part for part in (where, given, took) if part),
    )


def _prose(source: str, cell: NotebookNode) -> str:
    text = to_html(source, cell.get("attachments"))
    text = text.replace("&#182;", "#")
    # A wide table scrolls by itself instead of widening the page.
    text = re.sub(r"<table.*?</table>", lambda t: f'<div class="wide" tabindex="0">{t[0]}</div>', text, flags=re.S)
    return re.sub(r'href="((?:\./)?\d\d_\w+)\.ipynb', r'href="\1.html', text)


def _output(output: NotebookNode, number: int) -> str:
    if output.output_type == "stream":
        return f'<pre class="{output.name}" tabindex="0">{ansi2html(output.text)}</pre>'
    if output.output_type == "error":
        text = "\n".join(output.traceback) or f"{output.ename}: {output.evalue}"
        return f'<pre class="error" tabindex="0">{ansi2html(text)}</pre>'
    return _rich(output.get("data", {}), number)


def _rich(data: Mapping[str, str], number: int) -> str:
    """The richest form that needs nothing from outside. Widgets and scripts do, so their text stands in."""
    if "text/html" in data and "<script" not in data["text/html"].lower() and not loads(data["text/html"]):
        return f'<div class="wide" tabindex="0">{data["text/html"]}</div>'
    if "image/svg+xml" in data:
        return f'<figure role="img" aria-label="figure of cell {number}">{data["image/svg+xml"]}</figure>'
    for mime, kind in _IMAGES.items():
        if mime in data:
            encoded = data[mime].replace("\n", "")
            return f'<figure><img src="data:image/{kind};base64,{encoded}" alt="figure of cell {number}"></figure>'
    if "text/markdown" in data or "text/latex" in data:
        return f'<div class="prose">{to_html(data.get("text/markdown") or data["text/latex"])}</div>'
    plain = data.get("text/plain", "")
    return f'<pre tabindex="0">{ansi2html(plain)}</pre>' if plain and not _RETURNED.match(plain) else ""


def _sections(cells: list[Cell]) -> list[tuple[str, Markup]]:
    """(anchor, heading) of the lesson's sections."""
    pattern = re.compile(r'<h2 id="([^"]*)">(.*?)<a class="anchor-link"', re.S)
    prose = "".join(cell.body for cell in cells if cell.kind == "prose")
    return [(html.unescape(anchor), Markup(text)) for anchor, text in pattern.findall(prose)]


class _Loads(HTMLParser):
    """Collects what a browser would fetch from elsewhere to show a page; a plain link is not fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._in_style = False

    def handle_starttag(self, tag: str, attributes: list) -> None:
        self._in_style = tag == "style"
        for name, value in attributes:
            fetched = name in ("src", "srcset", "poster", "data", "background") or (
                name in ("href", "xlink:href") and tag not in ("a", "area")
            )
            if fetched and not (value or "").startswith(("data:", "#")):
                self.found.append(f"{tag} {name}={value}")
            if name == "style":
                self._read_css(value or "")

    def handle_endtag(self, tag: str) -> None:
        self._in_style = self._in_style and tag != "style"

    def handle_data(self, data: str) -> None:
        if self._in_style:
            self._read_css(data)

    def _read_css(self, text: str) -> None:
        self.found += re.findall(r"@import[^;]+|url\(\s*['\"]?(?!data:|#)[^)]+\)", text)


def loads(text: str) -> list[str]:
    """What a browser would fetch to show this HTML, other than the HTML itself."""
    parser = _Loads()
    parser.feed(text)
    return parser.found
