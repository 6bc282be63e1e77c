"""Finding, reading and checking notebooks, without running them. test_book_running.py runs some."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from nbformat.v4 import new_output

from aiscale import book
from aiscale.book import command as book_command
from aiscale.book.core import Pace, measure
from aiscale.book.running import Failure, Result, load_results, save_result
from aiscale.cli import main
from lessons import HEADER, code, lesson, prose, write

# finding and reading ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["03_ddp", "03", "3", "ddp"])
def test_a_notebook_is_found_by_its_name_its_number_or_its_word(shelf, name):
    assert [notebook.name for notebook in book.notebooks([name], shelf)] == ["03_ddp"]


def test_without_names_all_notebooks_come_in_reading_order(shelf):
    assert [notebook.name for notebook in book.notebooks(root=shelf)] == ["00_start", "03_ddp", "10_forge"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("03_dpp", "no notebook is called 03_dpp: did you mean 03_ddp?"),
        ("77", "no notebook is called 77: there are 00_start, 03_ddp, 10_forge"),
        ("no/such.ipynb", "there is no file no/such.ipynb"),
    ],
)
def test_a_name_that_no_notebook_has_is_refused(shelf, name, said):
    with pytest.raises(book.BookError, match=said.replace("?", r"\?")):
        book.notebooks([name], shelf)


def test_the_header_says_what_a_reader_needs_to_know(shelf):
    header = book.notebooks(["03"], shelf)[0].header
    assert (header.title, header.minutes, header.ranks, header.hardware) == ("A small lesson", 5, 2, "any laptop")
    assert header.promise == "Two numbers meet, and you will see their sum."
    assert header.needs == "nothing" and header.problems == ()


def test_a_file_that_is_no_notebook_is_refused_in_one_line(tmp_path):
    path = tmp_path / "03_bad.ipynb"
    path.write_text("{")
    with pytest.raises(book.BookError, match="03_bad.ipynb is not a notebook") as raised:
        book.read(path)
    assert "\n" not in str(raised.value)


# parameters ---------------------------------------------------------------------------------------------------------


def accept(shelf, **given):
    return book.notebooks(["03"], shelf)[0].accept(given)


def test_parameters_are_read_with_their_values_and_what_they_are(shelf):
    steps = book.notebooks(["03"], shelf)[0].parameters["steps"]
    assert (steps.default, steps.comment) == (3, "how many")


def test_text_from_the_command_line_becomes_the_parameter_s_type(shelf):
    values = accept(shelf, steps="7", lr="1", label="3", fused="false")
    assert values == {"steps": 7, "lr": 1.0, "label": "3", "fused": False}
    assert type(values["lr"]) is float


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"stepz": 1}, "03_ddp has no parameter stepz: did you mean steps?"),
        ({"steps": "many"}, "03_ddp: steps is 'many', but it must be a whole number, as 3 is"),
        ({"steps": 2.5}, "steps is 2.5, but it must be a whole number"),
        ({"steps": True}, "steps is True, but it must be a whole number"),
        ({"lr": "fast"}, "lr is 'fast', but it must be a number"),
        ({"label": 3}, "label is 3, but it must be text"),
        ({"fused": "maybe"}, "fused is 'maybe', but it must be true or false"),
    ],
)
def test_a_parameter_of_another_name_or_type_is_refused(shelf, given, said):
    with pytest.raises(book.BookError) as raised:
        accept(shelf, **given)
    assert said in str(raised.value)


def test_parameters_are_refused_before_any_notebook_starts(shelf, tmp_path):
    with pytest.raises(book.BookError, match="00_start has no parameter stepz"):
        book.run(parameters={"stepz": "1"}, root=shelf, out=tmp_path / "build")
    assert not (tmp_path / "build").exists()


# anatomy ------------------------------------------------------------------------------------------------------------


def problems(tmp_path, notebook, name="03_small") -> list[str]:
    return book.check_form(write(notebook, tmp_path / f"{name}.ipynb"))


def test_a_valid_notebook_has_no_problems(tmp_path):
    assert problems(tmp_path, lesson("%%px\nprint(rank, world_size, torch.tensor(0))")) == []


def changed(cell: int, **attributes):
    """A valid notebook with one changed cell, counted from 1."""
    made = lesson()
    for name, value in attributes.items():
        setattr(made.cells[cell - 1], name, value)
    return made


def optional(heading: str, source: str):
    """A heading and a code cell, both tagged."""
    tagged = prose(heading), code(source, "optional")
    tagged[0].metadata["tags"] = ["optional"]
    return tagged


USE = "import os\n\nfrom aiscale import {}"
LONG = "\n".join(f"print({i})" for i in range(26))
BROKEN = {
    "title": (changed(1, source=HEADER.format(number="03").replace("# 03 ·", "#")), "does not start with a title"),
    "other number": (lesson(number="04"), "the title says 04, the file's name 03"),
    "promise": (changed(1, source=HEADER.format(number="03").replace("Two numbers meet", "- Two")), "no promise"),
    "table": (changed(1, source=HEADER.format(number="03").replace("hardware", "gear")), "no table with the columns"),
    "minutes": (changed(1, source=HEADER.format(number="03").replace("| 5 |", "| some |")), "minutes is 'some'"),
    "questions": (changed(1, source=HEADER.format(number="03").replace("- Why?\n", "")), "has 1 bullets"),
    "before": (changed(1, source=HEADER.format(number="03").replace("nothing", "02_x")), "comes before is '02_x'"),
    "imports": (lesson(imports="import os\n\nx = os.getcwd()"), "the first code cell is not the imports"),
    "no parameters": (changed(4, metadata={}), "0 cells are tagged parameters"),
    "computed": (lesson(parameters="steps = os.cpu_count()  # all"), "write only `name = literal`"),
    "uncommented": (changed(4, source="steps = 3\nlr = 1.0  # a\nlabel = 'a'  # b\nfused = True  # c"), "no comment"),
    "unused": (lesson(parameters="steps = 3  # how many"), "parameter steps is not used"),
    "long cell": (lesson(LONG), "has 26 lines: at most 25"),
    "long median": (lesson(*["\n".join(["print(1)"] * 11)] * 5), "half of the code cells have over"),
    "two code cells": (lesson(code("a = 1"), code("print(a)"), prose()), "cells 8 and 9 are both code"),
    "unread figure": (lesson(code("plots.curve([1])"), prose("## Next"), imports=USE.format("plots")),
                      "draws, but the figure is not read"),
    "ranks go on": (lesson("ranks = cluster.start(2)", imports=USE.format("cluster")),
                    "starts ranks, which no later cell stops"),
    "nameless ranks": (lesson("cluster.start(2)", imports=USE.format("cluster")),
                       "starts ranks without a name"),
    "no exercises": (changed(9, source="## Last words"), "the last two sections are not"),
    "key points": (changed(8, source="## Key points\n- one"), "the key points are 1 lines"),
    "counts": (changed(6, execution_count=3), "not as committed"),
    "metadata": (changed(6, metadata={"collapsed": True}), "not as committed"),
    "tag": (changed(6, metadata={"tags": ["hide"]}), "has the tag 'hide'"),
    "core in optional": (lesson(*optional("## More (optional)", "a = 1"), prose("More."), prose("## Next")),
                         "cell 10 is in the section 'More (optional)', but it is not tagged optional"),
    "optional in core": (lesson(*optional("## More", "a = 1"), prose("## Next")),
                         "cell 9 is tagged optional, but the heading of its section does not end with (optional)"),
    "below text": (lesson(*optional("Text.\n\n## More (optional)", "a = 1"), prose("## Next")),
                   "cell 8 holds the heading 'More (optional)' below other text"),
    "optional name": (lesson(*optional("## More (optional)", "a = 1"), prose("## Next"),
                             code("def f():\n    return a"), prose()),
                      "cell 11: Undefined name `a` without the optional cells"),
    "optional stop": (lesson("ranks = cluster.start(2)", *optional("## More (optional)", "ranks.stop()"),
                             prose("## Next"), imports="from aiscale import cluster"),
                      "starts ranks, which no later cell stops"),
    "predicting ranks": (lesson("%%px\nx = 1\nguess = predict('a')"), "predicts on the ranks"),
    "pip": (lesson("%pip install x"), "installs packages"),
    "shell": (lesson("!ls"), "uses !command, whose failure goes unseen"),
    "address": (lesson('open("https://example.org/x")'), "holds a network address"),
    "hub": (lesson('cluster.from_pretrained("gpt2")', imports=USE.format("cluster")), "loads weights from a hub"),
    "mermaid": (lesson(prose("```mermaid\nA-->B\n```")), "mermaid"),
    "image": (lesson(prose("![x](https://example.org/x.png)")), "shows something from the network"),
    "syntax": (lesson("print("), "cell 8 line 1: invalid-syntax"),
    "undefined": (lesson("print(nowhere)"), "cell 8 line 1: F821"),
    "undefined on ranks": (lesson("%%px\nprint(nowhere)"), "cell 8 line 2: F821"),
    "format": (lesson("print( 1 )"), "not as committed"),
    "format on ranks": (lesson("%%px\nprint( 1 )"), "not as committed"),
}  # fmt: skip


@pytest.mark.parametrize("broken", BROKEN)
def test_every_departure_from_the_form_is_reported(tmp_path, broken):
    notebook, said = BROKEN[broken]
    found = problems(tmp_path, notebook)
    assert any(said in problem for problem in found), found


def test_ranks_may_be_stopped_in_a_later_cell_or_by_with(tmp_path):
    imports = USE.format("cluster")
    with_block = "with cluster.start(2) as ranks:\n    print(ranks)"
    assert problems(tmp_path, lesson("ranks = cluster.start(2)", "ranks.stop()", imports=imports)) == []
    assert problems(tmp_path, lesson(with_block, imports=imports)) == []


def test_an_optional_section_may_stand_between_core_ones_and_use_their_names(tmp_path):
    parts = optional("### More (optional)", "a = 1\nb = a")
    redefined = code("a = 2\nc = [a for a in range(3)]\n\n\ndef f(b):\n    return a, b")
    assert problems(tmp_path, lesson("# first\na = 0", *parts, prose("### Next"), redefined, prose())) == []


def dirty():
    made = lesson(code("print( 'a' )   "), prose(), "%%px\n# % stays\nx = {'a':1}\n%time print( x )")
    made.cells[5].outputs, made.cells[5].execution_count = [new_output("stream", text="hi")], 4
    made.cells[5].metadata["collapsed"] = True
    made.metadata["widgets"] = {}
    return made


def test_strip_brings_a_notebook_into_its_committed_form(tmp_path):
    path = write(dirty(), tmp_path / "03_small.ipynb")
    assert book.strip(path) and book.check_form(path) == []
    assert not book.strip(path), "a second time there is nothing to do"
    content = book.read(path)
    assert content.cells[9].source == '%%px\n# % stays\nx = {"a": 1}\n%time print( x )'
    assert content.cells[3].metadata == {"tags": ["parameters"]}


def test_a_stripped_notebook_passes_nbstripout_and_nbqa(tmp_path):
    path = write(dirty(), tmp_path / "03_small.ipynb")
    book.strip(path)
    keys = "metadata.papermill cell.metadata.papermill metadata.widgets"
    ruff = "ruff check --line-length 120 --select E,F,UP,B,W"
    for command in (
        ["nbstripout", "--verify", "--keep-id", "--extra-keys", keys, path.name],
        ["nbqa", ruff, path.name],
        ["nbqa", ruff, "--nbqa-process-cells", "px", path.name],
    ):
        program = str(Path(sys.executable).with_name(command[0]))
        done = subprocess.run([program, *command[1:]], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


# the estimate of minutes --------------------------------------------------------------------------------------------

PROSE = """## Three words here

