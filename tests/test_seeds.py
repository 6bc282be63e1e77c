"""tests/seeds.csv says where each part of the documents behind this kit lives: places that exist.

A seed is one of five documents, or the card:

    000   Radius: artifact appendix (MLSys 2025)
    001   AI for Science at Scale, part 2: slides of OLCF
    002   AI Computing Systems for Large Language Models Training: supplement (Zhang et al. 2025)
    003   Technical Report 3 of the Alan Turing Institute
    004   Distributed GPT2 Model Project: slides (CS455)
    card  what the kit is to have: libraries, folders, launchers

The state of a part:

    real    it runs here, or is computed here
    small   there, but too little of it to show what the document shows
    shown   named, drawn or quoted only
    absent  not here, so it has no place
"""

from __future__ import annotations

import ast
import csv
import json
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from aiscale.cli import commands

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests/seeds.csv"
SEEDS = ("000", "001", "002", "003", "004", "card")
STATES = ("real", "small", "shown", "absent")
COMMANDS = commands()
LEAST_REAL = 232  #: raise it with the number of real parts


def read_rows() -> list[dict[str, str]]:
    with TABLE.open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


# Does a place exist? -----------------------------------------------------------------------------


def has_file(where: str) -> bool:
    return (ROOT / where).is_file()


def has_launcher(where: str) -> bool:
    return Path(where).match("launchers/*/*.sbatch") and has_file(where)


def has_command(where: str) -> bool:
    return where in {f"aiscale {name}" for name in COMMANDS}


def has_cell(where: str) -> bool:
    """NOTEBOOK#ID: a cell's id stays when cells before it come or go, its number does not."""
    path, _, cell_id = where.partition("#")
    return has_file(path) and path.endswith(".ipynb") and cell_id in ids_of_cells(path)


def has_test(where: str) -> bool:
    path, _, name = where.partition("::")
    return has_file(path) and path.endswith(".py") and name in names_of_tests(path)


@cache
def ids_of_cells(path: str) -> set[str]:
    notebook = json.loads((ROOT / path).read_text(encoding="utf-8"))
    return {cell["id"] for cell in notebook["cells"]}


@cache
def names_of_tests(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {name for name in functions if name.startswith("test_")}


EXISTS = {
    "cell": has_cell,
    "command": has_command,
    "test": has_test,
    "file": has_file,
    "launcher": has_launcher,
}


# The table ---------------------------------------------------------------------------------------


def fault(row: dict[str, str]) -> str:
    """What is wrong with a row, or nothing."""
    kind, where = row["kind"], row["where"]
    if row["seed"] not in SEEDS:
        return f"seed {row['seed']} is none of {', '.join(SEEDS)}"
    if row["state"] not in STATES:
        return f"state {row['state']} is none of {', '.join(STATES)}"
    if row["state"] == "absent":
        return f"it is absent, but lives in {kind} {where}: empty both" if kind or where else ""
    if not where:
        return f"it is {row['state']}, but nowhere: say where it lives, or call it absent"
    if kind not in EXISTS:
        return f"kind {kind} is none of {', '.join(EXISTS)}"
    if not EXISTS[kind](where):
        return f"there is no {kind} {where}: write its new place, or another state"
    return ""


def faults(rows: list[dict[str, str]]) -> list[str]:
    """What is wrong with the table, a line each."""
    found = [f"{row['seed']}, {row['part']}: {wrong}" for row in rows if (wrong := fault(row))]
    times = Counter((row["seed"], row["part"]) for row in rows)
    found += [f"{seed}, {part}: it has {n} rows" for (seed, part), n in times.items() if n > 1]
    n_real = sum(row["state"] == "real" for row in rows)
    if n_real < LEAST_REAL:
        found.append(f"{n_real} parts are real, but {LEAST_REAL} were: none may get lost")
    return found


def test_each_part_lives_where_the_table_says_and_none_that_was_real_is_lost():
    assert faults(read_rows()) == []


CELL = "notebooks/03_ddp.ipynb#e75e9388"
WRONG = {
    "no such cell": ("000", "real", "cell", "notebooks/03_ddp.ipynb#0"),
    "a cell by its number": ("000", "real", "cell", "notebooks/03_ddp.ipynb#11"),
    "no such notebook": ("000", "real", "cell", "notebooks/03_dpp.ipynb#e75e9388"),
    "no such test": ("001", "real", "test", "tests/test_seeds.py::test_nothing"),
    "a function that is no test": ("001", "real", "test", "tests/test_seeds.py::read_rows"),
    "no such file of tests": ("001", "real", "test", "tests/test_nothing.py::test_nothing"),
    "no such command": ("002", "shown", "command", "aiscale teach"),
    "a command without the program": ("002", "shown", "command", "compare"),
    "no such file": ("003", "small", "file", "workshop/from_scratch/nothing.py"),
    "a folder": ("003", "small", "file", "workshop/from_scratch"),
    "no such launcher": ("004", "real", "launcher", "launchers/frontier/nothing.sbatch"),
    "a file that is no launcher": ("004", "real", "launcher", "launchers/frontier/README.md"),
    "no such kind": ("card", "real", "page", "README.md"),
    "the kind of another place": ("card", "real", "file", CELL),
    "no such state": ("000", "partly", "cell", CELL),
    "no such seed": ("005", "real", "cell", CELL),
    "nowhere": ("000", "shown", "cell", ""),
    "absent, but somewhere": ("000", "absent", "cell", CELL),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_row_is_found(name):
    seed, state, kind, where = WRONG[name]
    row = {"seed": seed, "part": name, "state": state, "kind": kind, "where": where}
    (found,) = faults([*read_rows(), row])
    assert found.startswith(f"{seed}, {name}: ")


def test_a_repeated_row_and_a_lost_part_are_found():
    rows = read_rows()
    real = [row for row in rows if row["state"] == "real"]
    (found,) = faults([*rows, real[0]])
    assert found == f"{real[0]['seed']}, {real[0]['part']}: it has 2 rows"
    (found,) = faults(real[1:LEAST_REAL])
    assert found == f"{LEAST_REAL - 1} parts are real, but {LEAST_REAL} were: none may get lost"
