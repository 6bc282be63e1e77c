"""scripts/setup.sh works as documented: `pytest tests/test_setup.py`.

Most tests give it a stand-in for Python that notes what it is asked; two have the real pip, and an index on this
machine that holds one small wheel.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = getattr(sys, "_base_executable", sys.executable)
LOCK = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if line]

STAND_IN = """#!/bin/bash
echo "$*" >> "{calls}"
case "$*" in
  --version) echo "Python 3.11.9" ;;
  "-c import sys"*) ;;
  "-c import torch"*) [ -n "{torch}" ] && echo "{torch}" ;;
  "-c import urllib"*) {probe} ;;
  "-m venv"*) mkdir -p .venv/bin; cp "$0" .venv/bin/python; touch .venv/bin/aiscale; chmod +x .venv/bin/aiscale ;;
  "-m pip install"*) [ -z "{pip_says}" ] || {{ echo "{pip_says}" > .venv/setup.log; exit 1; }} ;;
  scripts/missing.py*) exec {python} "$@" ;;
esac
"""


class Clone:
    def __init__(self, folder: Path) -> None:
        self.folder, self.calls = folder, folder / "calls"
        (folder / "scripts").mkdir(parents=True)
        for name in ("scripts/setup.sh", "scripts/missing.py", "Makefile", "requirements.lock", "pyproject.toml"):
            shutil.copy(ROOT / name, folder / name)
        self.program("nvidia-smi", "exit 9")
        self.program("uname", "echo Linux")
        self.stand_in()

    def program(self, name: str, does: str) -> None:
        path = self.folder / "tools" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{does}\n")
        path.chmod(0o755)

    def stand_in(self, torch: str = "2.13.0", pip_says: str = "", probe: str = "true") -> None:
        path = self.folder / "python"
        values = {"calls": self.calls, "torch": torch, "pip_says": pip_says, "python": sys.executable, "probe": probe}
        path.write_text(STAND_IN.format(**values))
        path.chmod(0o755)
        if (self.folder / ".venv/bin/python").exists():
            shutil.copy(path, self.folder / ".venv/bin/python")

    def setup(self, *what: str, **variables: str) -> subprocess.CompletedProcess:
        self.calls.write_text("")
        names = ("TORCH", "MPI", "PYTHON", "PIP_NO_INDEX", "PYTORCH_INDEX")
        env = {key: value for key, value in os.environ.items() if key not in names}
        env |= {"PYTHON": str(self.folder / "python"), "PATH": f"{self.folder / 'tools'}:{env['PATH']}"} | variables
        command = ["scripts/setup.sh", *what] if what else ["make", "setup"]
        return subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True, timeout=600)

    def pip(self) -> list[str]:
        return [line for line in self.calls.read_text().splitlines() if line.startswith("-m pip")]


@pytest.fixture
def clone(tmp_path):
    return Clone(tmp_path / "a clone")


def said(done: subprocess.CompletedProcess) -> str:
    """The script's own lines on standard error, without make's last line."""
    assert done.returncode != 0
    return "\n".join(line for line in done.stderr.splitlines() if not line.startswith("make"))


# what is installed, and when ------------------------------------------------------------------------------------------


def test_setup_installs_torch_first_and_pinned_then_the_lock_then_the_package(clone):
    assert clone.setup().returncode == 0
    torch, rest, package = clone.pip()
    assert torch.endswith("torch==2.13.0")
    assert "--no-deps" in rest and "--index-url" not in rest and rest.endswith("-r .venv/rest.txt")
    assert package.endswith("--editable .")
    lines = (clone.folder / ".venv/rest.txt").read_text().splitlines()
    assert sorted(lines) == sorted(line for line in LOCK if not line.startswith(("#", "torch==")))


def test_lessons_get_the_first_part_of_the_lock_and_setup_adds_the_rest(clone):
    assert clone.setup("lessons").returncode == 0
    rest = (clone.folder / ".venv/rest.txt").read_text()
    assert "jupyterlab==" in rest and "pytest==" not in rest and "lm-eval==" not in rest
    assert clone.setup("lessons").returncode == 0 and clone.pip() == []
    assert clone.setup().returncode == 0
    assert "pytest==" in (clone.folder / ".venv/rest.txt").read_text()
    assert clone.setup("lessons").returncode == 0 and clone.pip() == [], "who has everything has the lessons"


def test_make_lab_installs_the_lessons_part_and_opens_the_first_notebook(clone):
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # as if no make ran this
    done = subprocess.run(["make", "-n", "lab"], cwd=clone.folder, env=alone, capture_output=True, text=True)
    setup, lab = done.stdout.splitlines()
    assert setup == "scripts/setup.sh lessons" and "/lab/tree/notebooks/00_start_here.ipynb" in lab


def test_a_second_setup_starts_nothing(clone):
    clone.setup()
    assert clone.setup().returncode == 0 and clone.calls.read_text() == ""


@pytest.mark.parametrize("file", ["requirements.lock", "pyproject.toml"])
def test_setup_runs_again_when_a_list_changes(clone, file):
    clone.setup()
    with open(clone.folder / file, "a") as lock:
        lock.write("# changed\n")
    assert clone.setup().returncode == 0 and clone.pip()[-1].endswith("--editable .")
    assert "-m venv" not in clone.calls.read_text(), "the virtual environment is reused"


def test_an_interrupted_setup_is_resumed_and_half_a_package_is_installed_anew(clone):
    clone.stand_in(pip_says="ERROR: stopped")
    assert clone.setup().returncode != 0
    clone.stand_in()
    packages = clone.folder / ".venv/lib/python3.11/site-packages"
    for name in ("half-1.dist-info", "whole-1.dist-info"):
        (packages / name).mkdir(parents=True)
    (packages / "whole-1.dist-info/RECORD").touch()
    assert clone.setup().returncode == 0 and "-m venv" not in clone.calls.read_text()
    assert [path.name for path in packages.iterdir()] == ["whole-1.dist-info"]


def test_a_clone_reached_by_a_link_is_the_same_clone(clone, tmp_path):
    clone.setup()
    (tmp_path / "link").symlink_to(clone.folder)
    clone.calls.write_text("")
    env = {**os.environ, "PWD": str(tmp_path / "link")}
    done = subprocess.run([tmp_path / "link/scripts/setup.sh"], cwd=tmp_path / "link", env=env, timeout=60)
    assert done.returncode == 0 and clone.calls.read_text() == ""


def test_of_two_setups_at_once_one_waits_and_finds_the_work_done(clone):
    assert clone.setup().returncode == 0
    stamp = clone.folder / ".venv/.aiscale-stamp"
    wanted = stamp.read_text()
    stamp.unlink()
    with open(clone.folder / "pyproject.toml", "a") as script:  # the first set-up
        fcntl.flock(script, fcntl.LOCK_EX)
        clone.calls.write_text("")
        env = {**os.environ, "PYTHON": str(clone.folder / "python")}
        command = [clone.folder / "scripts/setup.sh"]
        second = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
        assert "another set-up is at work in this folder: waiting" in second.stderr.readline()
        stamp.write_text(wanted)
    assert second.wait(60) == 0 and "pip" not in clone.calls.read_text()
    second.stderr.close()


# which torch ----------------------------------------------------------------------------------------------------------

CPU = "https://download.pytorch.org/whl/cpu"


@pytest.mark.parametrize(
    ("nvidia", "probe", "variables", "index"),
    [
        ("exit 9", "true", {}, CPU),
        ("exit 9", "true", {"TORCH": "2.12.1"}, CPU),
        ("exit 9", "false", {}, None),
        ("exit 9", "true", {"PIP_NO_INDEX": "1"}, None),
        ("echo GPU 0: NVIDIA A100", "true", {}, None),
        ("exit 9", "true", {"TORCH": "cuda"}, "https://download.pytorch.org/whl/cu130"),
        ("exit 9", "true", {"TORCH": "rocm"}, "https://download.pytorch.org/whl/rocm7.2"),
        ("echo GPU 0: NVIDIA A100", "false", {"TORCH": "cpu 2.12.1"}, CPU),
        (
            "exit 9",
            "true",
            {"TORCH": "cpu", "PYTORCH_INDEX": "https://mirror.example/whl"},
            "https://mirror.example/whl/cpu",
        ),
    ],
)
def test_without_a_gpu_torch_comes_in_its_build_for_cpus_unless_told_otherwise(clone, nvidia, probe, variables, index):
    clone.program("nvidia-smi", nvidia)
    clone.stand_in(probe=probe)
    done = clone.setup(**variables)
    assert done.returncode == 0, done.stderr
    words = clone.pip()[0].split()
    assert (words[words.index("--index-url") + 1] if "--index-url" in words else None) == index
    assert ("--no-deps" in words) == (index is not None and index.endswith("/cpu")), "CUDA comes with libraries"
    assert words[-1] == f"torch=={'2.12.1' if '2.12.1' in variables.get('TORCH', '') else '2.13.0'}"
    explained = "no NVIDIA GPU here" in done.stderr
    assert explained == (nvidia == "exit 9" and "cuda rocm cpu".find(variables.get("TORCH", "-")) < 0)


def test_torchs_index_and_version_can_be_chosen_and_the_choice_is_remembered(clone):
    assert clone.setup(TORCH="https://example.org/cpu 2.12.1").returncode == 0
    torch, rest, _ = clone.pip()
    assert "--index-url https://example.org/cpu torch==2.12.1" in torch and "--index-url" not in rest
    clone.setup()
    assert clone.pip() == [], "the choice holds without being named again"
    clone.setup(TORCH="default")
    assert clone.pip()[0] == "-m pip uninstall --quiet --yes torch" and clone.pip()[1].endswith(" torch==2.13.0")


def test_a_site_s_own_torch_and_mpi_are_used_as_they_are(clone):
    clone.stand_in(torch="2.11.0a0+rocm")
    assert clone.setup(TORCH="site", MPI="site").returncode == 0
    assert "-m venv --clear --system-site-packages .venv" in clone.calls.read_text()
    assert not any("torch==" in line for line in clone.pip())
    assert "mpich" not in (clone.folder / ".venv/rest.txt").read_text()


class Index:
    """A package index on this machine: `simple/` as PyPI's, with CUDA's torch, and `whl/cpu/` as PyTorch's own."""

    def __init__(self, folder: Path) -> None:
        wheel(folder / "simple/torch/torch-2.13.0-py3-none-any.whl", torch="2.13.0+cu130")
        wheel(folder / "simple/small/small-1.0-py3-none-any.whl", small="1.0")
        wheel(folder / "whl/cpu/torch/torch-2.13.0+cpu-py3-none-any.whl", torch="2.13.0+cpu")
        for page in {path.parent for path in folder.rglob("*.whl")}:
            links = "".join(f'<a href="{path.name}">{path.name}</a>' for path in page.iterdir())
            (page / "index.html").write_text(links)
        self.asked: list[str] = []

        class Handler(SimpleHTTPRequestHandler):
            def log_message(handler, *_):  # noqa: N805
                self.asked.append(f"{handler.command} {handler.path}")

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


