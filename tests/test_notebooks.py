"""Every notebook has the required form and runs headless."""

from __future__ import annotations

from pathlib import Path

import pytest

from aiscale import book
from aiscale.book.gallery import build_gallery

ROOT = Path(__file__).parents[1] / "notebooks"
NAMES = [path.stem for path in sorted(ROOT.glob("*.ipynb"))]


@pytest.mark.parametrize("name", NAMES)
def test_notebook_keeps_the_form(name):
    assert book.check(ROOT / f"{name}.ipynb") == []


@pytest.fixture(scope="session")
def build(tmp_path_factory):
    return tmp_path_factory.mktemp("build")


#: Until lessons have a core path, these represent all in the fast tests: ranks, one process, and a strategy.
FAST = ("00_start_here", "01_one_process", "03_ddp")
TIERS = [pytest.param(name, marks=[] if name in FAST else pytest.mark.extended) for name in NAMES]


@pytest.mark.notebook
@pytest.mark.timeout(book.TIMEOUT_S + 60)
@pytest.mark.parametrize("name", TIERS)
def test_notebook_runs(name, build):
    (result,) = book.run([name], root=ROOT, out=build)
    assert result.state == "passed", result.describe()
    assert result.left_behind == 0, "it left processes behind: stop what it starts"


@pytest.mark.notebook
def test_the_gallery_shows_every_notebook_that_ran_with_a_figure(build):
    """Runs after the tests above, on what they produced."""
    text = build_gallery(ROOT, build).read_text()
    ran = [path.stem for path in (build / "notebooks").glob("*.ipynb")]
    assert text.count("<article") == len(NAMES)
    assert [name for name in ran if f'src="figures/{name}.png"' not in text] == []
