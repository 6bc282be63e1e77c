"""Every notebook: in order, as committed, and green when it runs headless."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from aiscale import book
from aiscale.book.failure import describe

ROOT = Path(__file__).parents[1] / "notebooks"
NAMES = [path.stem for path in sorted(ROOT.glob("*.ipynb"))]


@pytest.mark.parametrize("name", NAMES)
def test_notebook_keeps_the_form(name):
    assert book.check(ROOT / f"{name}.ipynb") == []


def test_committed_notebooks_carry_no_outputs():
    keys = "metadata.papermill cell.metadata.papermill metadata.widgets"
    nbstripout = Path(sys.executable).with_name("nbstripout")
    command = [nbstripout, "--verify", "--keep-id", "--extra-keys", keys, *(f"{name}.ipynb" for name in NAMES)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session")
def build(tmp_path_factory):
    return tmp_path_factory.mktemp("build")


#: Until lessons have a core path, these stand for all in the fast tests: ranks, one process, and a strategy.
FAST = ("00_start_here", "01_one_process", "03_ddp")
TIERS = [pytest.param(name, marks=[] if name in FAST else pytest.mark.extended) for name in NAMES]


@pytest.mark.notebook
@pytest.mark.timeout(book.TIMEOUT_S + 60)
@pytest.mark.parametrize("name", TIERS)
def test_notebook_runs(name, build):
    (result,) = book.run([name], root=ROOT, out=build)
    assert result.state == "passed", "\n".join(describe(name, result.failure))
    assert result.left_behind == 0, "it left processes behind: stop what it starts"


@pytest.mark.notebook
def test_the_gallery_shows_every_notebook_that_ran_with_a_figure(build):
    """After the tests above; what ran is there."""
    text = book.build_gallery(ROOT, build).read_text()
    ran = [path.stem for path in (build / "notebooks").glob("*.ipynb")]
    assert text.count("<article") == len(NAMES)
    assert [name for name in ran if f'src="figures/{name}.png"' not in text] == []
