"""The site: lessons as they were executed, and the workshop's pages, by Sphinx with myst-nb. `make site` builds it.

    make site    # build/site/index.html, which opens without a server or a network

The Makefile gathers the pages in build/pages: this folder's files on top, the other pages in their places, and the
executed copies of the notebooks (build/notebooks) over those without outputs.
"""

import base64
import html
import os
import re
import sys
from pathlib import Path
from urllib.parse import urlsplit

import latex2mathml.converter
import nbformat
from docutils import nodes

project = "aiscale"
html_title = "aiscale"
extensions = ["myst_nb", "sphinx_design", "sphinx_copybutton"]
nb_execution_mode = "off"
nb_merge_streams = True
myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence"]
myst_heading_anchors = 4
# Pages link to folders and files of the repository, which the site does not have.
suppress_warnings = ["myst.xref_missing", "toc.not_included", "misc.highlighting_failure", "design.card_legacy"]
html_theme = "sphinx_book_theme"
html_theme_options = {"show_navbar_depth": 1, "home_page_in_toc": False, "use_download_button": False}
html_theme_options["footer_content_items"] = []  # else "By Author name not set"
# Where it is published. Without it there are no launch buttons, and on a host that is neither GitHub nor GitLab none.
repository = os.environ.get("REPOSITORY_URL", "").rstrip("/").removesuffix(".git")
hub = next((kind for kind in ("github", "gitlab") if kind in urlsplit(repository).netloc), "")
if hub:
    html_theme_options |= {"repository_url": repository, "use_repository_button": True, "use_issues_button": True}
elif repository:
    print(f"REPOSITORY_URL is {repository}, neither GitHub nor GitLab: the site has no launch buttons", file=sys.stderr)
html_static_path = ["site.css", "guesses.js"]
html_extra_path = ["workshop/quiz.html", "workshop/cheat_sheet.html"]  # on top, where their addresses are short
html_css_files, html_js_files = ["site.css"], ["guesses.js"]
html_math_renderer = "mathml"
html_show_sourcelink = html_show_copyright = html_show_sphinx = False

HERE = Path(__file__).parent
COLAB, COLAB_URL = ("00_start_here", "03_ddp"), "https://colab.research.google.com"  #: lessons with a set-up there
# What runs in a reader's browser, from a web server; the workflows that publish the site write these pages.
PLAY = """Two pages run Python in yours: <a href="play/index.html">the planner</a>, and
<a href="play/puzzle.html">eleven puzzles</a> in which you program the ranks."""


def lesson(path: Path) -> dict[str, str]:
    """Title, first paragraph, table of the header and cover of a notebook."""
    notebook = nbformat.read(path, as_version=4)
    title, about, table = notebook.cells[0].source.split("\n\n")[:3]
    row = [cell.strip() for cell in table.splitlines()[2].strip("|").split("|")]
    cover = next(c for c in notebook.cells if "cover" in c.metadata.get("tags", []))
    drawing = re.search(r"figures/\w+\.svg", cover.source)
    image = f"notebooks/{drawing[0]}" if drawing else ""
    for png in (o.data["image/png"] for o in cover.get("outputs", ()) if "image/png" in o.get("data", {})):
        image = f"covers/{path.stem}.png"
        (HERE / "covers").mkdir(exist_ok=True)
        (HERE / image).write_bytes(base64.b64decode(png))
    return {"title": title.removeprefix("# "), "about": about, "minutes": row[0], "ranks": row[1], "image": image}


def cards(folder: str) -> str:
    """A grid of cards, one for each notebook of a folder, in Markdown for sphinx-design."""
    grid = ["::::{grid} 1 2 2 3", ":gutter: 3", ""]
    for path in sorted((HERE / folder).glob("*.ipynb")):
        of = lesson(path)
        grid += [f":::{{grid-item-card}} {of['title']}", f":link: {folder}/{path.stem}", ":link-type: doc"]
        grid += [f":img-top: {of['image']}"] if of["image"] else []
        grid += ["", of["about"], "+++", f"{of['minutes']} minutes, ranks: {of['ranks']}", ":::", ""]
    return "\n".join([*grid, "::::"])


def start() -> str:
    """How a reader of the index gets to run the lessons, in Markdown."""
    if not repository:
        return ""
    on = {f"notebooks/{lesson}": lesson[:2] for lesson in COLAB}
    if repository.startswith("https://github.com/"):
        there = repository.replace("https://github.com", "https://codespaces.new")
        lessons = " and ".join(f"[{number}]({page}.ipynb)" for page, number in on.items())
        return f"[Start in a browser]({there}): Codespaces. On Colab: lessons {lessons}, whose pages say how."
    return f"On your machine: `git clone {repository}`, then `make lab` in the new folder."


