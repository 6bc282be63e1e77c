"""Decks: figures and numbers come from the package, nothing overflows, PDFs have all slides."""

from __future__ import annotations

import re
import subprocess
import tomllib
from html import unescape
from pathlib import Path

import pytest

from aiscale import lesson
from aiscale.lesson import slides
from aiscale.lesson.notebook import LessonError, tags
from browser import Browser, find_browser
from lessons import secrets

ROOT = Path(__file__).parents[1]
DECKS = slides.decks(root=ROOT / "slides")
SMALL = """title: A deck
minutes: 5
n = 2 * 3
---
## The answer is {{ n }} and {{ count(124439808) }}

![a ring](../notebooks/figures/layer.svg)
Source: drawn by hand, {{ n }}

Note: say it
---
# One sentence
"""
#: What reaches beyond its slide, or beyond the box that it is in.
OUTSIDE = """(() => {
  const slide = Reveal.getCurrentSlide().querySelector('.slide');
  const edge = slide.getBoundingClientRect(), found = [];
  for (const part of slide.querySelectorAll('*')) {
    if (part.closest('svg') && part.tagName !== 'svg') continue;
    const box = part.getBoundingClientRect();
    const name = part.tagName + ' ' + (part.textContent || part.alt || '').trim().slice(0, 60);
    if (box.right > edge.right - 20 || box.bottom > edge.bottom - 6
        || box.left < edge.left || box.top < edge.top)
      found.push(name);
    const isBox = part.matches('.body, .column, figure, pre');
    if (part.scrollHeight > part.clientHeight + 3 && isBox) found.push(name);
    if (part.scrollWidth > part.clientWidth + 3 && isBox) found.push(name);
  }
  for (const image of slide.querySelectorAll('img'))
    if (!image.naturalWidth || image.clientHeight < 120)
      found.push('figure too small: ' + image.alt);
  return found.join('; ');
})()"""


def small(tmp_path: Path, text: str = SMALL) -> slides.Deck:
    path = tmp_path / "small.md"
    path.write_text(text)
    return slides.decks([str(path)])[0]


def show(page, html: Path) -> int:
    """Open a deck; returns how many slides it has."""
    width, height = slides.SIZE
    page._line.call(
        "Emulation.setDeviceMetricsOverride",
        width=width,
        height=height,
        deviceScaleFactor=1,
        mobile=False,
    )
    page.goto(html.resolve().as_uri())
    page.wait("window.Reveal && Reveal.isReady() && document.fonts.status === 'loaded'", 30)
    return page.evaluate("Reveal.getTotalSlides()")


def test_a_deck_is_one_file_with_its_numbers_figures_and_notes(tmp_path):
    text = small(tmp_path).build(tmp_path).read_text()
    assert "The answer is 6 and 124 M" in text and "say it" in text and "Reveal.initialize" in text
    assert text.count('<img src="data:image/svg+xml;base64') == 1 and "2026 Hakim El Hattab" in text


def test_a_figure_of_a_notebook_that_was_not_run_is_missed_by_name(tmp_path):
    deck = small(
        tmp_path, SMALL.replace("../notebooks/figures/layer.svg", "notebook:03_ddp#c20c3268")
    )
    with pytest.raises(
        LessonError,
        match="c20c3268 of .*03_ddp.ipynb has no figure: aiscale notebooks --core 03_ddp",
    ):
        deck.build(tmp_path)
    assert "not run yet" in deck.build(tmp_path, as_is=True).read_text()


@pytest.mark.parametrize("deck", DECKS, ids=lambda deck: deck.name)
def test_a_deck_names_only_what_is_there_and_takes_about_a_minute_a_slide(deck):
    for text in deck.texts:
        figures = slides.FIGURE.findall(text)
        for name, cell in (what.split("#") for _, kind, what in figures if kind == "notebook"):
            cells = {cell["id"]: cell for cell in lesson.notebooks([name])[0].content.cells}
            assert "optional" not in tags(cells[cell]) and re.search(
                r"(plots|plt)\.", cells[cell].source
            ), cell
        if figures or slides.NUMBER.search(text):
            assert re.search(rf"^Source: ({'|'.join(slides.KINDS)})", text, re.M), (
                f"no source: {text}"
            )
    assert len(deck.texts) + 1 <= int(deck.about["minutes"]) + 3
    if deck.name[0].isdigit():
        assert 5 <= len(deck.texts) + 1 <= 10 and int(deck.about["minutes"]) <= 10
        [vote] = [text for text in deck.texts if text.strip().startswith("## Vote: ")]
        assert re.findall(r"^- \*\*([A-Z])\*\*: \S", vote, re.M) == list("ABCD")
        assert re.search(r"hands again\. [ABCD][.:,]", vote), "the note has the answer"
    assert all("\nNote: " in text for text in deck.texts)


