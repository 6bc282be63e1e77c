"""Every notebook has the form of CONTRIBUTING.md, takes its stated minutes, and runs headless."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import nbformat
import pytest

from aiscale import lesson
from aiscale.lesson.notebook import tags
from aiscale.lesson.workbooks import find
from answers import ANSWERS, given_away, predictions, told_beside, wrong_answers

ROOT = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = {notebook.name: notebook for notebook in lesson.notebooks(root=ROOT)}
LESSONS = [name for name, notebook in NOTEBOOKS.items() if not notebook.is_appendix]
KERNEL = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
DRAWS = re.compile(r"\b(plots|plt)\.(?!use_style|close|format_|set_loglevel)\w+\(")
ON_RANKS = ["rank", "world_size", "world", "torch", "dist"]
SCRIPT = re.compile(r"%%(write|change) ")  #: workshop/your_own has what they make


@pytest.fixture(params=NOTEBOOKS)
def notebook(request):
    return NOTEBOOKS[request.param]


@pytest.fixture
def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_the_first_cell_says_what_a_reader_needs_to_know(notebook):
    header, text = notebook.header, notebook.cells[0].source
    assert notebook.name.startswith(f"{header.number}_")
    assert header.needs == "nothing" or list(ROOT.rglob(f"{header.needs}.ipynb"))
    for heading in ("Questions", "You will be able to"):
        assert "- " in text.partition(f"## {heading}\n")[2].partition("\n##")[0], heading
    covers = [cell for cell in notebook.cells if "cover" in tags(cell)]
    assert len(covers) == 1, "one cell has the picture that the site's card shows"


def test_all_are_committed_without_outputs_and_editors_metadata():
    for name, notebook in NOTEBOOKS.items():
        content = json.loads(notebook.path.read_text())
        assert content["metadata"] == KERNEL | {"language_info": {"name": "python"}}, name
        for cell in content["cells"]:
            assert set(cell["metadata"]) <= {"tags"} and "id" in cell, (name, cell)
            is_clean = not cell.get("outputs") and cell.get("execution_count") is None
            assert is_clean, f"{name}: nbstripout"


def test_an_optional_section_is_optional_as_a_whole_and_the_core_path_does_not_need_it(notebook):
    level = 0
    for cell in notebook.cells:
        heading = re.match(r"(#+) .*", cell.source) if cell.cell_type == "markdown" else None
        if heading and (not level or len(heading[1]) <= level):
            level = len(heading[1]) if heading[0].endswith("(optional)") else 0
        assert ("optional" in tags(cell)) == bool(level), cell.source
    core = [cell for cell in notebook.content.cells if "optional" not in tags(cell)]
    assert problems(notebook, core, "F821") == []


def test_ranks_stop_before_torchrun_starts_others(notebook, code):
    """Else a participant holds both: 1.3 GB more in lesson 03."""
    running = False
    for cell in code:
        if not re.match(r"%%(write|change|fill) ", cell.source):
            running = running and not re.search(r"^(ranks|cluster)\.stop\(\)", cell.source, re.M)
            assert not (running and re.search(r'\btorchrun[ "]', cell.source)), cell.source
            running = running or "cluster.start(" in cell.source


def test_ruff_finds_no_fault_in_its_code(notebook):
    assert problems(notebook, notebook.content.cells, "E,F,I,UP,B,W") == []


def problems(notebook, cells, rules: str) -> list[str]:
    """What ruff says of the cells, those of ranks included, which it would skip for `%%px`."""
    shown = copy.deepcopy(notebook.content)
    shown.cells = copy.deepcopy(cells)
    for cell in shown.cells:
        if cell.cell_type == "code":
            cell.source = (
                "" if SCRIPT.match(cell.source) else re.sub(r"^%", "# %", cell.source, flags=re.M)
            )
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--isolated",
        "--target-version=py311",
        "--line-length=120",
    ]
    command += [
        f"--select={rules}",
        f"--config=builtins = {json.dumps(ON_RANKS)}",
        "--output-format=concise",
    ]
    command += ["--quiet", f"--stdin-filename={notebook.path.name}", "-"]
    return subprocess.run(
        command, input=nbformat.writes(shown), capture_output=True, text=True
    ).stdout.splitlines()


def minutes_of(name):
    """Minutes of a core path, by every word and line."""
    core = [cell for cell in NOTEBOOKS[name].cells if "optional" not in tags(cell)]
    prose = "\n".join(cell.source for cell in core if cell.cell_type == "markdown")
    code = "\n".join(cell.source for cell in core if cell.cell_type == "code")
    text = re.sub(
        r"```.*?```|!\[[^\]]*\]\([^)]*\)|<[^>]+>|\]\([^)]*\)|https?://\S+", " ", prose, flags=re.S
    )
    words = sum(any(map(str.isalnum, word)) for word in text.split())
    lines = sum(bool(line.strip()) for line in code.splitlines())
    exercises = set(re.findall(r'(?:NotImplementedError|check)\("([\w.]+)"', code))
    written = sum(find(id)[1].minutes for id in exercises)
    figures = sum(bool(DRAWS.search(cell.source)) for cell in core) + prose.count("![")
    predictions = len(re.findall(r"(?<![.\w])predict\(", code))
    return words / 130 + lines / 6 + 2 * predictions + written + figures + 45 / 60


@pytest.mark.parametrize("name", LESSONS)
def test_the_core_path_takes_the_minutes_that_the_header_says(name):
    stated = NOTEBOOKS[name].header.minutes
    assert round(minutes_of(name)) <= stated <= 70, "delete, or make a section optional"


@pytest.mark.parametrize("name", LESSONS)
def test_each_prediction_of_a_lesson_has_its_answer_in_the_table(name):
    """But for grids. An f-string's name is a pattern."""
    asked, core = set(), set()
    for cell in NOTEBOOKS[name].cells:
        for said, options in predictions(cell):
            if "rows" not in options:
                asked.add(said)
                if "optional" not in tags(cell):
                    core.add(said)
    table = ANSWERS[name]
    assert [said for said in core if not any(fnmatchcase(known, said) for known in table)] == [], (
        "not in answers.toml"
    )
    assert [
        known for known in table if not any(fnmatchcase(known, said) for said in asked)
    ] == [], "asked nowhere"


@pytest.mark.parametrize("name", LESSONS)
def test_no_heading_and_no_comment_answers_a_prediction_of_its_section(name):
    assert told_beside(NOTEBOOKS[name].content, name) == []


@pytest.fixture(scope="session")
def build(tmp_path_factory):
    return tmp_path_factory.mktemp("build")


#: The fast tests run the core paths of the first lessons; .ci/run those of all, the extended tests
#: all whole.
RUNS = [
    pytest.param(name, True, id=f"{name}-core", marks=[pytest.mark.extended] * (name > "06"))
    for name in LESSONS
] + [pytest.param(name, False, id=name, marks=pytest.mark.extended) for name in NOTEBOOKS]


@pytest.mark.notebook
@pytest.mark.parametrize(("name", "core"), RUNS)
def test_notebook_runs(name, core, build):
    (result,) = lesson.execute([NOTEBOOKS[name]], out=build, core=core)
    assert not result.error, result.error
    content = lesson.read(result.executed)
    assert given_away(content) == [] and wrong_answers(content, name) == []
