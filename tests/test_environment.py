"""pyproject.toml, requirements.lock, environment.yml and what the package imports agree."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DIRECT = [Requirement(line) for line in PROJECT["dependencies"]]
DIRECT += [
    Requirement(line)
    for name, extra in PROJECT["optional-dependencies"].items()
    for line in extra
    if name != "science"  # which no set-up installs
]
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


def test_the_lock_names_exact_versions_and_no_place_to_get_them():
    assert all([s.operator for s in r.specifier] == ["=="] for r in LOCK)
    assert not re.search(
        r"https?:|--|\.org|\.com", (ROOT / "requirements.lock").read_text().replace("\n#", "")
    )


@pytest.mark.parametrize("system", ["linux", "darwin"])
@pytest.mark.parametrize("python", SUPPORTED)
def test_the_lock_satisfies_pyproject_on_every_supported_python(python, system):
    versions = locked(python, system)
    for requirement in DIRECT:
        if not requirement.marker or requirement.marker.evaluate({"python_version": python[:4]}):
            assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), (
                requirement
            )


def test_the_lock_is_complete():
    """It is installed without resolution, so it must have all dependencies of its packages."""
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
    versions = locked("3.12.8")
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
    assert found.pop("python") == "3.12" and found.pop("aiscale") == "."
    assert {name: versions[name] for name in found} == found
    assert {canonicalize_name(r.name) for r in DIRECT} <= set(found), (
        "every direct dependency is pinned there too"
    )


def third_party(file: Path) -> set[str]:
    """The modules that a file imports, here or inside a function, without Python's own and ours."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module.split(".")[0])
    return found - sys.stdlib_module_names - {"aiscale", "__main__"}


#: What only these files import is in an extra, which `make lab` does not install.
BEYOND_THE_LESSONS = (
    "train/evaluate.py",
    "train/hugging_face.py",
    "train/tasks/",
    "train/prepare/formats.py",
    "lesson/slides.py",
)


def test_what_the_package_imports_is_declared_and_lessons_find_theirs():
    sources = packages_distributions()
    lessons = {canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"]}
    everything = {canonicalize_name(r.name) for r in DIRECT}
    undeclared = []
    for file in sorted((ROOT / "src").rglob("*.py")):
        place = file.relative_to(ROOT / "src/aiscale").as_posix()
        declared = everything if place.startswith(BEYOND_THE_LESSONS) else lessons
        for module in third_party(file):
            if not {canonicalize_name(name) for name in sources.get(module, [module])} & declared:
                undeclared.append(f"{place} imports {module}")
    assert undeclared == []


def test_the_first_part_of_the_lock_has_all_that_lessons_need():
    text = (ROOT / "requirements.lock").read_text().partition("# Beyond the lessons")
    parts = [
        {
            canonicalize_name(Requirement(line).name)
            for line in part.splitlines()[1:]
            if line[:1] not in ("#", "")
        }
        for part in (text[0], text[2])
    ]
    extras = PROJECT["optional-dependencies"]
    wanted, seen = [Requirement(line) for line in PROJECT["dependencies"] + extras["mpi"]], set()
    while wanted:
        requirement = wanted.pop()
        name = canonicalize_name(requirement.name)
        if name in seen or name not in locked(".".join(map(str, sys.version_info[:3]))):
            continue  # the libraries of some torch builds
        assert name in parts[0], f"{name} is needed by the lessons"
        seen.add(name)
        for line in distribution(name).requires or []:
            need = Requirement(line)
            if any(
                not need.marker or need.marker.evaluate({"extra": e})
                for e in ("", *requirement.extras)
            ):
                wanted.append(need)
    assert {"pytest", "lm-eval", "datasets", "jupyterhub"} <= parts[1]


def test_shell_scripts_are_clean_to_shellcheck():
    if not shutil.which("shellcheck"):
        pytest.skip("no shellcheck on this machine")
    scripts = [ROOT / ".ci/run", *ROOT.glob("scripts/*.sh")]
    done = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    unquoted = ["--shell=bash", "--include=SC2046,SC2048,SC2068,SC2086"]
    rest = [
        path
        for folder in ("src", "launchers", "workshop", "benchmarks")
        for path in (ROOT / folder).rglob("*.sh")
    ]
    done = subprocess.run(["shellcheck", *unquoted, *rest], capture_output=True, text=True)
    assert len(rest) >= 11 and done.returncode == 0, done.stdout
