"""Notebooks are found by name and run by papermill, `aiscale notebooks` or nbconvert."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from nbformat.v4 import new_code_cell

from aiscale import lesson
from aiscale.cli import main
from aiscale.lesson import Notebook, execute, read, runner
from lessons import code, write
from lessons import lesson as small

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", ["03_ddp", "03", "3", "ddp"])
def test_a_notebook_is_found_by_its_name_its_number_or_its_word(shelf, name):
    assert [notebook.name for notebook in lesson.notebooks([name], shelf)] == ["03_ddp"]


def run(tmp_path, *cells, **options):
    path = write(small(*cells), tmp_path / "notebooks/03_small.ipynb")
    return execute([Notebook(path)], out=tmp_path / "build", **options)[0]


def printed(result) -> str:
    outputs = [output for cell in read(result.executed).cells for output in cell.get("outputs", [])]
    return "".join(output.get("text", "") for output in outputs)


def test_a_notebook_runs_with_its_parameters_in_its_folder_and_programs_of_this_environment(
    tmp_path,
):
    cell = "import shutil\nfrom pathlib import Path\n"
    cell += "print('in', Path.cwd().name, shutil.which('torchrun'))"
    result = run(tmp_path, cell, parameters={"steps": 7, "label": "b"})
    assert not result.error
    assert f"in notebooks {Path(sys.executable).parent}/torchrun" in printed(result)
    assert "posix 7 0.5 b True" in printed(result)


def test_a_parameter_that_a_notebook_lacks_is_refused_before_anything_starts(
    shelf, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert main(["notebooks", "03", "-p", "stepz=1"]) == 2
    assert "03_ddp has no parameter stepz: did you mean steps?" in capsys.readouterr().err
    assert not (tmp_path / "build").exists()


def test_the_core_path_leaves_optional_cells_out(tmp_path):
    optional = code("raise ValueError", "optional")
    assert not run(tmp_path, optional, core=True).error
    assert "ValueError" in run(tmp_path, optional).error


def test_a_cell_that_hangs_fails_at_its_time_out(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "CELL_TIMEOUT_S", 3)
    assert "after 3 seconds" in run(tmp_path, "import time; time.sleep(600)").error


def test_a_kernel_that_dies_fails_the_notebook(tmp_path):
    assert "Kernel died" in run(tmp_path, "os._exit(1)").error


@pytest.mark.notebook
def test_a_failing_rank_is_shown_with_its_number_and_its_traceback(tmp_path):
    start = new_code_cell("from aiscale import cluster\nranks = cluster.start(2)")
    fail = new_code_cell("%%px\nif rank == 1:\n    raise ValueError('this rank fails')")
    error = run(tmp_path, start, fail).error
    assert "[rank 1]" in error and "ValueError: this rank fails" in error


PLAIN = {
    "papermill": "papermill notebooks/03_ddp.ipynb {out}/03_ddp.ipynb -p n_steps 4",
    "nbconvert": "jupyter nbconvert --execute --to notebook --output-dir {out} "
    "notebooks/03_ddp.ipynb",
}


@pytest.mark.extended
@pytest.mark.notebook
@pytest.mark.parametrize("program", PLAIN)
def test_a_lesson_runs_by_plain_papermill_and_nbconvert(tmp_path, program):
    command = PLAIN[program].format(out=tmp_path).split()
    command[0] = str(Path(sys.executable).with_name(command[0]))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert any(
        cell.get("outputs") for cell in json.loads((tmp_path / "03_ddp.ipynb").read_text())["cells"]
    )


KERNEL = """
import IPython, sys
sys.modules["ipykernel.zmqshell"] = IPython  # tqdm takes it for a kernel
sys.modules["ipywidgets"] = None
import tqdm.auto
"""


def test_a_kernel_without_widgets_is_not_warned_of_their_absence():
    def stderr(program):
        command = [sys.executable, "-c", program]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr

    assert "IProgress not found" in stderr(KERNEL)
    assert stderr("import aiscale.lesson" + KERNEL) == ""
