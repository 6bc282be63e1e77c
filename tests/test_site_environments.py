"""Environments at the sites: their locks fit pyproject and profile; build_environment.sh builds.

The script really runs, with pip and package indexes of a few tiny packages in folders. `module`,
`conda` and the Python of a module are stand-ins; the sites' Python is this one.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from aiscale.cli import _parser
from aiscale.site.launchers.render import BUILD, SHIPPED, render_all
from aiscale.site.profiles import site

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "launchers"
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
SETUPTOOLS = distribution("setuptools").version

STUBS = {
    "module": 'printf "module %s\\n" "$*" >> "$CALLS"\n',
    # creates an environment with this Python, with the files that conda leaves in one
    "conda": """printf 'conda %s [%s]\\n' "$*" "$CONDA_PKGS_DIRS" >> "$CALLS"
while [ "$1" != --prefix ]; do shift; done
{python} -m venv --without-pip "$2" && mkdir "$2/conda-meta"
echo "$PIP" > "$(echo "$2"/lib/python*/site-packages)/pip.pth"
printf '#!/bin/bash\\nwhile [ "$1" != --output ]; do shift; done\\ntouch "$2"\\n' \\
  > "$2/bin/conda-pack"
chmod +x "$2/bin/conda-pack"
""",
    # a module's Python: environments made with it see the module's torch
    "python3": """{python} "$@" --without-pip || exit
printf '%s\\n' "$MODULE" "$PIP" > "$(echo "${{@: -1}}"/lib/python*/site-packages)/module.pth"
""",
}


def lock_of(name: str) -> dict[str, str]:
    lines = [
        line
        for line in (FOLDER / name / "requirements.lock").read_text().splitlines()
        if line[:1] != "#"
    ]
    pairs = [re.fullmatch(r"([A-Za-z0-9_.-]+)==([^ ;]+)", line).groups() for line in lines]
    assert len({canonicalize_name(package) for package, _ in pairs}) == len(pairs)
    return {canonicalize_name(package): version for package, version in pairs}


# Locks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHIPPED)
def test_a_sites_lock_satisfies_pyproject_and_has_the_torch_of_the_profile(name):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    locked, build = lock_of(name), site(name).build
    for line in [*project["dependencies"], *extras["data"], *extras["eval"]]:
        need = Requirement(line)
        assert need.specifier.contains(locked[canonicalize_name(need.name)]), need
    assert locked["torch"] == build.torch
    assert build.python in (FOLDER / name / "requirements.lock").read_text().split("\n")[0]
    assert not {"mpich", "pytest"} & set(locked), (
        "the site has an MPI, and nobody runs the tests there"
    )
    assert not any(package.startswith(("nvidia", "triton", "cuda")) for package in locked), (
        "torch brings its own"
    )
    assert "setuptools" in locked, "aiscale is built with it"


# Pages -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHIPPED)
def test_a_sites_page_agrees_with_its_profile_about_jobs(name):
    text, rules = (FOLDER / name / "README.md").read_text(), site(name).scheduler
    rows = re.findall(r"^\| `(\w+)` \| *(\d*) *\| ([\d.]+) \|", text, re.M)
    told = [(place, int(nodes or 0), float(hours)) for place, nodes, hours in rows]
    known = [
        (name, at.max_nodes, at.max_hours)
        for name, queue in rules.partitions.items()
        for at in queue.limits
    ]
    known += [
        (name, qos.max_nodes, qos.max_hours) for name, qos in rules.qos.items() if qos.max_hours
    ]
    assert sorted(told) == sorted(known)


@pytest.mark.parametrize("name", SHIPPED)
def test_commands_files_and_versions_on_a_sites_page_exist(name):
    text = (FOLDER / name / "README.md").read_text()
    commands = re.findall(r"`(?:\w+=\w+ )?aiscale ([^`\n]+)`", text)
    assert len(commands) >= 2
    for command in commands:
        words = shlex.split(command)
        _parser(words[0]).parse_args(words)
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert (FOLDER / name / link).exists(), link
    for file in re.findall(r"`((?:src|scripts|launchers)/[\w./]+)", text):
        assert (ROOT / file).exists(), file
    profile = (ROOT / f"src/aiscale/site/profiles/{name}.toml").read_text()
    for image in re.findall(r"nersc/pytorch:[\d.]+|(?:pytorch|rocm|cpe)/\d[\d.]*\d", text):
        assert image in profile, f"{image} is not what the launchers load"


@pytest.mark.parametrize("name", SHIPPED)
def test_a_sites_page_explains_what_its_launchers_set(name):
    page, files = (FOLDER / name / "README.md").read_text(), render_all(site(name)).values()
    text = "".join(line for file in files if "#SBATCH" in file for line in file.splitlines(True))
    set_here = set(
        re.findall(
            r"\b(?:NCCL|FI|MIOPEN|TRITON|TORCH|MPICH|HDF5|CUDA|OMP|PYTHON)_?[A-Z_]+(?==)", text
        )
    )
    set_here |= {
        line.split()[1].partition("=")[0]
        for line in text.splitlines()
        if line.startswith("#SBATCH")
    }
    words = "account time job-name output nodes ntasks-per-node gpus-per-node partition".split()
    obvious = {f"--{word}" for word in words}
    unsaid = [
        word for word in set_here - obvious if f"{word}=" not in page and f"`{word}`" not in page
    ]
    assert sorted(unsaid) == []


# The script --------------------------------------------------------------------------------------


def wheel(folder: Path, name: str, version: str, code: str, needs: str = "") -> None:
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}/__init__.py", code)
        file.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}"
        )
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")


def installed_as_wheel(folder: Path, name: str) -> None:
    found = distribution(name)
    with zipfile.ZipFile(folder / f"{name}-{found.version}-py3-none-any.whl", "w") as file:
        for path in found.files:
            if ".." not in path.parts and path.suffix != ".pyc" and path.locate().exists():
                file.write(path.locate(), str(path))


def mpi4py_source(folder: Path) -> None:
    """Write an mpi4py source package that records the compiler it was built with."""
    setup = (
        "import os, setuptools\nos.makedirs('mpi4py', exist_ok=True)\n"
        "open('mpi4py/__init__.py', 'w').write('mpicc = ' + repr(os.environ['MPICC']))\n"
        "setuptools.setup(name='mpi4py', version='4.1.2', packages=['mpi4py'])\n"
    )
    made = folder / "mpi4py-4.1.2"
    made.mkdir()
    (made / "setup.py").write_text(setup)
    (made / "pyproject.toml").write_text('[build-system]\nrequires = ["setuptools"]\n')
    (made / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: mpi4py\nVersion: 4.1.2\n")
    with tarfile.open(folder / "mpi4py-4.1.2.tar.gz", "w:gz") as file:
        file.add(made, made.name)
    shutil.rmtree(made)


def index(folder: Path) -> str:
    """Make a package index of a folder's files; returns its address."""
    for path in [path for path in folder.iterdir() if path.is_file()]:
        project = folder / canonicalize_name(path.name.partition("-")[0])
        project.mkdir()
        path.rename(project / path.name)
        (project / "index.html").write_text(
            f'<a href="{path.name.replace("+", "%2B")}">{path.name}</a>'
        )
    return folder.as_uri()


