"""Decks: figures and numbers come from the package, nothing is fetched or overflows, and a PDF has every slide."""

from __future__ import annotations

import argparse
import re
from html import unescape
from pathlib import Path

import pytest

from aiscale import plots
from aiscale.book import slides, workbooks
from aiscale.book.notebook import BookError
from aiscale.machines import find_machine
from browser import Browser, find_browser

ROOT = Path(__file__).parents[1]
DECKS = slides.decks(root=ROOT / "slides")
SMALL = """title: A deck
minutes: 5
n = 2 * 3
---
## The answer is {{ n }} and {{ count(124439808) }}

![a ring](plots:ring_steps(2))
Source: drawn by hand, {{ n }}

Note: say it
---
# One sentence
"""
#: What reaches beyond its slide, or beyond the box that it is in.
OUTSIDE = """(() => {
  const slide = Reveal.getCurrentSlide().querySelector('.slide'), edge = slide.getBoundingClientRect(), found = [];
  for (const part of slide.querySelectorAll('*')) {
    if (part.closest('svg') && part.tagName !== 'svg') continue;
    const box = part.getBoundingClientRect();
    const name = part.tagName + ' ' + (part.textContent || part.alt || '').trim().slice(0, 60);
    if (box.right > edge.right - 20 || box.bottom > edge.bottom - 6 || box.left < edge.left || box.top < edge.top)
      found.push(name);
    if (part.scrollHeight > part.clientHeight + 3 && part.matches('.body, .column, figure, pre')) found.push(name);
    if (part.scrollWidth > part.clientWidth + 3 && part.matches('.body, .column, figure, pre')) found.push(name);
  }
  for (const image of slide.querySelectorAll('img'))
    if (!image.naturalWidth || image.clientHeight < 120) found.push('figure too small: ' + image.alt);
  return found.join('; ');
})()"""

#: Type that nobody reads from the last row: under 16 of the slide's 720 pixels.
SMALL_TYPE = r"""(() => {
  const slide = Reveal.getCurrentSlide().querySelector('.slide'), found = [];
  for (const part of slide.querySelectorAll('*'))
    if ([...part.childNodes].some(node => node.nodeType == 3 && node.data.trim()) && !part.closest('svg, aside'))
      if (parseFloat(getComputedStyle(part).fontSize) < 16) found.push('small type: ' + part.textContent);
  for (const image of slide.querySelectorAll('img[src^="data:image/svg"]')) {
    const svg = atob(image.src.split(',')[1]), [, width, height] = svg.match(/viewBox="0 0 ([0-9.]+) ([0-9.]+)"/);
    const zoom = Math.min(image.clientWidth / width, image.clientHeight / height);
    for (const [, text, scale] of svg.matchAll(/<!-- (.*?) -->\s*<g [^>]*scale\(([0-9.]+)/g))
      if (100 * scale * zoom < 16) found.push(`type of ${(100 * scale * zoom).toFixed(1)} px: ${text}`);
  }
  return found.join('; ');
})()"""


def small(tmp_path: Path, text: str = SMALL) -> slides.Deck:
    path = tmp_path / "small.md"
    path.write_text(text)
    return slides.decks([str(path)])[0]


def show(page, html: Path) -> int:
    """Open a deck; returns how many slides it has."""
    width, height = slides.SIZE
    page._line.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
    page.goto(html.resolve().as_uri())
    page.wait("window.Reveal && Reveal.isReady() && document.fonts.status === 'loaded'", 30)
    return page.evaluate("Reveal.getTotalSlides()")


def test_a_deck_is_one_file_with_its_numbers_figures_and_notes(tmp_path):
    text = slides.build(small(tmp_path), tmp_path).read_text()
    assert "The answer is 6 and 124 M" in text and "say it" in text and "Reveal.initialize" in text
    assert text.count('<img src="data:image/svg+xml;base64') == 1 and "2026 Hakim El Hattab" in text


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("{{ n }}", "{{ cost.parameter_cuont(n) }}", "small, slide 2: cost.parameter_cuont.*has no attribute"),
        ("ring_steps(2)", "ring_step(2)", "small, slide 2: plots.ring_step.*has no attribute 'ring_step'"),
        ("plots:ring_steps(2)", "plots:KINDS", "has no attribute 'KINDS'"),
        ("plots:ring_steps(2)", "notebook:03_ddp#nothing", "slide 2 shows cell 'nothing' of 03_ddp, whose core path"),
        ("plots:ring_steps(2)", "ring.png", "neither plots:CALL.* nor notebook:NAME#CELL"),
        ("Source: drawn", "Source: from", "slide 2 has a figure or a number, but no line `Source: `"),
        ("# One", "# 40 GB in one", "slide 3 says '40 GB' in so many words"),
        ("# One", "One", "slide 3 has no title"),
        ("minutes: 5\n", "", "is not a deck: it begins with `title:`, `minutes:`"),
    ],
)
def test_what_is_not_there_or_could_go_stale_stops_the_build(tmp_path, old, new, said):
    with pytest.raises(BookError, match=said):
        slides.build(small(tmp_path, SMALL.replace(old, new)), tmp_path)


