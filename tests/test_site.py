"""The site shows all lessons and loads nothing from outside; a class is packed in one archive."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import nbclient
import nbformat
import pytest

from browser import Browser, find_browser

ROOT = Path(__file__).parents[1]
LESSON, ELSEWHERE = "notebooks/00_start_here.ipynb", "https://git.example.org/team/aiscale"


def make(target: str, folder: Path, *words: str) -> subprocess.CompletedProcess:
    command = ["make", target, f"BUILD={folder / 'build'}", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


#: Cells as a lesson has them: a question, its form, what is done, the measurement, its reading.
ASKED = [
    "How many bytes are sent?",
    """from aiscale.lesson import predict
sent = predict("bytes sent", None, unit="bytes")""",
    "Between: all of 2 MiB goes out.\n\nA second paragraph between.",
    'print(f"{2**21:,} on the way")',
    "The question of the grid stays in view.",
    'grid = predict("who holds it", [[None, None]], rows="rank", columns="chunk")',
    "They do it:",
    """sent.against(2**21)
print(f"{2**22:,} behind it")""",
    "The reading says 2 MiB again.\n\n### The next heading\n\nWhat follows it stays in view.",
    """predict("what waits", None, choices=["rank 0", "all ranks"]).against("all ranks")
grid.against([[7, 8]])
predict.card()""",
]


def asked() -> nbformat.NotebookNode:
    cells = []
    for source in ASKED:
        is_code = "predict" in source or "print(" in source or ".against" in source
        make_cell = nbformat.v4.new_code_cell if is_code else nbformat.v4.new_markdown_cell
        cells.append(make_cell(source))
    notebook = nbformat.v4.new_notebook(cells=cells)
    return nbclient.NotebookClient(notebook, kernel_name="python3").execute()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site of notebooks that have not been run, but for a cell with two predictions."""
    folder = tmp_path_factory.mktemp("site")
    notebook = nbformat.read(ROOT / LESSON, as_version=4)
    notebook.cells += asked().cells
    (folder / "build/notebooks").mkdir(parents=True)
    nbformat.write(notebook, folder / "build" / LESSON)
    programs = os.path.relpath(Path(sys.executable).parent, ROOT)  # without the spaces of ROOT
    words = ["-o", "setup", f"BIN={programs}", f"REPOSITORY_URL={ELSEWHERE}"]
    done = make("site", folder, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    said = f"REPOSITORY_URL is {ELSEWHERE}, neither GitHub nor GitLab: "
    assert done.stderr == f"{said}the site has no launch buttons\n"
    return folder / "build/site"


def test_every_lesson_and_what_stands_beside_them_is_a_page_and_no_solution_is(site):
    index = (site / "index.html").read_text()
    for path in [*ROOT.glob("notebooks/[0-9]*.ipynb"), *ROOT.glob("notebooks/appendix/*.ipynb")]:
        page = path.relative_to(ROOT).with_suffix(".html")
        assert (site / page).exists() and f'href="{page}"' in index
    for page in (
        "quiz",
        "workshop/README",
        "workshop/blocks/03",
        "workshop/clinic/README",
        "workshop/glossary",
    ):
        assert (site / f"{page}.html").exists()
    assert not (site / "workshop/solutions").exists()
    assert (
        f"git clone -q --depth 1 {ELSEWHERE} /content"
        in (site / "notebooks/03_ddp.html").read_text()
    ), "for Colab"


def test_pages_load_nothing_from_outside_and_formulas_are_drawn(site):
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert (
            re.findall(
                r'<(?:script|img|link rel="stylesheet")[^>]*(?:src|href)="https?:[^"]*"', text
            )
            == []
        ), page
    assert "<math" in (site / "notebooks/00_start_here.html").read_text()


def test_cells_that_run_on_the_ranks_are_highlighted_as_python(site):
    page = (site / "notebooks/03_ddp.html").read_text()
    cells = re.findall(r'<div class="highlight-(\w+) [^>]*>(?:<[^>]+>)*%%(?:<[^>]+>)*px', page)
    assert cells and set(cells) == {"python"}


def test_links_between_pages_lead_somewhere(site):
    for page in site.rglob("*.html"):
        # play/: by the workflows
        for link in re.findall(r'href="(?!play/)([^"#:?]+\.html)', page.read_text()):
            assert (page.parent / link).exists(), f"{page}: {link}"


@pytest.mark.skipif(not find_browser(), reason="no chromium on this machine")
def test_a_reader_guesses_in_the_page_before_it_shows_what_was_measured(site, tmp_path):
    tells = [
        "sent.against(2**21)",
        "2 MiB (",
        "2,097,152 on the way",
        "all of 2 MiB",
        "4,194,304 behind it",
        "reading says",
    ]
    stays = ["How many bytes are sent?", "question of the grid", "next heading", "What follows it"]
    with Browser(tmp_path) as browser:
        page = browser.page()
        page.goto((site / LESSON).with_suffix(".html").as_uri())
        page.wait("document.querySelectorAll('.truth.hidden').length === 3")
        text = page.text()
        assert [words for words in tells if words in text] == []
        assert [words for words in stays if words not in text] == []
        buttons = "[...document.querySelectorAll('button.folded')].filter(b => b.checkVisibility())"
        before = page.evaluate(f"{buttons}.length")
        page.evaluate("document.querySelector('form.guess input').value = '2.1 MiB'")
        page.evaluate("document.querySelector('form.guess button').click()")
        text = page.text()
        assert "you said 2.1 MiB: 1.05 times what was measured" in text
        hidden = [words for words in tells if words not in text]
        assert hidden == tells[4:], "on the way to the grid's truth, too"
        assert page.evaluate(f"{buttons}.length") < before
        page.evaluate("document.querySelector('form.guess button[value=\"rank 0\"]').click()")
        assert "not rank 0" in page.text() and "1 of 2 right or close" in page.text()
        page.evaluate("document.querySelector('form.guess.grid button').click()")
        assert not page.evaluate("document.querySelector('button.folded, .truth.hidden')")
        text = page.text()
        assert [words for words in tells if words not in text] == []
        assert "1 of 2 right or close" in text, "a grid on paper is not judged"


@pytest.mark.skipif(not find_browser(), reason="no chromium on this machine")
def test_who_does_not_guess_may_look_behind_each_fold(site, tmp_path):
    with Browser(tmp_path) as browser:
        page = browser.page()
        page.goto((site / LESSON).with_suffix(".html").as_uri())
        page.wait("document.querySelectorAll('.truth.hidden').length === 3")
        page.evaluate("document.querySelector('button.folded').click()")
        text = page.text()
        assert "all of 2 MiB" in text and "A second paragraph between." in text, "one run of text"
        assert "2 MiB (" not in text and "2,097,152" not in text


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """The archive of a class with a site, a deck and a wheel."""
    folder = tmp_path_factory.mktemp("class")
    for page in ("site/index.html", "slides/hour_1.html"):
        (folder / "build" / page).parent.mkdir(parents=True, exist_ok=True)
        (folder / "build" / page).write_text("a page")
    # for pip: notes what it is asked
    stand_in, wheels = (folder / "python", f"{folder}/build/class/aiscale/wheels")
    stand_in.write_text(f"""#!/bin/sh
echo "$@" >> {folder}/asked
mkdir -p {wheels} && touch {wheels}/a.whl
cp {folder}/build/class/lessons.txt {folder}
""")
    stand_in.chmod(0o755)
    done = make("class", folder, "WHEELS=yes", f"BIN={folder}")
    assert done.returncode == 0, done.stderr
    return folder / "build/class.tar.gz"


def test_the_archive_holds_what_a_seat_without_network_needs_and_no_solutions(packed):
    with tarfile.open(packed) as tar:
        names = set(tar.getnames())
    for name in (
        "Makefile",
        "requirements.lock",
        "scripts/setup.sh",
        LESSON,
        "build/site/index.html",
        "wheels/a.whl",
    ):
        assert f"aiscale/{name}" in names
    assert "aiscale/build/slides/hour_1.html" in names and "aiscale/src/aiscale/cli.py" in names
    assert not [
        name for name in names if name.startswith(("aiscale/tests", "aiscale/workshop/solutions"))
    ]
    folder = packed.parents[1]
    rest, torch, megatron = (folder / "asked").read_text().splitlines()
    assert rest.startswith("-m pip wheel -q --no-deps") and torch.endswith("/whl/cpu")
    assert "--ignore-requires-python" in megatron
    assert re.search(r" megatron-core==[\d.]+$", megatron)
    lessons = (folder / "lessons.txt").read_text()
    assert "jupyterlab==" in lessons and "torch==" not in lessons and "pytest==" not in lessons


def test_a_class_without_a_site_is_refused_and_leaves_nothing(tmp_path):
    done = make("class", tmp_path)
    assert done.returncode and "there is no site: `make workshop`" in done.stderr
    assert list(tmp_path.iterdir()) == []
