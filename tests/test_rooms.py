"""The package's rooms match CONTRIBUTING's table, and a room imports only from rooms above it."""

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


#: From top to bottom.
ROOMS = [re.match(r"`(\w+)", cell)[1] for cell in first_cells(section("The rooms"))]
FILES = sorted(PACKAGE.rglob("*.py"))


def module(file: Path) -> str:
    return ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(
        ".__init__"
    )


def room(name: str) -> str | None:
    return (name.split(".") + [None])[1]


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


def test_the_table_names_every_room_and_no_other():
    there = {
        entry.stem
        for entry in PACKAGE.iterdir()
        if entry.suffix == ".py" or (entry / "__init__.py").exists()
    }
    assert there - {"__init__", "__main__"} == set(ROOMS)


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_imports_only_rooms_above_it(name):
    wrong = []
    for file in FILES:
        if room(module(file)) == name:
            for other in imported(file):
                if room(other) and ROOMS.index(room(other)) > ROOMS.index(name):
                    wrong.append(f"{module(file)} imports {other}")
    assert wrong == []


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


@pytest.mark.parametrize("name", ["config", "recipes", "machines", "cost", "published", "plan"])
def test_torch_free_rooms_do_not_import_torch(name):
    for file in FILES:
        if room(module(file)) == name:
            assert not re.search(r"^\s*(import|from) torch\b", file.read_text(), re.M), file


@pytest.mark.parametrize("cell", first_cells(section("Where common changes are made"), 1))
def test_the_files_that_typical_changes_touch_exist(cell):
    for name in re.findall(r"`([\w/.]+)`", cell):
        assert (PACKAGE / name).exists(), name
