"""Predictions: what one may write, what is said and kept of it, and no answer stands above it."""

from __future__ import annotations

import json

import pytest
from nbformat.v4 import new_notebook, new_output

from aiscale.lesson import MiB, guesses, predict, progress
from answers import given_away, told_beside, wrong_answers
from lessons import code, prose


@pytest.fixture(autouse=True)
def kept(tmp_path, monkeypatch):
    """A process without earlier predictions, and the file that it keeps its guesses in."""
    monkeypatch.setattr(guesses, "_made", {})
    monkeypatch.setattr(progress, "_FOLDER", tmp_path / "progress")
    monkeypatch.setenv("JPY_SESSION_NAME", "/somewhere/03_ddp.ipynb")
    return tmp_path / "progress" / "03_ddp.json"


@pytest.mark.parametrize(
    ("guess", "measured", "unit", "said"),
    [
        (3 * MiB, 3 * MiB, "bytes", "measured 3 MiB (3,145,728 bytes): exactly right"),
        (
            0.010,
            0.013,
            "s",
            "guessed 10 ms, measured 13 ms, guess / measured = 0.769: off by a factor of 1.3",
        ),
        (10, 20, "", "= 0.5: off by a factor of 2. Do both directions, or both halves, count?"),
        (100, 801, "bytes", "off by a factor of 8.01. A 64-bit number has 8 bytes"),
        (100, 300, "", "off by a factor of 3. The other ranks send too"),
        (5, 0, "", "measured 0: off"),
        (0.1, 0.2, "s", "off by a factor of 2"),
        (1, 2, "s", "off by a factor of 2"),
        (0.75, 1.5, "", "off by a factor of 2"),
        (4, 2.0, "", "off by a factor of 2"),
    ],
)  # fmt: skip
def test_a_number_is_compared_in_its_unit_and_the_factor_is_explained(
    capsys, guess, measured, unit, said
):
    verdict = predict("n", guess, unit=unit).against(
        measured, hints={3: "the other ranks send too"}
    )
    assert said in verdict.text and f"n: {verdict.text}" in capsys.readouterr().out
    if unit == "s" or isinstance(measured, float):
        assert verdict.text.endswith(said), "halves and directions are counted, not timed"


def test_a_choice_is_made_by_its_number_or_its_text(capsys):
    choices = ["the sum", "the mean"]
    assert predict("gradient", 2, choices=choices).against("the mean").text == "the mean: right"
    assert "1  the sum\n" in capsys.readouterr().out
    assert (
        predict("gradient", "The sum", choices=choices).against(2).text
        == "guessed the sum: wrong, it is the mean"
    )


def test_a_grid_is_compared_cell_by_cell():
    guess = predict("who sends", [[0, 1], [2, None], ["a1", ""]], rows="rank", columns="step")
    verdict = guess.against([[0, 3], [2, 1], ["A1", None]])
    assert verdict.text == "4 of 6 cells right; wrong: rank 0 step 1, rank 1 step 1"
    assert predict("empty", [[None] * 2] * 2).against([[1, 2], [3, 4]]).grade is None


def test_the_card_lists_every_comparison_and_a_cell_run_again_replaces_its_own(capsys):
    predict("a", 10).against(30)
    predict("b", None).against(5)
    predict("c", 1, choices=["x", "y"]).against("x")
    predict("d", [[1, 2]]).against([[1, 3]])
    predict("never measured", 4)
    predict("a", 29).against(30)
    capsys.readouterr()
    predict.card()
    title, heads, *rows = capsys.readouterr().out.splitlines()
    assert title == "2 of 4 right or close"
    assert [[cell.strip() for cell in row.split("|")] for row in rows] == [
        ["a", "29", "30", "0.967", "close"],
        ["b", "", "5", "", ""],
        ["c", "x", "x", "", "exact"],
        ["d", "2 cells", "2 cells", "", "near"],
    ]


def test_guesses_are_kept_by_name_beside_those_of_an_earlier_process(kept, monkeypatch):
    predict("a", 10, unit="bytes").against(20)
    monkeypatch.setattr(guesses, "_made", {})
    predict("b", 7)
    tree = json.loads(kept.read_text())
    assert list(tree["predictions"]) == ["a", "b"]
    a, b = tree["predictions"].values()
    assert a.pop("at").endswith("+00:00")
    assert a == {
        "kind": "number",
        "unit": "bytes",
        "guess": 10,
        "measured": 20,
        "ratio": 0.5,
        "grade": "near",
    }
    assert (b["guess"], b["measured"], b["grade"]) == (7, None, None)
    assert [path.name for path in kept.parent.iterdir()] == ["03_ddp.json"]


