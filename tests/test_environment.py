"""Set-up: pyproject.toml, requirements.lock and environment.yml agree, and scripts/setup.sh works as documented."""

from __future__ import annotations

import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DIRECT = [Requirement(line) for line in PROJECT["dependencies"]]
DIRECT += [Requirement(line) for extra in PROJECT["optional-dependencies"].values() for line in extra]
LOCK = [
    Requirement(line)
    for line in (ROOT / "requirements.lock").read_text().splitlines()
    if line and not line.startswith("#")
]
SUPPORTED = ("3.11.2", "3.11.14", "3.12.8", "3.13.5")  # 3.11.2: Debian 12's
ENVIRONMENT = yaml.safe_load((ROOT / "environment.yml").read_text())
#: Names that differ between conda-forge and PyPI.
CONDA_NAMES = {"matplotlib-base": "matplotlib", "jupyter_client": "jupyter-client"}


def locked(python: str = "3.11.9", system: str = "linux") -> dict[str, str]:
    place = {
        "python_version": ".".join(python.split(".")[:2]),
        "python_full_version": python,
        "sys_platform": system,
        "platform_machine": "arm64" if system == "darwin" else "x86_64",
    }
    chosen = [r for r in LOCK if not r.marker or r.marker.evaluate(place)]
    names = [canonicalize_name(r.name) for r in chosen]
    assert len(names) == len(set(names)), "one version of each"
    return {name: next(iter(r.specifier)).version for name, r in zip(names, chosen, strict=True)}


# the three lists ----------------------------------------------------------------------------------------------------


def test_the_lock_names_exact_versions_and_no_place_to_get_them():
    assert all([s.operator for s in r.specifier] == ["=="] for r in LOCK)
    assert not re.search(r"https?:|--|\.org|\.com", (ROOT / "requirements.lock").read_text().replace("\n#", ""))


@pytest.mark.parametrize("system", ["linux", "darwin"])
@pytest.mark.parametrize("python", SUPPORTED)
def test_the_lock_satisfies_pyproject_on_every_supported_python(python, system):
    versions = locked(python, system)
    for requirement in DIRECT:
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), requirement


def test_the_lock_is_complete():
    """It is installed without dependency resolution, so it must contain every dependency of its packages."""
    python = ".".join(map(str, sys.version_info[:3]))
    versions, lacking = locked(python), []
    for name in versions:
        if name == "torch":  # its companion packages differ between builds; pip adds them
            continue
        try:
            needs = [Requirement(line) for line in distribution(name).requires or []]
        except PackageNotFoundError:
            continue
        for need in needs:
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                found = versions.get(canonicalize_name(need.name))
                if found is None or not need.specifier.contains(found, prereleases=True):
                    lacking.append(f"{name} needs {need}, the lock has {found}")
    assert lacking == []


def test_conda_gets_the_same_versions():
    from rattler import MatchSpec

    *conda, pip = ENVIRONMENT["dependencies"]
    versions = locked()
    found = {"aiscale": "."}
    for text in conda:
        spec = MatchSpec(text, strict=True)  # raises on what conda would not parse
        name = CONDA_NAMES.get(spec.name.normalized, spec.name.normalized)
        if text.partition("=")[2]:
            found[canonicalize_name(name)] = text.partition("=")[2]
    for line in pip["pip"]:
        if not line.startswith("-e"):
            name, version = line.split("==")
            found[canonicalize_name(name)] = version
    assert found.pop("python") == "3.11" and found.pop("aiscale") == "."
    assert {name: versions[name] for name in found} == found
    assert {canonicalize_name(r.name) for r in DIRECT} <= set(found), "every direct dependency is pinned there too"


def test_conda_installs_from_one_public_channel_and_the_package_itself():
    assert ENVIRONMENT["channels"] == ["conda-forge", "nodefaults"]
    assert ENVIRONMENT["dependencies"][-1]["pip"][-1] == "-e ."


def test_the_package_accepts_the_pythons_and_the_torch_that_the_readme_names():
    assert PROJECT["requires-python"] == ">=3.11,<3.14"
    assert next(r for r in DIRECT if r.name == "torch").specifier == Requirement("torch>=2.10").specifier


# what stands around -------------------------------------------------------------------------------------------------


def test_every_ci_runs_every_tier_and_all_notebooks():
    github = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    steps = [step.get("run") for job in github["jobs"].values() for step in job["steps"]]
    gitlab = yaml.safe_load((ROOT / ".gitlab-ci.yml").read_text())
    for script in (steps, [line for job in gitlab.values() if "script" in job for line in job["script"]]):
        assert {"bash .ci/run test", "make workshop"} <= set(script)
        assert any(str(line).startswith("bash .ci/run more") for line in script)
    ci = (ROOT / ".ci/run").read_text()
    assert all(f"make {target} " in ci for target in ("test", "test-more", "soak"))


