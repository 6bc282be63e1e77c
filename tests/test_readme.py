"""The README and the pages that it sends to are true: commands parse, links, tree and table are correct."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from aiscale import lesson
from aiscale.cli import _parser

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = {name: (ROOT / name).read_text() for name in ("README.md", "COMMANDS.md", "scripts/README.md")}
ALL = "\n".join(PAGES.values())
#: Commands in backticks and in code blocks.
COMMANDS = sorted(
    set(re.findall(r"`((?:make|aiscale) [^`\n]+)`", ALL))
    | set(re.findall(r"^((?:make|aiscale) .+)$", "\n".join(re.findall(r"^```.*?\n(.*?)^```", ALL, re.M | re.S)), re.M))
)


def section(heading: str) -> str:
    return README.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("aiscale")])
def test_commands_parse(command):
    words = shlex.split(command)[1:]
    _parser(words[0]).parse_args(words)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("make")])
def test_make_has_the_targets_and_variables(command):
    makefile = (ROOT / "Makefile").read_text()
    for word in shlex.split(command)[1:]:
        name, equals, _ = word.partition("=")
        found = name in makefile if equals else re.search(rf"^{name}:", makefile, re.M)
        assert found, f"the Makefile has no {name}"


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page):
    links, folder = re.findall(r"\]\(([^)#]+)", PAGES[page]), (ROOT / page).parent
    assert [link for link in links if not link.startswith("http") and not (folder / link).exists()] == []


def test_every_command_is_shown_by_an_example():
    from aiscale.cli import commands

    shown = {shlex.split(command)[1] for command in COMMANDS if command.startswith("aiscale ")}
    assert set(commands()) - shown == set()


def test_the_tree_matches_the_repository():
    listed = {line.split()[0].rstrip("/") for line in section("Tree").splitlines() if re.match(r"\S+\s{2,}\S", line)}
    assert listed and [name for name in listed if not (ROOT / name).exists()] == []
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    folders = {path.split("/")[0] for path in tracked if "/" in path and not path.startswith(".")}
    assert folders <= {name.split("/")[0] for name in listed}


def test_the_table_of_notebooks_matches_their_headers():
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in section("Notebooks").splitlines()]
    table = {re.sub(r"\[(.*?)\].*", r"\1", row[0]): row[-3:] for row in rows if len(row) >= 4 and row[0] != "notebook"}
    table = {name: row for name, row in table.items() if not set(name) <= set("-: ")}
    headers = {
        notebook.name: [str(notebook.header.minutes), str(notebook.header.ranks), notebook.header.hardware]
        for notebook in lesson.notebooks(root=ROOT / "notebooks")
    }
    assert table == headers
