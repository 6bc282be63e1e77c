"""The gallery: build/gallery/index.html with a card per notebook, and each executed notebook as a page beside it.

    build_gallery(out="build")    # -> Path("build/gallery/index.html")
    loads(text)                   # -> [] or what a browser would fetch to show this HTML

Everything is readable from a folder on disk, without a network. Pages load no script, font or style sheet; formulas
are inline SVG; only the index loads figures from files beside it. A card shows the figure of the cell tagged `cover`,
else the first figure.
"""

from __future__ import annotations

import base64
import html
import os
import platform
import re
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from itertools import groupby
from pathlib import Path

import jinja2
import ziafont
import ziamath
from bs4 import BeautifulSoup
from markupsafe import Markup
from nbconvert.filters import Highlight2HTML, ansi2html
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from nbformat import NotebookNode
from pygments.formatters import HtmlFormatter

from aiscale.book.core import is_optional
from aiscale.book.notebook import BookError, Notebook, notebooks, read, tags
from aiscale.book.results import load_results

_FORMULA_PX = 19
_DELIMITERS = re.compile(r"^\s*(\$\$|\\\[|\\\\\[)(.*?)(\$\$|\\\]|\\\\\])\s*$", re.S)
_IMAGES = {"image/png": "png", "image/jpeg": "jpeg"}
_FETCHED = ("src", "srcset", "poster", "data", "background")  #: attributes whose values a browser fetches
#: The repr that a drawing call returns, which adds nothing to its figure.
_RETURNED = re.compile(r"\s*[\[(]*(array\(\[*)?<(Axes|Figure|matplotlib)")

ziafont.config.svg2 = False  # with SVG 2 glyphs have ids, which would clash between formulas of a page
ziafont.config.precision = 2


@dataclass(frozen=True)
class Cell:
    kind: str  #: prose, aims or code
    number: int
    body: Markup
    outputs: tuple[Markup, ...] = ()
    note: str = ""  #: where it ran, how long
    optional: bool = False


def build_gallery(root: str | Path | None = None, out: str | Path = "build") -> Path:
    """Write the gallery of the notebooks in `root` from their executed copies in OUT/notebooks; returns its index."""
    executed, folder = Path(out) / "notebooks", Path(out) / "gallery"
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    found, results = notebooks(root=root), load_results(executed)
    cards = []
    for earlier, notebook, later in zip([None, *found], found, [*found[1:], None], strict=False):
        copy = executed / f"{notebook.name}.ipynb"
        result = results.get(notebook.name) if copy.exists() else None
        content = read(copy) if result else notebook.content
        cells = [_cell(number, cell) for number, cell in _numbered(notebook, content)]
        text = _template("page").render(
            notebook=notebook,
            header=notebook.header,
            parts=[(optional, list(part)) for optional, part in groupby(cells, lambda cell: cell.optional)],
            sections=_sections(cells),
            result=result,
            earlier=earlier,
            later=later,
            css=Markup(_style()),
        )
        _write(folder / f"{notebook.name}.html", text)
        figure = _save_figure(content, folder / "figures" / f"{notebook.name}.png")
        cards.append({"notebook": notebook, "result": result, "figure": figure})
    text = _template("index").render(cards=cards, css=Markup(_style()), **_facts(cards))
    _write(folder / "index.html", text, allowed="img src=figures/")
    return folder / "index.html"


@cache
def _template(name: str) -> jinja2.Template:
    templates = jinja2.FileSystemLoader(str(files("aiscale.book") / "templates"))
    environment = jinja2.Environment(loader=templates, autoescape=True, trim_blocks=True)
    environment.filters["duration"] = _duration
    return environment.get_template(f"{name}.html.j2")


@cache
def _style() -> str:
    """The style sheet, with syntax colours for light and dark mode."""
    text = (files("aiscale.book") / "templates" / "book.css").read_text()
    light = HtmlFormatter(style="friendly").get_style_defs(".highlight")
    dark = HtmlFormatter(style="github-dark").get_style_defs(".highlight")
    # Backgrounds are the page's own.
    light, dark = (re.sub(r"^(pre|td\.|span\.|\.highlight \{).*$", "", part, flags=re.M) for part in (light, dark))
    return f"{text}\n{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n"


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else f"{int(seconds // 60)} min {int(seconds % 60)} s"


def _save_figure(content: NotebookNode, path: Path) -> str:
    path.unlink(missing_ok=True)
    cells = sorted(content.cells, key=lambda cell: "cover" not in tags(cell))
    outputs = (output.get("data", {}) for cell in cells for output in cell.get("outputs", []))
    image = next((data["image/png"] for data in outputs if "image/png" in data), None)
    if image is None:
        return ""
    path.write_bytes(base64.b64decode(image))
    return f"{path.parent.name}/{path.name}"


def _facts(cards: list[dict]) -> dict[str, object]:
    run = [card["result"] for card in cards if card["result"]]
    return {
        "passed": sum(result.state == "passed" for result in run),
        "failed": sum(result.state == "failed" for result in run),
        "seconds": sum(result.seconds for result in run),
        "minutes": sum(card["notebook"].header.minutes for card in cards if not card["notebook"].is_appendix),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "versions": f"Python {sys.version.split()[0]}, torch {version('torch')}",
        "built": time.strftime("%Y-%m-%d %H:%M"),
    }


# a cell -------------------------------------------------------------------------------------------------------------


def _numbered(notebook: Notebook, executed: NotebookNode) -> Iterator[tuple[int, NotebookNode]]:
    """Cells with their number in the source; 0 for cells inserted by papermill."""
    numbers = {cell.get("id"): number for number, cell in enumerate(notebook.content.cells, 1)}
    return ((numbers.get(cell.get("id"), 0), cell) for cell in executed.cells if cell.cell_type != "raw")


