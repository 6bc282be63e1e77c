"""The package's wings match CONTRIBUTING's table, and a wing imports only from wings above it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "aiscale"
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


def section(heading: str) -> str:
    return CONTRIBUTING.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def first_cells(table: str, column: int = 0) -> list[str]:
    rows = [
        [cell.strip() for cell in line.strip("| ").split("|")]
        for line in table.splitlines()
        if line[:1] == "|"
    ]
    return [row[column] for row in rows[2:]]


#: From top to bottom; the files of the floor first.
TABLE = section("The wings")
FLOOR = re.findall(r"`(\w+)\.py`", first_cells(TABLE, 2)[0])
WINGS = [re.match(r"`(\w+)", cell)[1] for cell in first_cells(TABLE)[1:]]
FILES = sorted(PACKAGE.rglob("*.py"))


def module(file: Path) -> str:
    return ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(
        ".__init__"
    )


def wing(name: str) -> str:
    """Of a dotted name; "" for the package itself."""
    return (name.split(".") + [""])[1]


def place(name: str) -> int:
    """A wing's place in the table: all files of the floor have the first one."""
    return 0 if wing(name) in FLOOR else 1 + WINGS.index(wing(name))


def imported(file: Path) -> set[str]:
    """Dotted names of our modules that a file imports, except for type checking only."""
    found, tree = set(), ast.parse(file.read_text())
    tree.body = [
        node
        for node in tree.body
        if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: imports are absolute"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in names}
    return {name for name in found if name.split(".")[0] == "aiscale"}


MODULES = {module(file) for file in FILES}


def test_the_table_names_every_wing_and_no_other():
    there = {
        entry.stem
        for entry in PACKAGE.iterdir()
        if entry.suffix == ".py" or (entry / "__init__.py").exists()
    }
    assert there - {"__init__", "__main__"} == {*FLOOR, *WINGS}


def test_the_rooms_that_the_table_names_exist():
    for name, cell in zip(WINGS, first_cells(TABLE, 2)[1:], strict=True):
        for room in re.findall(r"`([\w/.]+)`", cell):
            if room.endswith(("/", ".py")):
                assert (PACKAGE / name / room).exists(), f"{name}: {room}"


@pytest.mark.parametrize("name", WINGS)
def test_a_wing_imports_only_wings_above_it(name):
    wrong = []
    for file in FILES:
        if wing(module(file)) == name:
            for other in imported(file):
                if wing(other) and place(other) > place(module(file)):
                    wrong.append(f"{module(file)} imports {other}")
    assert wrong == []


def test_the_floor_imports_no_wing():
    for file in FILES:
        if wing(module(file)) in FLOOR:
            assert {wing(other) for other in imported(file) if wing(other)} <= {*FLOOR}, file


def test_there_are_no_circular_imports():
    arrows = {module(file): imported(file) & MODULES - {module(file)} for file in FILES}
    state: dict[str, str] = {}

    def visit(name: str, path: list[str]) -> None:
        assert state.get(name) != "open", (
            f"a circle: {' -> '.join([*path[path.index(name) :], name])}"
        )
        if name not in state:
            state[name] = "open"
            for other in sorted(arrows[name]):
                visit(other, [*path, name])
            state[name] = "done"

    for name in sorted(arrows):
        visit(name, [])


def test_the_plan_does_not_import_torch():
    for file in FILES:
        if wing(module(file)) == "plan":
            assert not re.search(r"^\s*(import|from) torch\b", file.read_text(), re.M), file


@pytest.mark.parametrize("cell", first_cells(section("Where common changes are made"), 1))
def test_the_files_that_typical_changes_touch_exist(cell):
    for name in re.findall(r"`([\w/.]+)`", cell):
        assert (PACKAGE / name).exists(), name
