"""The README and the pages that it sends to are true: commands, links and its table."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from aiscale import lesson
from aiscale.cli import _parser, names_a_script
from aiscale.measure.referee import command as referee
from aiscale.train.command import TRAINERS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = {
    name: (ROOT / name).read_text() for name in ("README.md", "COMMANDS.md", "scripts/README.md")
}
ALL = "\n".join(PAGES.values())
#: Commands in backticks and in code blocks.
COMMANDS = sorted(
    set(re.findall(r"`((?:make|aiscale) [^`\n]+)`", ALL))
    | set(
        re.findall(
            r"^((?:make|aiscale) .+)$",
            "\n".join(re.findall(r"^```.*?\n(.*?)^```", ALL, re.M | re.S)),
            re.M,
        )
    )
)


def section(heading: str) -> str:
    return README.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def test_commands_parse():
    commands = [command for command in COMMANDS if command.startswith("aiscale")]
    assert len(commands) > 20
    for command in commands:
        words = shlex.split(command)[1:]
        if words[0] == "verify" and names_a_script(words[1:]):
            assert referee.parse(words[1:])
            continue
        if words[0] == "train" and words[1:]:
            assert words[1] in TRAINERS
            continue
        try:
            _parser(words[0]).parse_args(words)
        except SystemExit:
            pytest.fail(command)


def test_make_has_the_targets_and_variables():
    makefile = (ROOT / "Makefile").read_text()
    commands = [command for command in COMMANDS if command.startswith("make")]
    assert len(commands) > 10
    for command in commands:
        for word in shlex.split(command)[1:]:
            name, equals, _ = word.partition("=")
            found = name in makefile if equals else re.search(rf"^{name}:", makefile, re.M)
            assert found, f"{command}: the Makefile has no {name}"


def test_the_files_that_make_check_runs_exist():
    units = re.search(r"^UNITS := ((?:.*\\\n)*.*)$", (ROOT / "Makefile").read_text(), re.M)[1]
    names = units.replace("\\\n", " ").split()
    assert len(names) > 10
    assert [name for name in names if not (ROOT / f"tests/test_{name}.py").is_file()] == []


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page):
    links, folder = re.findall(r"\]\(([^)#]+)", PAGES[page]), (ROOT / page).parent
    assert [
        link for link in links if not link.startswith("http") and not (folder / link).exists()
    ] == []


def test_every_command_is_shown_by_an_example():
    from aiscale.cli import commands

    shown = {shlex.split(command)[1] for command in COMMANDS if command.startswith("aiscale ")}
    assert set(commands()) - shown == set()


def test_the_table_of_notebooks_matches_their_headers():
    rows = [
        [cell.strip() for cell in line.strip("| ").split("|")]
        for line in section("Notebooks").splitlines()
    ]
    table = {
        re.sub(r"\[(.*?)\].*", r"\1", row[0]): row[-3:]
        for row in rows
        if len(row) >= 4 and row[0] != "notebook"
    }
    table = {name: row for name, row in table.items() if not set(name) <= set("-: ")}
    headers = {
        notebook.name: [
            str(notebook.header.minutes),
            str(notebook.header.ranks),
            notebook.header.hardware,
        ]
        for notebook in lesson.notebooks(root=ROOT / "notebooks")
    }
    assert table == headers
