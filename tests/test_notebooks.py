"""Every notebook has the required form and runs headless."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aiscale import book
from aiscale.book.gallery import build_gallery
from aiscale.book.pace import measure

ROOT = Path(__file__).parents[1] / "notebooks"
PATHS = [*sorted(ROOT.glob("*.ipynb")), *sorted(ROOT.glob("appendix/*.ipynb"))]
NAMES = [path.stem for path in PATHS if path.parent == ROOT]
APPENDICES = [path.stem for path in PATHS if path.parent != ROOT]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_notebook_keeps_the_form(path):
    assert book.check(path) == []


#: Lessons whose core path is not yet what their header says. Take out what is mended; the aim is an empty set.
TOO_LONG: set[str] = set()


@pytest.mark.parametrize("name", NAMES)
def test_the_core_path_takes_the_minutes_that_the_header_says(name):
    (lesson,) = book.notebooks([name], ROOT)
    pace, stated = measure(lesson.cells, core=True), lesson.header.minutes
    fits = pace.minutes <= stated <= 1.3 * pace.minutes
    said = f"the header says {stated} min, the core path takes about {pace.minutes}: {pace.describe()}"
    assert fits or name in TOO_LONG, f"{said}; tag sections optional, or change the header"
    assert not (fits and name in TOO_LONG), f"{said}: it fits, so take it out of TOO_LONG"


@pytest.fixture(scope="session")
def build(tmp_path_factory):
    return tmp_path_factory.mktemp("build")


#: The lessons whose core path runs in the fast tests. FLIP to NAMES as soon as all have optional cells; until then
#: these represent all: ranks, one process, and a strategy.
FAST = ("00_start_here", "01_one_process", "03_ddp")


def has_optional_cells(name: str) -> bool:
    cells = json.loads((ROOT / f"{name}.ipynb").read_text())["cells"]
    return any("optional" in cell["metadata"].get("tags", []) for cell in cells)


#: In the fast tests the core path; in the extended tests what those do not run.
RUNS = [pytest.param(name, True, id=f"{name}-core") for name in FAST] + [
    pytest.param(name, False, id=name, marks=pytest.mark.extended)
    for name in [*NAMES, *APPENDICES]
    if name not in FAST or has_optional_cells(name)
]


@pytest.mark.notebook
@pytest.mark.timeout(book.TIMEOUT_S + 60)
@pytest.mark.parametrize(("name", "core"), RUNS)
def test_notebook_runs(name, core, build):
    (result,) = book.run([name], root=ROOT, out=build, core=core)
    assert result.state == "passed", result.describe()
    assert result.left_behind == 0, "it left processes behind: stop what it starts"


@pytest.mark.notebook
def test_the_gallery_shows_every_notebook_that_ran_with_a_figure(build):
    """Runs after the tests above, on what they produced."""
    text = build_gallery(ROOT, build).read_text()
    ran = [path.stem for path in (build / "notebooks").glob("*.ipynb")]
    assert text.count("<article") == len(NAMES + APPENDICES)
    assert [name for name in ran if f'src="figures/{name}.png"' not in text] == []
