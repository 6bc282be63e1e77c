"""The puzzles of workshop/puzzles: solutions meet their targets, wrong answers are told why."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from aiscale.lesson import progress
from browser import Browser, Page, find_browser, served
from puzzle_answers import WRONG

WORKSHOP = Path(__file__).parents[1] / "workshop"
PICTURE = WORKSHOP.parent / "build/puzzle.png"
sys.path.insert(0, str(WORKSHOP / "puzzles"))

from simulated import (  # noqa: E402
    SimulationError,
    arrays,
    best_answers,
    checking,
    machine,
    problems,
    ranks,
    trial,
)
from simulated import __main__ as making  # noqa: E402
from simulated import page as playing  # noqa: E402
from simulated.machine import Costs  # noqa: E402
from simulated.problems import PUZZLES  # noqa: E402
from simulated.world import World  # noqa: E402


@pytest.fixture(autouse=True)
def participant(tmp_path, monkeypatch):
    """Somebody who has done nothing yet."""
    monkeypatch.setattr(progress, "_FOLDER", tmp_path)


def changed(name: str, old: str, new: str) -> Callable:
    """The solution's program with one passage replaced."""
    program, source = best_answers()[name]
    assert source.count(old) == 1, (
        f"{name}: {old!r} stands {source.count(old)} times in the solution"
    )
    names = dict(program.__globals__, check=lambda *_: None)
    exec(compile(source.replace(old, new), "wrong", "exec"), names)
    return names[program.__name__]


@pytest.mark.parametrize("name", PUZZLES)
def test_the_solution_meets_its_targets_and_not_lower_ones(name):
    program = best_answers()[name][0]
    outcome = checking.check(name, program)
    assert outcome.state == "right", outcome.text
    assert "our answer" in outcome.text
    puzzle = PUZZLES[name]
    for case in puzzle.cases:
        figures = checking.measured(checking.run(puzzle, case, program)[0])
        for what, target in case.targets.items():
            assert figures[what] == target, (
                f"{name}: the target of {what} is not what the solution needs"
            )
            lower = dataclasses.replace(case, targets={what: target - 0.5})
            assert f"{what} {target:g}" in checking.missed(puzzle, lower, figures)


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        pytest.param(n, *rest, id=f"{n}: {what}")
        for n, answers in WRONG.items()
        for what, *rest in answers
    ],
)
def test_a_wrong_answer_is_told_what_is_wrong(name, old, new, said):
    outcome = checking.check(name, changed(name, old, new))
    assert outcome.state == "wrong" and said in outcome.text


def test_every_puzzle_has_wrong_answers_and_a_stub_that_fails():
    assert set(WRONG) == set(PUZZLES) and all(len(answers) >= 4 for answers in WRONG.values())

    def stub(rank, *sizes):
        raise NotImplementedError("write this program")

    for name in PUZZLES:
        outcome = checking.check(name, stub)
        assert outcome.state == "empty" and outcome.text.endswith("not solved yet")


def test_the_participants_notebook_is_the_solutions_without_the_answers():
    text = making.NOTEBOOK.read_text()
    assert text == making.without_solutions(), (
        "make it again: cd workshop/puzzles && python -m simulated"
    )
    assert text.count("raise NotImplementedError") == len(PUZZLES)
    notebook = "".join(source for cell in json.loads(text)["cells"] for source in cell["source"])
    for name, (_, source) in best_answers().items():
        answer = (
            source.partition("### BEGIN SOLUTION\n")[2].partition("    ### END")[0].splitlines()
        )
        passages = ["\n".join(answer[at : at + 3]) for at in range(len(answer) - 2)]
        assert passages and not any(passage in notebook for passage in passages), (
            f"{name}: its solution can be read"
        )


def simulated(name: str, program: Callable, ranks: int, **sizes: int) -> World:
    world, verify = PUZZLES[name].prepare(np.random.default_rng(0), ranks, **sizes)
    assert verify(world.run(program)) == ""
    return world


def test_a_deadlock_names_who_waits_for_whom_and_where():
    def program(rank):
        rank.recv((rank.index + 1) % rank.world_size)

    with pytest.raises(SimulationError) as raised:
        World(3, Costs()).run(program)
    assert "deadlock: nobody can go on" in str(raised.value)
    assert "rank 2 has waited since 0 s for a message from rank 0\n    line " in str(raised.value)


# In a web page -----------------------------------------------------------------------------------


@pytest.fixture
def without_numpy(monkeypatch):
    """As in a browser: neither NumPy nor torch."""
    for module in (machine, problems, ranks, trial):
        monkeypatch.setattr(module, "np", arrays)
    monkeypatch.setattr(problems, "by_torch", problems.by_hand)


@pytest.mark.parametrize("name", PUZZLES)
def test_without_numpy_and_torch_answers_are_judged_as_with_them(name, without_numpy):
    assert checking.check(name, best_answers()[name][0]).state == "right"
    for _, old, new, said in WRONG[name]:
        outcome = checking.check(name, changed(name, old, new))
        assert outcome.state == "wrong" and said in outcome.text


def test_gradients_by_hand_are_those_of_torch():
    training = problems.Training(np.random.default_rng(0), layers=3, samples=2)
    for linear in ((), (1,)):
        of_torch, of_hand = (by(training, linear) for by in (problems.by_torch, problems.by_hand))
        for (weights, first), (mine, my_first) in zip(of_torch, of_hand, strict=True):
            assert np.allclose(weights, mine) and np.allclose(first, my_first)