LESSON_DECKS = [deck for deck in DECKS if deck.name[:2].isdigit()]
ANSWERS = tomllib.loads((ROOT / "tests/answers.toml").read_text())
#: Words of a choice that a slide may have without answering: they are said of something else too.
COMMON = (
    "1",
    "yes",
    "more",
    "equal",
    "the same",
    "as many",
    "as long",
    "train",
    "an error",
    "BERT",
)


def answering_cells(notebook: lesson.Notebook) -> set[str]:
    """The cells between a prediction and its answer, with the one that answers."""
    found, asked = set(), {}
    for at, cell in enumerate(notebook.cells):
        if cell.cell_type == "code":
            for name in re.findall(r"(\w+)(?:\[\d\])?\.against\(", cell.source):
                if name in asked:
                    found |= {each["id"] for each in notebook.cells[asked[name] + 1 : at + 1]}
            for name in re.findall(r"^(\w+) = \[?predict\(", cell.source, re.M):
                asked[name] = at
    return found


@pytest.mark.parametrize("deck", LESSON_DECKS, ids=lambda deck: deck.name)
def test_what_answers_a_prediction_stands_behind_now_you(deck):
    """Figures of the cells that answer, and the answers in words and whole numbers."""
    [notebook] = lesson.notebooks([deck.name[:2]])
    deck.names = dict(slides.NAMES)
    for name, expression in deck.assigned.items():
        deck.names[name] = deck.value(expression)
    before = "\n".join(deck.texts[: deck.before])
    told = slides.NUMBER.sub(lambda number: str(deck.value(number[1])), before)
    drawn = [what.split("#")[1] for _, kind, what in slides.FIGURE.findall(before) if "#" in what]
    assert not set(drawn) & answering_cells(notebook)
    for asked, answer in ANSWERS.get(notebook.name, {}).items():
        words = [answer] if isinstance(answer, str) else []
        if isinstance(answer, int) and answer > 99:
            words = [f"{answer:,}", str(answer)]
        for word in words:
            assert word in COMMON or word.lower() not in told.lower(), (asked, word)
    if deck.before < len(deck.texts):
        assert "Stop here" in deck.texts[deck.before - 1]


@pytest.mark.skipif(not find_browser(), reason="no chromium on this machine")
def test_the_small_deck_prints_a_page_for_each_slide_and_fetches_nothing(tmp_path):
    html = small(tmp_path).build(tmp_path)
    assert pages(printed(html)) == 3


def printed(html: Path) -> Path:
    """The PDF of a deck, as `make slides` prints it."""
    options = [
        "--headless",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--virtual-time-budget=5000",
        "--no-sandbox",
    ]
    target = [f"--print-to-pdf={html.with_suffix('.pdf')}", f"{html.resolve().as_uri()}?print-pdf"]
    subprocess.run(
        [find_browser(), *options, *target], check=True, capture_output=True, timeout=180
    )
    return html.with_suffix(".pdf")


def pages(pdf: Path) -> int:
    return len(re.findall(rb"/Type\s*/Page\b", pdf.read_bytes()))


@pytest.mark.extended
@pytest.mark.skipif(not find_browser(), reason="no chromium on this machine")
def test_no_deck_overflows_or_fetches_and_pdfs_are_complete(tmp_path):
    """Frames stand for the figures of notebooks: those keep to their boxes, whatever they show."""
    made = [deck.build(tmp_path, as_is=True) for deck in DECKS]
    too_long = small(tmp_path, SMALL + "- a line\n" * 14).build(tmp_path)
    found = {}
    with Browser(tmp_path, size=slides.SIZE) as browser:
        page = browser.page()
        show(page, too_long)
        assert page.evaluate(f"Reveal.slide(2), {OUTSIDE}"), "the check sees what overflows"
        for deck, html in zip(DECKS, made, strict=True):
            count = show(page, html)
            assert count == len(deck.texts) + 1
            for number in range(count):
                page.evaluate(f"Reveal.slide({number})")
                found |= (
                    {f"{deck.name} {number + 1}": outside}
                    if (outside := page.evaluate(OUTSIDE))
                    else {}
                )
            fetched = "performance.getEntriesByType('resource').map(entry => entry.name)"
            assert [name for name in page.evaluate(fetched) if not name.startswith("data:")] == []
    assert found == {}
    secret = set().union(*map(secrets, (ROOT / "workshop/solutions").glob("*.ipynb")))
    shown = {html.name: unescape(re.sub(r"<[^>]+>", "", html.read_text())) for html in made}
    assert [(name, line) for name, text in shown.items() for line in secret if line in text] == []
    for deck, html in zip(DECKS, made, strict=True):
        assert pages(printed(html)) == len(deck.texts) + 1, deck.name