def test_a_test_past_the_deadline_is_skipped_and_named(pytest_on):
    done = pytest_on("def test_it(): assert False", AISCALE_TESTS_END="1", CI="1")
    assert done.returncode == 0 and "1 skipped" in done.stdout and "out of time" in done.stdout


def test_interrupts_reach_tests_that_run_in_the_background(pytest_on):
    code = "import os, pytest, signal\ndef test_it():\n    with pytest.raises(KeyboardInterrupt):\n"
    code += "        os.kill(os.getpid(), signal.SIGINT)\n        signal.pause()"
    done = pytest_on(code, preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_IGN))
    assert done.returncode == 0, done.stdout


def test_a_skipped_test_fails_in_ci(pytest_on):
    code = "import pytest\n@pytest.mark.skip(reason='no such thing here')\ndef test_it(): pass"
    assert pytest_on(code, CI="").returncode == 0
    done = pytest_on(code, CI="1")
    assert done.returncode == 1 and "skipped, which CI does not allow: " in done.stdout


@pytest.fixture
def pytest_on(tmp_path):

    def run(code: str, preexec_fn=None, **env: str) -> subprocess.CompletedProcess:
        shutil.copy(ROOT / "tests/conftest.py", tmp_path)
        (tmp_path / "test_it.py").write_text(code)
        command = [sys.executable, "-m", "pytest", "-ra", "-p", "no:cacheprovider", str(tmp_path)]
        where = {"cwd": tmp_path, "env": {**os.environ, **env}, "preexec_fn": preexec_fn}
        return subprocess.run(command, **where, capture_output=True, text=True, timeout=60)

    return run


def test_licence_and_citation_agree_with_pyproject():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    assert "Apache License" in (ROOT / "LICENSE").read_text()[:200]


def test_shell_scripts_are_clean_to_shellcheck():
    if not shutil.which("shellcheck"):
        pytest.skip("no shellcheck on this machine")
    scripts = [ROOT / ".ci/run", *ROOT.glob("scripts/*.sh")]
    done = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_make_alone_prints_the_help():
    done = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and {"make workshop", "make test", "make lab"} <= set(
        re.findall(r"make \w+", done.stdout)
    )


@pytest.mark.parametrize(("ci", "status"), [("true", 1), ("", 0)])
def test_a_test_that_skips_fails_under_ci_unless_it_needs_a_gpu(tmp_path, ci, status):
    shutil.copy(ROOT / "tests/conftest.py", tmp_path)
    body = "import pytest\n{}def test_it():\n    pytest.skip('no such program')\n"
    (tmp_path / "test_plain.py").write_text(body.format(""))
    (tmp_path / "test_gpu.py").write_text(body.format("@pytest.mark.gpu\n"))
    (tmp_path / "test_module.py").write_text("import pytest\npytest.importorskip('no_such_module')\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: x\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--continue-on-collection-errors", "-rA"]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "CI": ci}, capture_output=True, text=True)
    assert done.returncode == status
    assert done.stdout.count("skipped, which CI does not allow") >= 2 * status, done.stdout
    assert "SKIPPED [1] test_gpu.py" in done.stdout


# scripts/setup.sh, with a stand-in for Python that notes what it is asked -------------------------------------------

STAND_IN = """#!/bin/bash
echo "$*" >> {calls}
case "$*" in
  --version) echo "Python 3.11.9" ;;
  "-c import sys"*) ;;
  "-c import torch"*) [ -n "{torch}" ] && echo "{torch}" ;;
  "-m venv"*) mkdir -p .venv/bin; cp "$0" .venv/bin/python; touch .venv/bin/aiscale; chmod +x .venv/bin/aiscale ;;
  "-m pip install"*) [ -z "{pip_says}" ] || {{ echo "{pip_says}" > .venv/setup.log; exit 1; }} ;;
  scripts/missing.py*) exec {python} "$@" ;;
esac
"""