def wheel(path: Path, **module: str) -> None:
    ((name, version),) = module.items()
    path.parent.mkdir(parents=True, exist_ok=True)
    info = "-".join(path.name.split("-")[:2]) + ".dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{name}.py", f"__version__ = {version!r}\n")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {info.split('-')[1][:-5]}\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")


#: A package with the command aiscale, built without any other library.
BACKEND = """
import zipfile
def build_editable(folder, *_):
    with zipfile.ZipFile(f"{folder}/aiscale-1-py3-none-any.whl", "w") as file:
        file.writestr("aiscale-1.dist-info/METADATA", "Metadata-Version: 2.1\\nName: aiscale\\nVersion: 1\\n")
        file.writestr("aiscale-1.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        file.writestr("aiscale-1.dist-info/entry_points.txt", "[console_scripts]\\naiscale = os:getcwd\\n")
        file.writestr("aiscale-1.dist-info/RECORD", "")
    return "aiscale-1-py3-none-any.whl"
"""


@pytest.mark.extended
def test_the_real_pip_takes_torch_from_pytorchs_index_and_the_rest_from_its_own(clone, tmp_path):
    index = Index(tmp_path / "index")
    (clone.folder / "requirements.lock").write_text("torch==2.13.0\nsmall==1.0\n")
    system = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    (clone.folder / "pyproject.toml").write_text(system)
    (clone.folder / "backend.py").write_text(BACKEND)
    (clone.folder / "README.md").touch()
    pip = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_INDEX_URL": f"{index.address}/simple"}
    try:
        done = clone.setup("lessons", PYTHON=PYTHON, PYTORCH_INDEX=f"{index.address}/whl", **pip)
    finally:
        index.server.shutdown()
    assert done.returncode == 0, done.stderr
    assert "torch comes in its build for CPUs" in done.stderr
    assert "HEAD /whl/cpu/torch/" in index.asked
    wheels = [line for line in index.asked if line.endswith(".whl")]
    assert [line.replace("%2B", "+") for line in wheels] == [
        "GET /whl/cpu/torch/torch-2.13.0+cpu-py3-none-any.whl",
        "GET /simple/small/small-1.0-py3-none-any.whl",
    ]
    code = "import small, torch; print(torch.__version__)"
    found = subprocess.run([clone.folder / ".venv/bin/python", "-c", code], capture_output=True, text=True)
    assert found.stdout.strip() == "2.13.0+cpu"


