"""scripts/setup.sh asks for what its head says, of a stand-in for Python that notes it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = getattr(sys, "_base_executable", sys.executable)
LOCK = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if line]

STAND_IN = """#!/bin/bash
echo "$*" >> "{calls}"
case "$*" in
  --version) echo "Python 3.11.9" ;;
  *"sys.version_info < (3, 12)"*) exit {before_3_12} ;;
  "-c import sys"*) ;;
  "-c import urllib"*) {probe} ;;
  "-m venv"*) mkdir -p .venv/bin; cp "$0" .venv/bin/python
    touch .venv/bin/aiscale; chmod +x .venv/bin/aiscale ;;
  *"pip --disable-pip-version-check --no-input install"*) {pip} ;;
esac
"""


class Clone:
    def __init__(self, folder: Path) -> None:
        self.folder, self.calls = folder, folder / "calls"
        (folder / "scripts").mkdir(parents=True)
        for name in ("scripts/setup.sh", "Makefile", "requirements.lock", "pyproject.toml"):
            shutil.copy(ROOT / name, folder / name)
        self.program("nvidia-smi", "exit 9")
        self.program("uname", "echo Linux")
        self.stand_in()

    def program(self, name: str, does: str) -> None:
        path = self.folder / "tools" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{does}\n")
        path.chmod(0o755)

    def stand_in(self, pip: str = "true", probe: str = "true", before_3_12: int = 0) -> None:
        path = self.folder / "python"
        path.write_text(
            STAND_IN.format(calls=self.calls, pip=pip, probe=probe, before_3_12=before_3_12)
        )
        path.chmod(0o755)
        if (self.folder / ".venv/bin/python").exists():
            shutil.copy(path, self.folder / ".venv/bin/python")

    def setup(self, *what: str, **variables: str) -> subprocess.CompletedProcess:
        self.calls.write_text("")
        names = ("TORCH", "MPI", "PYTHON", "PIP_NO_INDEX", "PYTORCH_INDEX")
        env = {key: value for key, value in os.environ.items() if key not in names}
        env |= {
            "PYTHON": str(self.folder / "python"),
            "PATH": f"{self.folder / 'tools'}:{env['PATH']}",
        } | variables
        command = ["scripts/setup.sh", *what] if what else ["make", "setup"]
        return subprocess.run(
            command, cwd=self.folder, env=env, capture_output=True, text=True, timeout=600
        )

    def pip(self) -> list[str]:
        lines = self.calls.read_text().splitlines()
        return [line.partition("--no-input ")[2] for line in lines if line.startswith("-m pip")]


@pytest.fixture
def clone(tmp_path):
    return Clone(tmp_path / "a clone")


def test_setup_installs_torch_first_and_pinned_then_the_lock_then_the_package(clone):
    assert clone.setup().returncode == 0
    torch, rest, package = clone.pip()
    assert torch.endswith("torch==2.13.0")
    assert "--no-deps" in rest and "--index-url" not in rest and rest.endswith("-r .venv/rest.txt")
    assert package.endswith("--editable .")
    lines = (clone.folder / ".venv/rest.txt").read_text().splitlines()
    assert sorted(lines) == sorted(line for line in LOCK if not line.startswith(("#", "torch==")))


def test_on_python_3_11_megatron_core_is_asked_for_once_more_whatever_python_it_says_that_it_needs(
    clone,
):
    clone.stand_in(before_3_12=1)
    assert clone.setup("lessons").returncode == 0
    _, rest, megatron, _ = clone.pip()
    (line,) = [line for line in LOCK if line.startswith("megatron-core==")]
    assert megatron.split()[-2:] == ["--ignore-requires-python", line.split(" ;")[0]]
    assert "--no-deps" in megatron and "--ignore-requires-python" not in rest


def test_lessons_get_the_first_part_of_the_lock_and_setup_adds_the_rest(clone):
    assert clone.setup("lessons").returncode == 0
    rest = (clone.folder / ".venv/rest.txt").read_text()
    assert "jupyterlab==" in rest and "pytest==" not in rest and "lm-eval==" not in rest
    assert clone.setup("lessons").returncode == 0 and clone.pip() == []
    assert clone.setup().returncode == 0
    assert "pytest==" in (clone.folder / ".venv/rest.txt").read_text()
    assert clone.setup("lessons").returncode == 0 and clone.pip() == [], (
        "who has everything has the lessons"
    )


def test_a_second_setup_starts_nothing(clone):
    clone.setup()
    assert clone.setup().returncode == 0 and clone.calls.read_text() == ""


def test_an_interrupted_setup_is_resumed_and_half_a_package_is_installed_anew(clone):
    clone.stand_in(pip="exit 1")
    assert clone.setup().returncode != 0
    clone.stand_in()
    packages = clone.folder / ".venv/lib/python3.11/site-packages"
    for name in ("half-1.dist-info", "whole-1.dist-info"):
        (packages / name).mkdir(parents=True)
    (packages / "whole-1.dist-info/RECORD").touch()
    assert clone.setup().returncode == 0 and "-m venv" not in clone.calls.read_text()
    assert [path.name for path in packages.iterdir()] == ["whole-1.dist-info"]


CPU = "https://download.pytorch.org/whl/cpu"


@pytest.mark.parametrize(
    ("nvidia", "probe", "variables", "index"),
    [
        ("exit 9", "true", {}, CPU),
        ("exit 9", "false", {}, None),
        ("exit 9", "true", {"PIP_NO_INDEX": "1"}, None),
        ("echo GPU 0: NVIDIA A100", "true", {}, None),
        ("exit 9", "true", {"TORCH": "cuda"}, "https://download.pytorch.org/whl/cu130"),
        ("echo GPU 0: NVIDIA A100", "false", {"TORCH": "cpu 2.12.1"}, CPU),
    ],
)
def test_without_a_gpu_torch_comes_in_its_build_for_cpus_unless_told_otherwise(
    clone, nvidia, probe, variables, index
):
    clone.program("nvidia-smi", nvidia)
    clone.stand_in(probe=probe)
    done = clone.setup(**variables)
    assert done.returncode == 0, done.stderr
    words = clone.pip()[0].split()
    assert (words[words.index("--index-url") + 1] if "--index-url" in words else None) == index
    assert ("--no-deps" in words) == (index is not None and index.endswith("/cpu")), (
        "CUDA comes with libraries"
    )
    assert words[-1] == f"torch=={'2.12.1' if '2.12.1' in variables.get('TORCH', '') else '2.13.0'}"


def test_torchs_index_and_version_can_be_chosen_and_the_choice_is_remembered(clone):
    assert clone.setup(TORCH="https://example.org/cpu 2.12.1").returncode == 0
    torch, rest, _ = clone.pip()
    assert (
        "--index-url https://example.org/cpu torch==2.12.1" in torch and "--index-url" not in rest
    )
    clone.setup()
    assert clone.pip() == [], "the choice holds without being named again"
    clone.setup(TORCH="default")
    assert clone.pip()[0] == "uninstall -q -y torch" and clone.pip()[1].endswith(" torch==2.13.0")


def test_a_site_s_own_torch_and_mpi_are_used_as_they_are(clone):
    assert clone.setup(TORCH="site", MPI="site").returncode == 0
    assert "-m venv --clear --system-site-packages .venv" in clone.calls.read_text()
    assert not any("torch==" in line for line in clone.pip())
    assert "mpich" not in (clone.folder / ".venv/rest.txt").read_text()


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        (
            {"TORCH": "gpu"},
            "TORCH=gpu is none of cpu, cuda, rocm, site, a version, "
            "and the address of a package index",
        ),
        (
            {"PYTHON": "/bin/false"},
            "no Python 3.11, 3.12 or 3.13 here: install one, or name it with PYTHON=",
        ),
    ],
)
def test_an_impossible_choice_is_refused(clone, variables, line):
    done = clone.setup("everything", **variables)
    assert (
        done.returncode == 1
        and f"setup: {line}" in done.stderr.splitlines()[-1]
        and clone.pip() == []
    )