class Clone:
    def __init__(self, folder: Path) -> None:
        self.folder, self.calls = folder, folder / "calls"
        (folder / "scripts").mkdir()
        for name in ("scripts/setup.sh", "scripts/missing.py", "Makefile", "requirements.lock", "pyproject.toml"):
            shutil.copy(ROOT / name, folder / name)
        self.stand_in()

    def stand_in(self, torch: str = "2.13.0", pip_says: str = "") -> None:
        path = self.folder / "python"
        path.write_text(STAND_IN.format(calls=self.calls, torch=torch, pip_says=pip_says, python=sys.executable))
        path.chmod(0o755)
        if (self.folder / ".venv/bin/python").exists():
            shutil.copy(path, self.folder / ".venv/bin/python")

    def setup(self, **variables: str) -> subprocess.CompletedProcess:
        self.calls.write_text("")
        env = {k: v for k, v in os.environ.items() if k not in ("TORCH", "MPI", "PYTHON")}
        env |= {"PYTHON": str(self.folder / "python")} | variables
        return subprocess.run(["make", "setup"], cwd=self.folder, env=env, capture_output=True, text=True)

    def pip(self) -> list[str]:
        return [line for line in self.calls.read_text().splitlines() if line.startswith("-m pip")]


@pytest.fixture
def clone(tmp_path):
    return Clone(tmp_path)


def said(done: subprocess.CompletedProcess) -> str:
    """The script's own lines on standard error, without make's last line."""
    assert done.returncode != 0
    return "\n".join(line for line in done.stderr.splitlines() if not line.startswith("make"))


def test_setup_installs_torch_first_and_pinned_then_the_lock_then_the_package(clone):
    assert clone.setup().returncode == 0
    torch, rest, package = clone.pip()
    assert torch.endswith("torch==2.13.0") and "--index-url" not in torch
    assert "--no-deps" in rest and rest.endswith("-r .venv/rest.txt")
    assert package.endswith("--editable .")
    lines = (clone.folder / ".venv/rest.txt").read_text().splitlines()
    assert len(lines) == len(LOCK) - 1 and not any(line.startswith("torch==") for line in lines)


def test_a_second_setup_starts_nothing_and_takes_no_time(clone):
    clone.setup()
    started = time.monotonic()
    assert clone.setup().returncode == 0
    assert time.monotonic() - started < 10 and clone.calls.read_text() == ""


@pytest.mark.parametrize("file", ["requirements.lock", "pyproject.toml"])
def test_setup_runs_again_when_a_list_changes(clone, file):
    clone.setup()
    with open(clone.folder / file, "a") as lock:
        lock.write("# changed\n")
    assert clone.setup().returncode == 0 and len(clone.pip()) == 3
    assert "-m venv" not in clone.calls.read_text(), "the virtual environment is reused"


def test_an_interrupted_setup_is_resumed(clone):
    clone.stand_in(pip_says="ERROR: stopped")
    assert clone.setup().returncode != 0
    clone.stand_in()
    assert clone.setup().returncode == 0 and "-m venv" not in clone.calls.read_text()


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


@pytest.mark.parametrize(
    ("torch", "variables", "line"),
    [
        ("2.9.1", {"TORCH": "site"}, "torch 2.9.1 is older than 2.10, which aiscale needs: load the module"),
        ("", {"TORCH": "site"}, "this Python (Python 3.11.9) cannot import torch: load the module that has it"),
        ("2.13.0", {"TORCH": "cpu"}, "TORCH=cpu is neither the address of a package index, nor a version, nor 'site'"),
        ("2.13.0", {"PYTHON": "/bin/false"}, "PYTHON=/bin/false is not a Python 3.11 to 3.13: name one that is"),
    ],
)
def test_an_impossible_setup_is_refused_in_one_line(clone, torch, variables, line):
    clone.stand_in(torch=torch)
    assert line in said(clone.setup(**variables)).splitlines()[-1]


def test_without_a_supported_python_setup_says_how_to_get_one(clone):
    tools = clone.folder / "tools"
    tools.mkdir()
    for name in ("bash", "cat", "cksum", "dirname", "env", "make"):
        (tools / name).symlink_to(shutil.which(name))
    done = clone.setup(PATH=str(tools), PYTHON="")
    assert said(done) == (
        "setup: no Python 3.11, 3.12 or 3.13 on the path: install one (apt-get install python3-venv, "
        "module load python, or conda), or name it with PYTHON=/path/to/python3"
    )


def test_without_a_network_setup_says_what_is_missing_and_what_to_do(clone):
    """With the real pip, and an index that does not answer."""
    nowhere = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_FIND_LINKS": ""}
    done = clone.setup(PYTHON=getattr(sys, "_base_executable", sys.executable), **nowhere)
    last = said(done).splitlines()[-1]
    assert re.fullmatch(
        r"setup: torch, \S+, \S+ and \d+ more packages are not installed, because no package index answers: connect to "
        r"a network, or point pip at a folder of wheels \(PIP_FIND_LINKS=DIR PIP_NO_INDEX=1\), then run this again",
        last,
    ), done.stderr