# what is said ---------------------------------------------------------------------------------------------------------


def disk(free_mb: int) -> str:
    return f"echo Filesystem; echo /dev/x 9 9 {int(free_mb * 1e6 / 1024)} 9% /"


def test_a_disk_that_is_too_small_is_refused_before_anything_is_downloaded(clone):
    clone.program("df", disk(1_000))
    last = said(clone.setup()).splitlines()[-1]
    assert re.fullmatch(
        r"setup: \d\.\d GB of disk are needed in .*/a clone and 1\.0 GB are free: free some, or clone into a larger "
        r"file system",
        last,
    )
    assert clone.pip() == []


@pytest.mark.extended
def test_the_sizes_that_setup_names_are_those_of_an_installation():
    import torch

    script = (ROOT / "scripts/setup.sh").read_text()
    said_mb = {name: int(disk) for name, disk in re.findall(r'^(\w+)_MB="\d+ (\d+)"', script, re.M)}
    packages = Path(torch.__file__).parents[1]
    if "+cpu" not in torch.__version__:
        pytest.skip("sizes are those of torch's build for CPUs")
    used = sum(file.stat().st_blocks * 512 for file in packages.rglob("*") if file.is_file()) / 1e6
    assert used < 1.15 * (said_mb["EVERYTHING"] + said_mb["CPU"])