def test_the_page_has_the_notebooks_texts_and_stubs_and_none_of_the_answers():
    told = playing.texts()
    assert [each["name"] for each in told["puzzles"]] == list(best_answers())
    stub = {each["name"]: each["stub"] for each in told["puzzles"]}
    assert all(
        text.endswith('raise NotImplementedError("write this program")\n') for text in stub.values()
    )
    zero_bubble = next(each for each in told["puzzles"] if each["name"] == "zero-bubble")
    for helper in ("forward", "backward", "backward_weights"):
        assert f"def {helper}(rank" in zero_bubble["given"]
    assert "<math" in json.dumps(told) and "$" not in told["puzzles"][1]["text"]


def page_program(name: str) -> tuple[str, str, str]:
    """(function, given, our answer) of a puzzle, as the page sends them."""
    about = next(each for each in playing.texts()["puzzles"] if each["name"] == name)
    return about["function"], about["given"], best_answers()[name][1].rpartition("check(")[0]


def test_a_loop_without_end_is_stopped_and_its_line_named(monkeypatch):
    monkeypatch.setattr(playing, "MOST_LINES", 10_000)
    did = json.loads(
        playing.attempt("ring", "ring", "", "def ring(rank):\n    while True:\n        x = 1\n")
    )
    assert "stopped after 10,000 lines, in line " in did["text"] and not did["solved"]
    did = json.loads(playing.attempt("ring", "ring", "", "def other(rank):\n    pass\n"))
    assert did["text"] == "your text does not define ring, which every rank is to run"
    did = json.loads(playing.attempt("ring", "ring", "", "def ring(rank):\n    return rank.\n"))
    assert did["text"].startswith("SyntaxError: ") and did["text"].endswith("(line 2)")


TITLE = "document.getElementById('title').textContent"
ENDLESS = (
    "import itertools\ndef ring(rank):\n    sum(itertools.count())"  # none of its lines repeats
)


def write_program(page: Page, program: str) -> None:
    box = "document.getElementById('program')"
    page.evaluate(f"{box}.value = {json.dumps(program)}")
    page.evaluate(f"{box}.dispatchEvent(new Event('input'))")


@pytest.mark.extended
@pytest.mark.skipif(
    not find_browser() or not shutil.which("npm"), reason="no chromium or no npm on this machine"
)
def test_a_reader_plays_all_puzzles_in_a_page(tmp_path):
    playing.write(tmp_path / "page")
    ring = page_program("ring")[2]
    _, old, new, said = WRONG["ring"][0]
    waits = "def ring(rank):\n    return [rank.recv((rank.index + 1) % rank.world_size)]"
    tries = {
        None: "not solved yet",
        ring.replace(old, new): said,
        waits: "deadlock",
        "def ring(rank):\n    while True:\n        pass": "lines, in line ",
        ENDLESS: "Stopped after 15 s: does a loop never end?",
        ring: "solved",
    }
    with served(tmp_path / "page") as address, Browser(tmp_path) as browser:
        page = browser.page()
        page.goto(f"{address}/puzzle.html#ring")
        page.wait("document.body.dataset.ready", timeout_s=240)
        count = 0

        def answer(program: str | None) -> str:
            nonlocal count
            count += 1
            if program:
                write_program(page, program)
            page.wait("!document.getElementById('run').disabled", timeout_s=240)
            page.evaluate("document.getElementById('run').click()")
            page.wait(f"document.body.dataset.tries == {count}", timeout_s=120)
            return page.evaluate("document.getElementById('said').textContent")

        for program, expected in tries.items():
            shown = answer(program)
            assert expected in shown, (program, shown)
        assert "time 6 s (target 6), memory 5 GB" in shown
        bars = "document.querySelectorAll('#drawing .bar').length"
        assert page.evaluate(bars) == 24, "6 messages of each of 4 ranks"
        page.screenshot(PICTURE)

        for name in PUZZLES:
            page.evaluate(f"location.hash = {json.dumps(name)}")
            about = next(each for each in playing.texts()["puzzles"] if each["name"] == name)
            page.wait(f"{TITLE} === {json.dumps(about['title'])}")
            assert answer(page_program(name)[2]).startswith("solved\n"), name
        titles = "[...document.querySelectorAll('nav button')].map(button => button.textContent)"
        assert all(title.startswith("✓") for title in page.evaluate(titles))

        page.evaluate("location.hash = 'ddp'")
        page.wait(f"{TITLE}.startsWith('3 ')")
        page.evaluate("document.getElementById('again').click()")
        page.press("Control+End")
        page.press("Tab")
        page.type("kept")
        assert page.evaluate("document.activeElement.id") == "program", "Tab stays in the editor"
        page.evaluate("location.reload()")
        page.wait(f"document.body?.dataset.ready && {TITLE}.startsWith('3 ')")
        assert page.evaluate("document.getElementById('program').value").endswith(
            'program")\n    kept'
        )
        page.evaluate("document.getElementById('program').focus()")
        page.press("Escape")
        page.press("Tab")
        assert page.evaluate("document.activeElement.id") != "program", "the keyboard is not caught"
        hosts = page.evaluate(
            "performance.getEntriesByType('resource').map(entry => new URL(entry.name).host)"
        )
    assert {f"http://{host}" for host in hosts} == {address}
