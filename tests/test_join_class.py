"""workshop/join_class.sh: a participant gets copies, corpora, variables, a kernel; a class runs."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """What the instructor provides: a clone that holds no solutions, an environment, corpora."""
    return make_shared(tmp_path_factory.mktemp("class"))


def make_shared(folder: Path) -> Path:
    for name in ("notebooks", "workshop"):
        held_back = shutil.ignore_patterns("solutions", "progress", ".*", "__pycache__")
        shutil.copytree(ROOT / name, folder / "aiscale" / name, ignore=held_back)
    python = folder / "env/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/bash\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o555)
    python.parent.chmod(0o555)
    (folder / "corpora").mkdir()
    return folder


def join(shared: Path, home: Path, **env: str) -> subprocess.CompletedProcess:
    home.mkdir(exist_ok=True)
    given = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "USER": "ada",
        "SCRATCH": str(home),
        "SBATCH_ACCOUNT": "m1234",
    }
    given |= {"AISCALE_SITE": "perlmutter", "AISCALE_ENVIRONMENT": str(shared / "env")}
    given |= {"PYTHONPATH": str(ROOT / "src"), **env}
    command = ["bash", shared / "aiscale/workshop/join_class.sh"]
    return subprocess.run(command, env=given, cwd=home, capture_output=True, text=True, timeout=120)


def test_a_participant_gets_own_copies_shared_corpora_variables_and_a_kernel(shared, tmp_path):
    done = join(
        shared,
        tmp_path / "ada",
        AISCALE_CORPORA=str(shared / "corpora"),
        SBATCH_RESERVATION="class",
    )
    assert done.returncode == 0, done.stderr
    mine = tmp_path / "ada/aiscale-class"
    lessons = {path.name for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert {path.name for path in (mine / "notebooks").iterdir() if path.is_file()} >= lessons
    assert (mine / "workshop/exercises/03_ddp.ipynb").is_file()
    assert not (mine / "workshop/solutions").exists()
    assert os.readlink(mine / "corpora") == str(shared / "corpora")
    shown = subprocess.run(
        ["bash", "-c", "source class.sh; env"], cwd=mine, capture_output=True, text=True
    ).stdout
    wanted = ("SBATCH_ACCOUNT=m1234", "SBATCH_RESERVATION=class", "AISCALE_ENGINES=slurm")
    for line in wanted:
        assert line in shown.splitlines(), shown
    assert "SBATCH_QOS" not in shown and "SBATCH_CONSTRAINT" not in shown, (
        "they win over a launcher's lines"
    )
    kernel = tmp_path / "ada/.local/share/jupyter/kernels/aiscale-class"
    assert "module load pytorch" in (kernel / "site.sh").read_text()
    start = (kernel / "start.sh").read_text()
    assert "export SBATCH_QOS=shared" in start and f"export AISCALE_RUNS={mine}" in start


def test_joining_again_adds_what_is_new_and_keeps_what_was_changed(shared, tmp_path):
    assert join(shared, tmp_path / "ada").returncode == 0
    mine = tmp_path / "ada/aiscale-class/notebooks"
    (mine / "03_ddp.ipynb").write_text("my notes")
    (mine / "04_zero.ipynb").unlink()
    again = join(shared, tmp_path / "ada")
    assert again.returncode == 0 and "1 new files" in again.stdout
    assert (mine / "03_ddp.ipynb").read_text() == "my notes" and (mine / "04_zero.ipynb").exists()


@pytest.mark.parametrize(
    "env, told",
    [
        (
            {"SBATCH_ACCOUNT": ""},
            "no account: the instructor enters it in .*join_class.sh, or export SBATCH_ACCOUNT",
        ),
        (
            {"AISCALE_CLASS": "/proc/x"},
            "/proc/x cannot be made: export AISCALE_CLASS=FOLDER, which all nodes see",
        ),
    ],
)
def test_what_a_class_lacks_is_named_in_one_line(shared, tmp_path, env, told):
    done = join(shared, tmp_path / "ada", **env)
    assert done.returncode != 0
    last = done.stderr.splitlines()[-1]
    assert subprocess.run(["grep", "-q", told], input=last, text=True).returncode == 0, done.stderr
