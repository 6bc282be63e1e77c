"""The gallery: a card per notebook, pages that load nothing and fit a phone."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from nbformat.v4 import new_output

from aiscale import book
from aiscale.book.gallery import build_gallery, loads, to_html
from aiscale.book.running import Failure, Result, save_result
from browser import Browser, find_browser
from lessons import lesson, write

PNG = base64.b64encode(
    base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg==")
).decode()


def executed(shelf: Path, out: Path, name: str, *outputs, failure: Failure | None = None, tag: str = "") -> None:
    """Write the executed copy of a notebook whose second-to-last code cell gave `outputs`."""
    content = book.read(shelf / f"{name}.ipynb")
    cell = content.cells[5]
    cell.outputs = list(outputs)
    if tag:
        cell.metadata["tags"] = [tag]
    path = write(content, out / "notebooks" / f"{name}.ipynb")
    state = "failed" if failure else "passed"
    save_result(path.parent, name, Result(name, state, 12.3, 3, failure=failure, executed=str(path)))


def display(**data):
    return new_output("display_data", {mime.replace("_", "/"): value for mime, value in data.items()})


def test_the_gallery_has_a_card_per_notebook_with_figure_state_and_seconds(shelf, tmp_path):
    executed(shelf, tmp_path, "00_start", display(image_png=PNG))
    failure = Failure("ValueError: <no>", 6, "raise", "Traceback")
    executed(shelf, tmp_path, "03_ddp", display(text_plain="x"), failure=failure)
    index = build_gallery(shelf, tmp_path)
    text = index.read_text()
    for said in (
        "1 of 3 passed",
        "passed in 12.3 s",
        "failed in 12.3 s",
        "not run",
        "ValueError: &lt;no&gt;",
        "2 ranks",
    ):
        assert said in text
    assert (
        'src="figures/00_start.png"' in text and (index.parent / "figures/00_start.png").read_bytes()[:4] == b"\x89PNG"
    )
    assert text.count("<article") == 3 and 'href="03_ddp.html"' in text
    assert 'href="#cell-6"' in (index.parent / "03_ddp.html").read_text()


def test_appendices_have_a_part_of_their_own(shelf, tmp_path):
    write(book.read(shelf / "03_ddp.ipynb"), shelf / "appendix" / "A1_more.ipynb")
    text = build_gallery(shelf, tmp_path).read_text()
    lessons, appendices = text.split("Appendices</h2>")
    assert lessons.count("<article") == 3 and appendices.count("<article") == 1 and "A1_more.html" in appendices
    assert "15 min" in text, "the minutes are those of the lessons"
    assert 'href="A1_more.html"' in to_html("[more](appendix/A1_more.ipynb)")


def test_pages_load_nothing_and_show_formulas_drawn(shelf, tmp_path):
    executed(shelf, tmp_path, "03_ddp", display(image_png=PNG), display(text_latex="$$x^2$$"))
    build_gallery(shelf, tmp_path)
    text = (tmp_path / "gallery" / "03_ddp.html").read_text()
    assert loads(text) == []
    assert text.count('role="math"') == 2 and "<svg" in text
    assert 'src="data:image/png;base64' in text


def test_a_figure_is_described_by_what_it_says_else_by_its_section(shelf, tmp_path):
    described = new_output(
        "display_data", {"image/png": PNG}, metadata={"image/png": {"alt": "Lines. Up: <b>, 1 to 2."}}
    )
    executed(shelf, tmp_path, "03_ddp", described, display(image_png=PNG))
    text = build_gallery(shelf, tmp_path).read_text()
    assert 'alt="Lines. Up: &lt;b&gt;, 1 to 2."' in text
    text = (tmp_path / "gallery" / "03_ddp.html").read_text()
    assert (
        'alt="Lines. Up: &lt;b&gt;, 1 to 2."' in text and 'alt="Figure in the section “You will be able to”."' in text
    )


def test_what_the_course_has_beside_its_lessons_is_on_its_page(shelf, tmp_path):
    """Exercises, decks and sheets: pages, links and copies; links between them lead to pages, others become text."""
    workshop = shelf.parent / "workshop"
    (workshop / "blocks").mkdir(parents=True)
    (tmp_path / "slides").mkdir()
    write(lesson(number="03"), workshop / "exercises" / "03_ddp.ipynb")
    (workshop / "README.md").write_text("# The instructor\n\nSee [this](blocks/03.md#whos-late), [that](gone.md).\n")
    block = "# 03 · Block\n\n[a lesson](../../notebooks/03_ddp.ipynb)\n\n## Who's late?\n"
    (workshop / "blocks" / "03.md").write_text(block)
    (workshop / "quiz.html").write_text("<title>aiscale: quiz</title>")
    (tmp_path / "slides" / "03_ddp.html").write_text("<title>A deck</title>")
    index = build_gallery(shelf, tmp_path)
    text, page = index.read_text(), index.with_name("instructor.html").read_text()
    for link in ("exercises_03_ddp.html", "../slides/03_ddp.html", "quiz.html", "blocks_03.html"):
        assert f'href="{link}"' in text
    assert text.count('href="../slides/03_ddp.html"') == 2, "on the shelf, and on the lesson's card"
    assert 'id="clinic"' not in text and (index.parent / "quiz.html").exists()
    assert 'href="blocks_03.html#whos-late"' in page and "that" in page and "gone" not in page
    block = index.with_name("blocks_03.html").read_text()
    assert 'href="03_ddp.html"' in block and 'id="whos-late"' in block
    assert loads(page) == loads(block) == []


def test_output_that_would_load_something_is_shown_as_text(shelf, tmp_path):
    script = display(text_html="<script src='https://example.org/x.js'></script>", text_plain="a widget")
    picture = display(text_html="<img src='https://example.org/x.png'>", text_plain="a picture")
    executed(shelf, tmp_path, "03_ddp", script, picture)
    build_gallery(shelf, tmp_path)
    text = (tmp_path / "gallery" / "03_ddp.html").read_text()
    assert loads(text) == [] and "a widget" in text and "a picture" in text


def test_the_return_value_of_a_drawing_call_is_hidden(shelf, tmp_path):
    returned = [
        display(text_plain=text) for text in ("<Axes: xlabel='x'>", "array([<Axes: >, <Axes: >], dtype=object)")
    ]
    executed(shelf, tmp_path, "03_ddp", *returned, display(text_plain="an answer"))
    build_gallery(shelf, tmp_path)
    text = (tmp_path / "gallery" / "03_ddp.html").read_text()
    assert "Axes" not in text and "an answer" in text


def test_prose_that_would_load_something_stops_the_gallery(shelf, tmp_path):
    path = shelf / "03_ddp.ipynb"
    content = book.read(path)
    content.cells[2].source = "<img src='https://example.org/x.png'>"
    write(content, path)
    with pytest.raises(book.BookError, match="03_ddp would load img src=https://example.org/x.png"):
        build_gallery(shelf, tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "<script src='x.js'></script>",
        "<link rel='stylesheet' href='x.css'>",
        "<style>@import 'x.css';</style>",
        "<style>a {background: url(x.png)}</style>",
        "<p style='background:url(x.png)'></p>",
        "<svg><image xlink:href='http://e.org/x.png'/></svg>",
    ],
)
def test_everything_a_browser_would_fetch_is_found(text):
    assert loads(text)
    assert loads("<a href='https://example.org'>a link</a><a href='#x'>another</a>") == []


def test_links_between_notebooks_lead_to_pages():
    assert 'href="02_serial.html#x"' in to_html("[two](02_serial.ipynb#x)")
    assert 'href="exercises_03_ddp.html"' in to_html("[its exercises](../workshop/exercises/03_ddp.ipynb)")
    assert "your_own" not in to_html("[a script](../workshop/your_own/ddp.py)")


def test_a_formula_that_cannot_be_drawn_stays_readable():
    assert '<code class="tex">' in to_html(r"$\begin{nonsense$") or r"\begin{nonsense" in to_html(r"$\begin{nonsense$")
    assert "<svg" in to_html(r"$$\frac{\partial \ell}{\partial W} = \delta x^\top$$")


@pytest.mark.skipif(not find_browser(), reason="no chromium on this machine")
def test_index_and_page_fit_a_phone_and_show_their_figures(shelf, tmp_path):
    wide = display(text_html="<table><tr>" + "<td>a wide cell</td>" * 40 + "</tr></table>")
    executed(shelf, tmp_path, "00_start", display(image_png=PNG), wide, new_output("stream", text="x" * 500))
    index = build_gallery(shelf, tmp_path)
    fits = "document.documentElement.scrollWidth <= innerWidth"
    script = f"[innerWidth, {fits}, [...document.images].every(image => image.naturalWidth)]"
    with Browser(tmp_path, size=(500, 900)) as browser:
        for path in (index, index.with_name("00_start.html")):
            page = browser.page()
            page.goto(path.as_uri())
            page.wait("location.protocol == 'file:' && document.readyState == 'complete'")
            page.evaluate("for (const image of document.images) image.loading = 'eager'")
            page.wait("[...document.images].every(image => image.complete)")
            assert page.evaluate(script) == [500, True, True], path.name