A `longer name(x)` is one, $a + b$ is one: [six](https://example.org/not/counted) so far, <b>bold</b> 7. ![no](x.png)

```
none of this
```"""
CODE = """%%px
import os

# a comment
x = 1
plots.curve(x); plots.curve(x)
guess = predict("x")"""


def test_the_estimate_counts_what_takes_time():
    more = optional("## More (optional)", "plots.curve(1)")
    cells = [prose(PROSE), code(CODE), code("a = 1", "parameters"), *more]
    core = measure(cells, core=True, seconds=30)
    assert core == Pace(words=15, lines=3, figures=2, predictions=1, seconds=30)
    assert core.minutes == round(15 / 100 + 3 / 8 + 2 + 1 + 0.5)
    assert measure(cells, core=False) == Pace(words=17, lines=4, figures=3, predictions=1, seconds=40)


def test_list_shows_stated_and_estimated_minutes_without_loading_nbformat(shelf):
    path = shelf / "03_ddp.ipynb"
    write(lesson(*optional("## More (optional)", "\n".join(["print(1)"] * 24)), prose("## Next")), path)
    save_result(shelf.parent / "build/notebooks", "03_ddp", Result("03_ddp", "passed", 240.0, 3, core=True))
    program = "import sys; from aiscale.cli import main; main(sys.argv[1:]); assert 'nbformat' not in sys.modules"
    arguments = ["notebooks", "03", "--list", "--root", str(shelf), "--out", str(shelf.parent / "build")]
    text = subprocess.check_output([sys.executable, "-c", program, *arguments], text=True)
    assert "5 min, ranks: 2" in text
    assert "core: about 5 min; " in text and "1 lines of code, 0 figures, 0 predictions, 240 s to run" in text
    assert "all: about 4 min; " in text and "25 lines of code" in text


# appendices ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def appendix(shelf):
    made = lesson(number="A1")
    made.cells[0].source = made.cells[0].source.replace("nothing", "03_ddp")
    return write(made, shelf / "appendix" / "A1_more.ipynb")


@pytest.mark.parametrize("name", ["A1_more", "A1", "a1", "more"])
def test_an_appendix_is_found_by_name_and_comes_last(shelf, appendix, name):
    assert [notebook.name for notebook in book.notebooks([name], shelf)] == ["A1_more"]
    assert [notebook.name for notebook in book.notebooks(root=shelf)][-2:] == ["10_forge", "A1_more"]
    assert book.check_form(appendix) == []


def test_an_appendix_with_the_number_of_a_lesson_is_reported(shelf):
    path = write(lesson(number="03"), shelf / "appendix" / "03_more.ipynb")
    assert "the file is called 03_more: it must be A and a digit, _ and words_in_lower_case" in book.check_form(path)


def test_the_core_path_of_all_is_that_of_the_lessons(shelf, appendix, monkeypatch, tmp_path):
    ran = []
    pretend = lambda names, *_, core, **options: ran.append((names, core)) or []  # noqa: E731
    monkeypatch.setattr(book_command, "run_notebooks", pretend)
    main(["notebooks", "--core", "--root", str(shelf), "--out", str(tmp_path)])
    main(["notebooks", "A1", "--root", str(shelf), "--out", str(tmp_path)])
    assert ran == [(["00_start", "03_ddp", "10_forge"], True), (["A1"], False)]


# results and the command --------------------------------------------------------------------------------------------


def test_rerunning_one_notebook_keeps_the_results_of_others(tmp_path):
    failed = Result("03_b", "failed", 2.0, 3, failure=Failure("no", 4, "x", "t"))
    save_result(tmp_path, "00_a", Result("00_a", "passed", 1.0, 3))
    save_result(tmp_path, "03_b", failed)
    assert load_results(tmp_path)["03_b"] == failed
    save_result(tmp_path, "03_b", Result("03_b", "passed", 3.0, 3))
    assert {name: (r.state, r.seconds) for name, r in load_results(tmp_path).items()} == {
        "00_a": ("passed", 1.0),
        "03_b": ("passed", 3.0),
    }


def test_several_runs_may_write_their_results_at_once(tmp_path):
    code = "import sys; from pathlib import Path; from aiscale.book.running import Result, save_result\n"
    code += "for i in map(str, range(20)): save_result(Path.cwd(), sys.argv[1] + i, Result(i, 'passed', 1.0, 3))"
    writers = [subprocess.Popen([sys.executable, "-c", code, name], cwd=tmp_path) for name in "ab"]
    assert [writer.wait() for writer in writers] == [0, 0]
    assert len(load_results(tmp_path)) == 40


def test_a_results_file_of_another_version_is_ignored(tmp_path):
    (tmp_path / "results.json").write_text('{"notebooks": {"a": {"unknown": 1}}}')
    assert load_results(tmp_path) == {}


def test_list_names_notebooks_their_needs_and_their_parameters(shelf, capsys):
    assert main(["notebooks", "--list", "--root", str(shelf)]) == 0
    text = capsys.readouterr().out
    assert "03_ddp: A small lesson" in text and "-p steps=3" in text
    assert main(["notebooks", "03", "--list", "--json", "--root", str(shelf)]) == 0
    assert json.loads(capsys.readouterr().out)[0]["parameters"]["lr"] == 0.5


def test_check_fails_when_a_notebook_is_out_of_order(shelf, capsys):
    write(lesson("!ls", number="10"), shelf / "10_forge.ipynb")
    assert main(["notebooks", "--check", "--root", str(shelf)]) == 1
    out = capsys.readouterr().out
    assert "00_start: in order" in out and "10_forge: cell 8 uses !command" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["notebooks", "99"], "no notebook is called 99"),
        (["notebooks", "03", "-p", "steps"], "-p 'steps' is not of the form key=value"),
        (["notebooks", "03", "-p", "stepz=1"], "has no parameter stepz"),
    ],
)
def test_bad_input_ends_in_one_line(shelf, capsys, arguments, said):
    assert main([*arguments, "--root", str(shelf)]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