def on_colab(lesson: str) -> str:
    """The set-up of a lesson on Colab, in Markdown."""
    there = repository.replace("https://github.com", f"{COLAB_URL}/github") + f"/blob/main/notebooks/{lesson}.ipynb"
    open_it = f"[open the lesson]({there})" if repository.startswith("https://github.com/") else "upload the lesson"
    return f"""**On [Colab]({COLAB_URL})**: {open_it}, make this its first cell and run it; it takes a minute or two.

```
!git clone -q --depth 1 {repository} /content/aiscale && bash /content/aiscale/scripts/colab.sh
%cd /content/aiscale/notebooks
```"""


def fill(app, doc: str, source: list[str]) -> None:
    if doc in ("workshop/README", "workshop/only_a_browser"):  # a page to open, not a file to download
        source[0] = re.sub(r"\[([^]]+)\]\((quiz|cheat_sheet)\.html\)", r'<a href="../\2.html">\1</a>', source[0])
    if doc == "index":
        source[0] = re.sub(r"^\{\{cards (\S+)\}\}$", lambda line: cards(line[1]), source[0], flags=re.M)
        source[0] = source[0].replace("{{start}}", start())
        source[0] = source[0].replace("{{play}}", PLAY if repository else "")


def ask(app) -> None:
    """Turn predictions of executed notebooks into forms, and what was measured into answers that guesses.js hides."""
    for path in HERE.glob("notebooks/**/*.ipynb"):
        notebook = nbformat.read(path, as_version=4)
        # papermill's own cell names a folder of the machine that ran the lesson
        notebook.cells = [c for c in notebook.cells if "injected-parameters" not in c.metadata.get("tags", [])]
        if repository and path.stem in COLAB:
            notebook.cells.insert(1, nbformat.v4.new_markdown_cell(on_colab(path.stem)))
        for output in (output for cell in notebook.cells for output in cell.get("outputs", ())):
            facts, data = output.get("metadata", {}).get("aiscale", {}), output.get("data", {})
            if "predict" in facts:
                data["text/html"] = form(facts["predict"], data["text/plain"])
            elif "against" in facts:
                said = re.search(r"(?:measured|computed) (.*), without", data["text/plain"])
                truth = html.escape(str(facts.get("measured", said and said[1])))
                shown = data["text/html"].replace(", without a guess", "")
                about = f'data-name="{html.escape(facts["against"])}" data-truth="{truth}"'
                data["text/html"] = f'<div class="truth" {about}>{shown}</div>'
            elif re.match(r"<b>\d+ of \d+ right or close", data.get("text/html", "")):
                data["text/html"] = '<div class="score"></div>'
        nbformat.write(notebook, path)


def form(name: str, text: str) -> str:
    """A prediction's form: a button for each choice, a field for a number; a grid is filled on paper."""
    choices = re.findall(r"^  \d+  (.*)$", text, flags=re.M)
    grid = "each cell" in text
    if grid:
        field = "<small>a grid: fill it on paper</small><button>I have it</button>"
    elif choices:
        field = "".join(f'<button value="{html.escape(choice)}">{html.escape(choice)}</button>' for choice in choices)
    else:
        field = '<input aria-label="your guess" placeholder="12, 3.5 MiB, ..."><button>guess</button>'
    name = html.escape(name)
    return f'<form class="guess{" grid" * grid}" data-name="{name}"><b>{name}?</b> {field} <output></output></form>'


def mathml(display: str):
    """Formulas as MathML, which browsers draw by themselves."""

    def visit(writer, node):
        writer.body.append(latex2mathml.converter.convert(node.astext(), display=display))
        raise nodes.SkipNode

    return visit


def color_magics(app, doctree) -> None:
    """A cell with a magic is highlighted as what it holds: the changes of a script as a diff, the rest as Python."""
    for block in doctree.findall(nodes.literal_block):
        magic = re.match(r"%%(\w+)", block.astext())
        if magic and magic[1] == "change":
            block["language"] = "diff"
        elif magic and magic[1] in ("px", "fill", "write", "time"):
            block["language"] = "python"


def setup(app):
    app.add_html_math_renderer("mathml", (mathml("inline"), None), (mathml("block"), None))
    app.connect("builder-inited", ask)
    app.connect("source-read", fill)
    app.connect("doctree-read", color_magics)