class Login:
    """A login node of a site, with a minimal checkout."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.calls_file = folder, folder / "calls"
        here = folder / "checkout/launchers" / name
        for made in (
            here,
            folder / "programs",
            folder / "checkout/src/aiscale",
            folder / "rocm",
            folder / "plain",
        ):
            made.mkdir(parents=True)
        for program, text in STUBS.items():
            path = folder / "programs" / program
            path.write_text("#!/bin/bash\n" + text.format(python=shlex.quote(sys.executable)))
            path.chmod(0o755)
        text = (FOLDER / name / BUILD).read_text()
        assert f" = {site(name).build.python} ]" in text
        (here / BUILD).write_text(text.replace(site(name).build.python, PYTHON))
        (here / "requirements.lock").write_text(
            f"# for tests\nalpha==1.0\nmpi4py==4.1.2\nsetuptools=={SETUPTOOLS}\n"
            f"torch=={site(name).build.torch}\n"
        )
        self.script = here / BUILD
        # Environments see this Python's pip, ten times faster than installing a pip in each.
        (folder / "pip").mkdir()
        (folder / "pip/pip").symlink_to(distribution("pip").locate_file("pip"))
        self.checkout()
        wheel(folder / "rocm", "companion", "1.0", "")
        torch = 'class version:\n    hip, cuda = "7.1", None\n__version__ = "2.10.0+rocm7.1"\n'
        wheel(folder / "rocm", "torch", "2.10.0+rocm7.1", torch, "Requires-Dist: companion\n")
        wheel(folder / "plain", "alpha", "1.0", "")
        installed_as_wheel(folder / "plain", "setuptools")
        mpi4py_source(folder / "plain")
        self.rocm, self.plain = index(folder / "rocm"), index(folder / "plain")

    def checkout(self) -> None:
        root = self.folder / "checkout"
        (root / "pyproject.toml").write_text(
            '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
            '[project]\nname = "aiscale"\nversion = "0"\n'
            '[tool.setuptools.packages.find]\nwhere = ["src"]\n'
        )
        for name in ("README.md", "LICENSE", "src/aiscale/__init__.py"):
            (root / name).write_text("")

    def build(self, *words: object, index: str = "http://127.0.0.1:9/simple", **env: str):
        known = {
            "PATH": f"{self.folder}/programs:/usr/bin:/bin",
            "HOME": str(self.folder),
            "CALLS": str(self.calls_file),
        }
        known |= {
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": index,
            "PIP_RETRIES": "0",
            "TMPDIR": str(self.folder),
        }
        known |= {"PIP": str(self.folder / "pip")}
        known |= {
            "LD_LIBRARY_PATH": "/lib",
            "CRAY_LD_LIBRARY_PATH": "/cray",
            "MODULE": str(self.folder / "module"),
        }
        command = ["bash", str(self.script), *map(str, words)]
        return subprocess.run(
            command, env=known | env, cwd=self.folder, capture_output=True, text=True, timeout=250
        )

    def calls(self) -> str:
        return self.calls_file.read_text()


def says(prefix: Path, expression: str) -> str:
    code = f"import alpha, aiscale, mpi4py, torch; print({expression})"
    env = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run(
        [prefix / "bin/python", "-c", code], env=env, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_frontiers_environment_is_fetched_with_a_network_and_built_without_one(tmp_path):
    place = tmp_path / "my class"  # whose path has a space
    login, wheels, prefix = Login(place, "frontier"), place / "wheels", place / "class/env"
    done = login.build("--download", wheels, "--torch-index", login.rocm, index=login.plain)
    assert done.returncode == 0, done.stderr
    assert {path.name.partition("-")[0] for path in wheels.glob("*.whl")} == {
        *("alpha", "companion", "mpi4py", "setuptools", "torch")
    }
    assert f"[{wheels}/conda]" in login.calls() and "done: 5 wheels" in done.stderr
    assert shlex.split(done.stderr.splitlines()[-1])[-3:] == ["--wheelhouse", str(wheels), "PREFIX"]

    prefix.mkdir(parents=True)  # as an interrupted run would leave it
    (prefix / "half").touch()
    Path(f"{prefix}.unfinished").touch()
    done = login.build("--wheelhouse", wheels, "--pack", prefix)
    assert done.returncode == 0, done.stderr
    assert "--offline" in login.calls().splitlines()[-3] and "unload rocm" in login.calls()
    assert says(prefix, "torch.version.hip") == "7.1"
    assert says(prefix, "mpi4py.mpicc") == "cc -shared", "against the site's MPI"
    assert says(prefix, "aiscale.__file__").startswith(str(prefix)), (
        "not editable: the checkout may change"
    )
    assert not any((place / name).exists() for name in (".cache", ".conda")), (
        "the home directory's quota is small"
    )
    assert not (prefix / "half").exists() and not Path(f"{prefix}.unfinished").exists()
    assert "torch==2.10.0+rocm7.1" in (prefix / "aiscale-environment.txt").read_text()
    packed = Path(f"{prefix}.tar.gz")
    for path in (prefix, packed, *prefix.rglob("*")):
        if not path.is_symlink():
            assert not path.stat().st_mode & 0o222 and path.stat().st_mode & 0o044 == 0o044, path
    assert shlex.split(done.stderr.splitlines()[-1])[-2:] == [
        "export",
        f"AISCALE_ENVIRONMENT={packed}",
    ]


@pytest.mark.parametrize(
    ("words", "env", "told"),
    [
        ((), {}, "Name a folder: build_environment.sh PREFIX"),
        (
            ("--wheelhouse", ".", "env"),
            {},
            "there are no wheels in .: fill it where there is a network, by --download",
        ),
        (
            ("env",),
            {"AISCALE_SOURCE": "/nowhere"},
            "/nowhere is no checkout of aiscale: name yours in AISCALE_SOURCE",
        ),
    ],
)
def test_an_impossible_environment_is_refused_in_one_line(words, env, told, tmp_path):
    shutil.copytree(FOLDER / "frontier", tmp_path / "launchers/frontier")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    script = tmp_path / "launchers/frontier" / BUILD
    done = subprocess.run(
        ["bash", script, *words], env=os.environ | env, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1 and told in done.stderr and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "env").exists()
