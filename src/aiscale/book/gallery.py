"""The gallery, the course's page: build/gallery/index.html with a card per notebook and what the course has beside them
(`aiscale.book.course`), and each executed notebook as a page.

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
from collections.abc import Mapping
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

from aiscale.book.core import headings, is_optional
from aiscale.book.course import page_name, shelves
from aiscale.book.execute import SKIPPED
from aiscale.book.notebook import BookError, Notebook, find_root, notebooks, read, tags
from aiscale.book.results import load_results

_FORMULA_PX = 19
_DELIMITERS = re.compile(r"^\s*(\$\$|\\\[|\\\\\[)(.*?)(\$\$|\\\]|\\\\\])\s*$", re.S)
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
        cells = _cells(notebook, content)
        text = template("page").render(
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
        figure, alt = _save_figure(content, folder / "figures" / f"{notebook.name}.png")
        cards.append({"notebook": notebook, "result": result, "figure": figure, "alt": alt})
    workshop = (Path(root) if root else find_root()).parent / "workshop"
    beside = shelves(workshop, Path(out), folder, lambda *what: _sheet(workshop, folder, *what))
    for card in cards:
        number = card["notebook"].header.number
        with_lessons = [shelf for shelf in beside if shelf.name in ("exercises", "decks")]
        card["more"] = [(s.heading, i.href) for s in with_lessons for i in s.items if number and i.lesson == number]
    text = template("index").render(
        cards=cards, shelves=beside, map=_field_map(workshop, folder), css=Markup(_style()), **_facts(cards)
    )
    _write(folder / "index.html", text, allowed="img src=figures/")
    return folder / "index.html"


def _field_map(workshop: Path, folder: Path) -> str:
    """The map of the field beside the gallery; empty if there is none."""
    if not (source := workshop / "field_map.svg").exists():
        return ""
    (folder / "figures" / source.name).write_bytes(source.read_bytes())
    return f"figures/{source.name}"


def _sheet(workshop: Path, folder: Path, title: str, source: Path, cells: list[tuple[str, str]]) -> str:
    """Write a page of Markdown and code that was not run; returns its file name."""
    name, parts = page_name(source, workshop), []
    for kind, text in cells:
        if kind == "markdown":
            text = re.sub(rf"\A\s*#+ +{re.escape(title)}\s*$", "", text, count=1, flags=re.M)  # the page's own heading
            parts.append(Cell("prose", 0, Markup(_relinked(to_html(text, pages=False), source, workshop))))
        else:
            parts.append(Cell("code", 0, Markup(Highlight2HTML()(text, "ipython3"))))
    where = source.relative_to(workshop.parent) if source.suffix != ".md" else ""
    _write(folder / name, sheet(title, parts, where, course=True))
    return name


def sheet(title: str, cells: list[Cell], where: str | Path = "", course: bool = False) -> str:
    """A page of these cells, in the gallery's look; one of the course leads back to it."""
    return template("sheet").render(title=title, where=where, cells=cells, course=course, css=Markup(_style()))


def _relinked(text: str, source: Path, workshop: Path) -> str:
    """Links to files that are pages here lead to them; others, which a reader of the gallery lacks, become text."""

    def lead(link: re.Match) -> str:
        path, _, anchor = html.unescape(link[1]).partition("#")
        if not path or re.match(r"\w+:", path):
            return link[0]
        name = page_name(source.parent / path, workshop)
        return f'<a href="{name}{"#" + anchor if anchor else ""}">{link[2]}</a>' if name else link[2]

    # Anchors as GitHub makes them, where these pages are read too.
    text = re.sub(r'(<h\d id="|class="anchor-link" href="#)([^"]*)', lambda found: found[1] + _anchor(found[2]), text)
    return re.sub(r'<a href="([^"]*)">(.*?)</a>', lead, text, flags=re.S)


def _anchor(escaped: str) -> str:
    return re.sub(r"[^\w-]", "", html.unescape(escaped)).lower()


@cache
def template(name: str) -> jinja2.Template:
    templates = jinja2.FileSystemLoader(str(files("aiscale.book") / "templates"))
    environment = jinja2.Environment(loader=templates, autoescape=True, trim_blocks=True)
    environment.filters["duration"] = _duration
    return environment.get_template(f"{name}.html.j2")