@pytest.mark.parametrize(
    ("torch", "variables", "line"),
    [
        ("2.9.1", {"TORCH": "site"}, "torch 2.9.1 is older than 2.10, which aiscale needs: load the module"),
        ("", {}, "this Python (Python 3.11.9) cannot import torch: choose another with TORCH"),
        ("2.13.0", {"TORCH": "gpu"}, "TORCH=gpu is none of cpu, cuda, rocm, site, a version, and the address of"),
    ],
)
def test_an_impossible_setup_is_refused_in_one_line(clone, torch, variables, line):
    clone.stand_in(torch=torch)
    assert line in said(clone.setup(**variables)).splitlines()[-1]


def test_without_a_supported_python_setup_says_how_to_get_one(clone):
    tools = clone.folder / "few"
    tools.mkdir()
    for name in ("bash", "cat", "cksum", "dirname", "env", "flock", "make", "sed"):
        (tools / name).symlink_to(shutil.which(name))
    done = clone.setup(PATH=str(tools), PYTHON="")
    assert said(done) == (
        "setup: no Python 3.11, 3.12 or 3.13 on the path: install one (apt-get install python3-venv, "
        "module load python, or conda), or name it with PYTHON=/path/to/python3"
    )


@pytest.mark.extended
def test_without_a_network_setup_says_what_is_missing_and_what_to_do(clone):
    """With the real pip, and an index that does not answer."""
    nowhere = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_FIND_LINKS": ""}
    nowhere["PYTORCH_INDEX"] = "http://127.0.0.1:9/whl"
    done = clone.setup(PYTHON=PYTHON, **nowhere)
    last = said(done).splitlines()[-1]
    assert re.fullmatch(
        r"setup: torch, \S+, \S+ and \d+ more packages are not installed, because no package index answers: connect to "
        r"a network, or point pip at a folder of wheels \(PIP_FIND_LINKS=DIR PIP_NO_INDEX=1\), then run this again",
        last,
    ), done.stderr