def test_a_figure_of_a_notebook_that_was_not_run_is_missed_by_name(tmp_path):
    deck = small(tmp_path, SMALL.replace("plots:ring_steps(2)", "notebook:03_ddp#c20c3268"))
    with pytest.raises(BookError, match="c20c3268 of .*03_ddp.ipynb has no figure: aiscale notebooks --core 03_ddp"):
        slides.build(deck, tmp_path)
    assert "not run yet" in slides.build(deck, tmp_path, as_is=True).read_text()


def test_every_lesson_and_every_block_of_the_two_hours_has_a_deck():
    lessons = {path.stem for path in (ROOT / "notebooks").glob("[01][0-9]_*.ipynb")}
    assert lessons <= {deck.name for deck in DECKS}
    assert {"h1a_training", "h1b_parallelism", "h1c_forge", "h2_machines", "radius"} <= {deck.name for deck in DECKS}


@pytest.mark.parametrize("deck", DECKS, ids=lambda deck: deck.name)
def test_a_deck_names_only_what_is_there_and_takes_about_a_minute_a_slide(deck):
    assert list(slides.problems(deck)) == []
    assert len(deck.texts) + 1 <= int(deck.about["minutes"]) + 3
    if deck.name[0].isdigit():
        assert 5 <= len(deck.texts) + 1 <= 9 and int(deck.about["minutes"]) <= 10
    assert all("\nNote: " in text for text in deck.texts)


def test_the_small_deck_prints_a_page_for_each_slide_and_fetches_nothing(tmp_path):
    html = slides.build(small(tmp_path), tmp_path)
    if not find_browser():
        pytest.skip("no Chromium on this machine")
    assert pages(slides.print_pdf(html)) == 3


def pages(pdf: Path) -> int:
    return len(re.findall(rb"/Type\s*/Page\b", pdf.read_bytes()))


@pytest.mark.extended
def test_no_deck_overflows_or_fetches_and_pdfs_are_complete(tmp_path):
    """Frames stand for the figures of notebooks: those keep to their boxes, whatever they show."""
    if not find_browser():
        pytest.skip("no Chromium on this machine")
    made = [slides.build(deck, tmp_path, as_is=True) for deck in DECKS]
    too_long = slides.build(small(tmp_path, SMALL + "- a line\n" * 14), tmp_path)
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
                if deck.name in ("04_zero", "05_fsdp"):
                    assert page.evaluate(SMALL_TYPE) == "", f"{deck.name} {number + 1}"
                found |= {f"{deck.name} {number + 1}": outside} if (outside := page.evaluate(OUTSIDE)) else {}
            fetched = "performance.getEntriesByType('resource').map(entry => entry.name)"
            assert [name for name in page.evaluate(fetched) if not name.startswith("data:")] == []
    assert found == {}
    secret = set().union(*map(workbooks.secrets, (ROOT / "workshop/solutions").glob("*.ipynb")))
    shown = {html.name: unescape(re.sub(r"<[^>]+>", "", html.read_text())) for html in made}
    assert [(name, line) for name, text in shown.items() for line in secret if line in text] == []
    for deck, html in zip(DECKS, made, strict=True):
        assert pages(slides.print_pdf(html)) == len(deck.texts) + 1, deck.name


def test_without_a_chromium_a_pdf_is_refused_and_left_out_by_itself(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(slides, "find_chromium", lambda: "")
    parser = argparse.ArgumentParser()
    slides.add_arguments(parser)
    small(tmp_path)
    words = [str(tmp_path / "small.md"), "--out", str(tmp_path)]
    with pytest.raises(BookError, match="there is no Chromium on this machine to print with"):
        slides.run(parser.parse_args([*words, "--pdf"]))
    assert slides.run(parser.parse_args(words)) == 0
    assert "no PDFs: there is no Chromium here" in capsys.readouterr().err


def test_notebooks_run_again_as_they_last_ran(tmp_path, monkeypatch):
    """`make workshop` ran them whole: decks must not replace that by their core path."""
    from aiscale.book import results, running

    ran = []
    there = {name: results.Result(name, "passed", 1, 1, core=name == "04_zero") for name in ("03_ddp", "04_zero")}
    monkeypatch.setattr(results, "load_results", lambda folder: there)
    run = lambda names, core, **options: ran.append((names, core, options["resume"])) or []  # noqa: E731
    monkeypatch.setattr(running, "run", run)
    assert slides._run_notebooks(["03_ddp", "04_zero", "05_fsdp"], str(tmp_path)) == 0
    assert ran == [(["03_ddp"], False, True), (["04_zero", "05_fsdp"], True, True)]


# machines -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["frontier", "perlmutter", "cosma8-mi300x", "aurora", "summit", "stanage-h100"])
def test_a_node_shows_as_many_devices_links_and_adapters_as_the_catalogue_has(name):
    machine = find_machine(name)
    ax = plots.node(machine)
    shown = [text.get_text() for text in ax.texts]
    assert {str(i) for i in range(machine.node.devices)} <= set(shown)
    assert shown.count("NIC") == machine.network.nics
    node = machine.node
    pairs = node.devices * (node.devices - 1) // 2 if node.pair_gb_s else 0
    ring = 0 if node.pair_gb_s or not node.ring_gb_s else node.devices if node.devices > 2 else 1
    links = [patch for patch in ax.patches if type(patch).__name__ == "FancyArrowPatch"]
    assert len(links) == pairs + ring + (node.devices // 2 if node.mate_gb_s else 0)
