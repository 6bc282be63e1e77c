"""A folder's name may have a space: no shell line splits it there, and the first lessons run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = [*ROOT.glob("notebooks/**/*.ipynb"), *ROOT.glob("workshop/**/*.ipynb")]
#: A cell of shell; a line that a shell splits into words, or IPython does.
#: (%%write and %%change split before they fill in names.)
SHELL_CELL = re.compile(r"%%(bash|sh|script|sx|!)")
SHELL_LINE = re.compile(r"\s*(\w+ = )?(!|%%?(writefile|cd|run|sx|system)\b)")
NUMBERS = {"n_steps", "n_ranks", "stage", "density", "interval", "tp", "pp", "ep", "balance"}


def unquoted(text: str) -> set[str]:
    """Names that are filled in outside of double quotes, where a space would split their values.

    Single quotes do not count: `sh -c 'python {folder}/train.py'` starts a shell that splits.
    """
    bare = re.sub(r'"[^"]*"|\{\{\w.*?\}\}', "", text.replace("$$", ""))  # {{N}} is {N}, unfilled
    return set(re.findall(r"[{$](\w+)", bare))


def split_paths(code: str) -> list[str]:
    """Lines of a cell in which a shell, or IPython, would split a path."""
    safe = set(NUMBERS)
    for name, is_filled, text in re.findall(r'^(\w+) = (f?)"(.*)"$', code, re.M):
        if unquoted(text if is_filled else text.replace("{", "")) <= NUMBERS:  # words of a command
            safe.add(name)
    wrong = []
    for line in code.replace("\\\n", " ").splitlines():
        if SHELL_LINE.match(line) or SHELL_CELL.match(code):
            if not unquoted(line) <= safe:
                wrong.append(line)
        elif "os.system(" in line or "shell=True" in line:
            wrong.append(line)
    return wrong


@pytest.mark.parametrize(
    "line",
    [
        "!rm -rf {folder}/alone",
        'alone = !python {folder}/train.py --save "{folder}/alone"',
        "!cd $folder && rm -rf alone",
        "twice = !mpiexec -n 2 sh -c 'python {folder}/train.py'",
        'run = f"python {folder}/train.py"\nfull = !{run} --density 1',
        "%%writefile {script}",
        "%%bash\nrm -rf $HOME/alone",
        "one = !torchrun --nproc-per-node=1 \\\n    {folder}/train.py",
        'os.system(f"rm -rf {folder}")',
    ],
)
def test_a_path_without_quotes_is_found(line):
    assert split_paths(line)


def test_no_shell_line_of_a_notebook_has_a_path_without_quotes():
    lines = []
    for path in NOTEBOOKS:
        cells = nbformat.read(path, as_version=4).cells
        code = [cell.source for cell in cells if cell.cell_type == "code"]
        lines += [f"{path.name}: {line}" for source in code for line in split_paths(source)]
    assert lines == []


def test_no_program_gives_a_shell_a_string_to_split():
    for folder in ("src", "launchers", "workshop", "benchmarks", "notebooks"):
        for path in (ROOT / folder).rglob("*.py"):
            assert not re.search(r"os\.system\(|shell=True", path.read_text()), path


def test_no_recipe_of_the_makefile_has_a_path_without_quotes():
    for line in (ROOT / "Makefile").read_text().splitlines():
        bare = re.sub(r"\"[^\"]*\"|'[^']*'", "", line)
        found = re.findall(r"\$\((?:CURDIR|PWD|abspath|realpath)\b|\$\$\{?[a-z]\w*", bare)
        assert set(found) <= {"$$status", "$$run"}, line  # numbers


def test_no_script_of_a_test_names_its_python_without_quotes():
    unquoted_python = re.compile(
        r"\{sys\.executable\}|(\.format\(|\.replace\().*[=,] ?sys\.executable\)"
    )
    for path in (ROOT / "tests").glob("**/*.py"):
        assert not unquoted_python.search(path.read_text()), path


@pytest.mark.extended
@pytest.mark.notebook
@pytest.mark.timeout(2900)
def test_the_first_lessons_run_in_a_checkout_whose_path_has_spaces(tmp_path):
    """Lessons, package, Python and the participant's scripts all have paths with a space."""
    checkout = tmp_path / "my work" / "ai scale"
    checkout.mkdir(parents=True)
    for name in ("notebooks", "src", "workshop"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    (checkout / ".venv").symlink_to(sys.prefix)
    python = checkout / ".venv/bin" / Path(sys.executable).name
    command = [python, "-m", "aiscale", "notebooks", "--core", "01", "02", "03"]
    env = os.environ | {"PYTHONPATH": str(checkout / "src")}
    options = {"cwd": checkout, "env": env, "capture_output": True, "text": True}
    done = subprocess.run(command, timeout=2800, **options)
    assert done.returncode == 0, done.stderr
    assert "3 of 3 notebooks passed" in done.stdout
