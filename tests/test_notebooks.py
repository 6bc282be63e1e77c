"""Every notebook has the required form and runs headless."""

from __future__ import annotations

from pathlib import Path

import pytest

from aiscale import book
from aiscale.book.core import measure
from aiscale.book.gallery import build_gallery
from answers import given_away

ROOT = Path(__file__).parents[1] / "notebooks"
PATHS = [*sorted(ROOT.glob("*.ipynb")), *sorted(ROOT.glob("appendix/*.ipynb"))]
NAMES = [path.stem for path in PATHS if path.parent == ROOT]
APPENDICES = [path.stem for path in PATHS if path.parent != ROOT]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_notebook_keeps_the_form(path):
    assert book.check_form(path) == []


@pytest.mark.parametrize("name", NAMES)
def test_the_core_path_takes_the_minutes_that_the_header_says(name):
    (lesson,) = book.notebooks([name], ROOT)
    pace, stated = measure(lesson.cells, core=True), lesson.header.minutes
    said = f"the header says {stated} min, the core path takes about {pace.minutes}: {pace.describe()}"
    assert pace.minutes <= stated <= 1.3 * pace.minutes, f"{said}; tag sections optional, or change the header"


@pytest.fixture(scope="session")
def build(tmp_path_factory):
    return tmp_path_factory.mktemp("build")


#: The fast tests run every lesson's core path, the extended tests whole lessons and the appendices.
RUNS = [pytest.param(name, True, id=f"{name}-core") for name in NAMES] + [
    pytest.param(name, False, id=name, marks=pytest.mark.extended) for name in [*NAMES, *APPENDICES]
]


@pytest.mark.notebook
@pytest.mark.timeout(book.TIMEOUT_S + 60)
@pytest.mark.parametrize(("name", "core"), RUNS)
def test_notebook_runs(name, core, build):
    (result,) = book.run([name], root=ROOT, out=build, core=core)
    assert result.state == "passed", result.describe()
    assert result.left_behind == 0, "it left processes behind: stop what it starts"
    assert given_away(book.read(result.executed)) == []


@pytest.mark.notebook
def test_the_gallery_shows_every_notebook_that_ran_with_a_figure(build):
    """Runs after the tests above, on what they produced."""
    text = build_gallery(ROOT, build).read_text()
    ran = [path.stem for path in (build / "notebooks").glob("*.ipynb")]
    assert text.count("<article") == len(NAMES + APPENDICES)
    assert [name for name in ran if f'src="figures/{name}.png"' not in text] == []