def executed(*above, measured, unit="bytes"):
    """An executed notebook that asks and measures below the cells `above`."""
    asks, tells = code("guess = predict('n')"), code("guess.against(x)")
    asks.outputs = [new_output("display_data", metadata={"aiscale": {"predict": "n"}})]
    facts = {"against": "n", "kind": "number", "measured": measured, "unit": unit}
    tells.outputs = [
        new_output("display_data", {"text/plain": f"{measured}"}, metadata={"aiscale": facts})
    ]
    injected = code("steps = 3", "injected-parameters")
    return new_notebook(cells=[injected, prose("A title"), *above, asks, prose("Then."), tells])


def printed(text: str):
    cell = code("print(x)")
    cell.outputs = [new_output("stream", text=text)]
    return cell


@pytest.mark.parametrize(
    ("above", "measured", "unit", "shown"),
    [
        (prose("It sends 3,145,728 bytes."), 3145728, "bytes", "3,145,728 bytes"),
        (code("x = 3_145_728"), 3145728, "bytes", "3_145_728"),
        (printed("sent 3.15 MB a step"), 3145728, "bytes", "3.15 MB"),
        (printed("a model of 124 M"), 124_439_808, "", "124 M"),
        (printed("took 251.3 ms"), 0.25131, "s", "251.3 ms"),
    ],
)
def test_an_answer_above_its_question_is_found_in_source_and_output(above, measured, unit, shown):
    ((cell, said),) = given_away(executed(prose("Words."), above, measured=measured, unit=unit))
    assert cell == 4 and said.startswith(f"the answer to 'n', {measured} {unit}".strip())
    assert said.endswith(f"stands above it: cell 3 shows {shown}")


def told(name: str, measured: object):
    """An executed notebook that measured this for the prediction of that name."""
    cell = code("guess.against(x)")
    cell.outputs = [
        new_output("display_data", metadata={"aiscale": {"against": name, "measured": measured}})
    ]
    return new_notebook(cells=[cell])


@pytest.mark.parametrize(
    ("lesson", "name", "right", "wrong"),
    [
        # inverted
        ("01_one_process", "operations with checkpointing, times those without", 1.23, 1 / 1.23),
        # choices swapped
        ("02_ranks", "the loss without the division", "falls about as before", "rises"),
        ("04_zero", "stage 1 sends, against DDP", "the same", "1.5 times"),
        ("03_ddp", "speed-up of 4 ranks on 8 cores", 1.3, 1 / 1.3),  # inverted
        ("06_tensor_pipeline", "bytes passed to all_reduce, an MLP forward and back", 16384, 8192),
    ],
)
def test_a_lesson_that_tells_a_wrong_answer_is_found(lesson, name, right, wrong):
    assert wrong_answers(told(name, right), lesson) == []
    (said,) = wrong_answers(told(name, wrong), lesson)
    assert said.startswith(f"{name!r} is {wrong!r}, but answers.toml says")


def test_a_number_in_the_cell_that_asks_stands_above_its_answer():
    content = executed(measured=3145728)
    assert given_away(content) == []
    content.cells[2].source = "guess = predict('n', None)  # 3 * MiB = 3_145_728"
    ((cell, said),) = given_away(content)
    assert cell == 2 and said.endswith("cell 2 shows 3_145_728")


@pytest.mark.parametrize(
    ("first", "comment", "found"),
    [
        ("## Nine gathers", "", []),
        ("## 9 gathers", "", ["'all-gathers, forward and back': '## 9 gathers' says 9"]),
        ("## 9 gathers\n\n## Units", "", []),  # of another section
        (
            "```python\nwrap(model)  # gathers 9 times\n```",
            "",
            ["'all-gathers, forward and back': '# gathers 9 times' says 9"],
        ),
        ("## Units", "  # 9", ["'all-gathers, forward and back': '# 9' says 9"]),
        ("## Units", "  # 10, for example", []),
    ],
)
def test_a_heading_or_a_comment_that_answers_is_found_without_a_run(first, comment, found):
    asks = code(f"guess = predict('all-gathers, forward and back', None){comment}")
    assert told_beside(new_notebook(cells=[prose(first), asks]), "05_fsdp") == found


def test_a_choice_of_several_words_is_found_in_a_heading():
    asks = code("predict('tokens that hide the messages, with ten times the parameters', None)")
    found = told_beside(new_notebook(cells=[prose("## As many as before"), asks]), "03_ddp")
    (said,) = found
    assert said.endswith("'## As many as before' says as many")