def _cell(number: int, cell: NotebookNode) -> Cell:
    if cell.cell_type == "markdown":
        source, kind = cell.source, "prose"
        if number == 1:  # the page has its own head with title, promise and table
            source, kind = source.partition("\n## ")[2], "aims"
            source = f"## {source}" if source else ""
        return Cell(kind, number, Markup(to_html(source, cell.get("attachments"))), optional=is_optional(cell))
    where = "on every rank" if cell.source.lstrip().startswith("%%px") else ""
    given = "parameters of this run" if number == 0 else ""
    ran = cell.execution_count is not None
    seconds = cell.metadata.get("papermill", {}).get("duration") if ran else None
    skipped = "left out of this run" if is_optional(cell) and "papermill" in cell.metadata and not ran else ""
    took = _duration(seconds) if seconds and seconds >= 0.05 else ""
    return Cell(
        kind="code",
        number=number,
        body=Markup(Highlight2HTML()(cell.source, "ipython3")),
        outputs=tuple(Markup(text) for output in cell.outputs if (text := _output(output, number))),
        note=" · ".join(part for part in (where, given, skipped, took) if part),
        optional=is_optional(cell),
    )


def _output(output: NotebookNode, number: int) -> str:
    if output.output_type == "stream":
        return f'<pre class="{output.name}" tabindex="0">{ansi2html(output.text)}</pre>'
    if output.output_type == "error":
        text = "\n".join(output.traceback) or f"{output.ename}: {output.evalue}"
        return f'<pre class="error" tabindex="0">{ansi2html(text)}</pre>'
    return _rich(output.get("data", {}), number)


def _rich(data: Mapping[str, str], number: int) -> str:
    """The richest format that is self-contained; widgets and scripts are not, so their text is shown."""
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
    pattern = re.compile(r'<h2 id="([^"]*)">(.*?)<a class="anchor-link"', re.S)
    prose = "".join(cell.body for cell in cells if cell.kind == "prose")
    return [(html.unescape(anchor), Markup(text)) for anchor, text in pattern.findall(prose)]


# prose and its formulas ---------------------------------------------------------------------------------------------


class _Renderer(IPythonRenderer):
    def inline_math(self, body: str) -> str:
        return _formula(body, inline=True)

    def block_math(self, body: str) -> str:
        return _formula(body, inline=False)

    def multiline_math(self, text: str) -> str:
        inner = _DELIMITERS.match(text)
        return _formula(inner[2] if inner else text, inline=False)

    def latex_environment(self, name: str, body: str) -> str:
        return _formula(rf"\begin{{{name}}}{body}\end{{{name}}}", inline=False)

    def block_mermaidjs(self, code: str) -> str:
        return f"<pre>{self.escape_html(code)}</pre>"  # mermaid would come from the network


def to_html(source: str, attachments: dict | None = None) -> str:
    """A notebook's Markdown as HTML; links to notebooks lead to their pages."""
    text = MarkdownWithMath(renderer=_Renderer(escape=False, attachments=attachments or {})).render(source)
    text = text.replace("&#182;", "#")
    # A wide table scrolls by itself instead of widening the page.
    text = re.sub(r"<table.*?</table>", lambda t: f'<div class="wide" tabindex="0">{t[0]}</div>', text, flags=re.S)
    text = re.sub(r'<a href="\.\./workshop/[^"]*">(.*?)</a>', r"\1", text)  # which no page shows
    return re.sub(r'href="(?:\./|\.\./|appendix/)?((?:\d\d|A\d)_\w+)\.ipynb', r'href="\1.html', text)


@cache
def _formula(tex: str, inline: bool) -> str:
    """TeX as SVG, or the TeX itself if it cannot be drawn."""
    tex = html.unescape(tex).strip()
    label = html.escape(tex, quote=True)
    try:
        formula = ziamath.Latex(tex, size=_FORMULA_PX, color="currentColor", inline=inline)
        svg, below_px = formula.svg(), formula.getyofst()  # negative: how far it reaches below the line
    except Exception:  # the formula parser raises many types
        return f'<code class="tex">{label}</code>'
    if not inline:
        return f'<span class="formula block" role="math" aria-label="{label}" tabindex="0">{svg}</span>'
    style = f"vertical-align:{below_px:.1f}px"
    return f'<span class="formula" role="math" aria-label="{label}" style="{style}">{svg}</span>'


# self-contained pages -----------------------------------------------------------------------------------------------


def _write(path: Path, text: str, allowed: str | None = None) -> None:
    """Write a page after checking that it loads nothing but `allowed`."""
    outside = [load for load in loads(text) if allowed is None or not load.startswith(allowed)]
    if outside:
        raise BookError(f"{path.stem} would load {outside[0]}: take it out of the notebook, which is read offline")
    path.write_text(text, encoding="utf-8")


def loads(text: str) -> list[str]:
    """What a browser would fetch to show this HTML, other than the HTML itself; a plain link is not fetched."""
    tags_of_page = BeautifulSoup(text, "html.parser").find_all(True)
    found = [
        f"{tag.name} {name}={value}"
        for tag in tags_of_page
        for name, value in tag.attrs.items()
        if name in _FETCHED or (name in ("href", "xlink:href") and tag.name not in ("a", "area"))
        if not str(value).startswith(("data:", "#"))
    ]
    sheets = [tag.get_text() for tag in tags_of_page if tag.name == "style"]
    for css in [*sheets, *(tag["style"] for tag in tags_of_page if tag.has_attr("style"))]:
        found += re.findall(r"@import[^;]+|url\(\s*['\"]?(?!data:|#)[^)]+\)", css)
    return found