@cache
def _style() -> str:
    """The style sheet, with syntax colours for light and dark mode."""
    text = (files("aiscale.book") / "templates" / "book.css").read_text()
    light = HtmlFormatter(style="xcode").get_style_defs(".highlight")
    dark = HtmlFormatter(style="github-dark").get_style_defs(".highlight")
    # Backgrounds are the page's own.
    light, dark = (re.sub(r"^(pre|td\.|span\.|\.highlight \{).*$", "", part, flags=re.M) for part in (light, dark))
    return f"{text}\n{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n"


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else f"{int(seconds // 60)} min {int(seconds % 60)} s"


def _save_figure(content: NotebookNode, path: Path) -> tuple[str, str]:
    """(the figure of a notebook's card, its description), empty if it has none."""
    path.unlink(missing_ok=True)
    cells = sorted(content.cells, key=lambda cell: "cover" not in tags(cell))
    outputs = (output for cell in cells for output in cell.get("outputs", []))
    output = next((output for output in outputs if "image/png" in output.get("data", {})), None)
    if output is None:
        return "", ""
    path.write_bytes(base64.b64decode(output["data"]["image/png"]))
    return f"{path.parent.name}/{path.name}", _description(output)


def _description(output: NotebookNode) -> str:
    """What `plots.describe` said of the figure when it was shown."""
    return output.get("metadata", {}).get("image/png", {}).get("alt", "")


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


def _cells(notebook: Notebook, executed: NotebookNode) -> list[Cell]:
    """The cells with their number in the source; 0 for cells inserted by papermill."""
    numbers = {cell.get("id"): number for number, cell in enumerate(notebook.content.cells, 1)}
    cells, section = [], notebook.header.title
    for cell in (cell for cell in executed.cells if cell.cell_type != "raw"):
        section = next((title for _, title in reversed(headings(cell))), section)
        cells.append(_cell(numbers.get(cell.get("id"), 0), cell, section))
    return cells


def _cell(number: int, cell: NotebookNode, section: str) -> Cell:
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
    skipped = "left out of this run" if SKIPPED in tags(cell) else ""
    took = _duration(seconds) if seconds and seconds >= 0.05 else ""
    return Cell(
        kind="code",
        number=number,
        body=Markup(Highlight2HTML()(cell.source, "ipython3")),
        outputs=tuple(Markup(text) for output in cell.outputs if (text := _output(output, section))),
        note=" · ".join(part for part in (where, given, skipped, took) if part),
        optional=is_optional(cell),
    )


def _output(output: NotebookNode, section: str) -> str:
    if output.output_type == "stream":
        return f'<pre class="{output.name}" tabindex="0">{ansi2html(output.text)}</pre>'
    if output.output_type == "error":
        text = "\n".join(output.traceback) or f"{output.ename}: {output.evalue}"
        return f'<pre class="error" tabindex="0">{ansi2html(text)}</pre>'
    return _rich(output.get("data", {}), _description(output) or f"Figure in the section “{section}”.")


def _rich(data: Mapping[str, str], alt: str) -> str:
    """The richest format that is self-contained; widgets and scripts are not, so their text is shown."""
    if "text/html" in data and "<script" not in data["text/html"].lower() and not loads(data["text/html"]):
        return f'<div class="wide" tabindex="0">{data["text/html"]}</div>'
    if "image/png" in data:
        encoded = data["image/png"].replace("\n", "")
        return f'<figure><img src="data:image/png;base64,{encoded}" alt="{html.escape(alt)}"></figure>'
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


def to_html(source: str, attachments: dict | None = None, pages: bool = True) -> str:
    """A notebook's Markdown as HTML; with `pages`, links to notebooks beside it lead to their pages."""
    text = MarkdownWithMath(renderer=_Renderer(escape=False, attachments=attachments or {})).render(source)
    text = re.sub(r"<th([^>]*)></th>", r"<td\1></td>", text.replace("&#182;", "#"))  # an empty corner heads nothing
    # Wide code and tables scroll by themselves instead of widening the page, also by keyboard.
    text = text.replace("<pre>", '<pre tabindex="0">')
    text = re.sub(r"<table.*?</table>", lambda t: f'<div class="wide" tabindex="0">{t[0]}</div>', text, flags=re.S)
    if not pages:
        return text
    text = re.sub(r'href="(?:\.\./)+workshop/exercises/(\w+)\.ipynb', r'href="exercises_\1.html', text)
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
