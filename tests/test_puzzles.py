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
from browser import Browser, find_browser, served
from puzzle_answers import WRONG

WORKSHOP = Path(__file__).parents[1] / "workshop"
sys.path.insert(0, str(WORKSHOP / "puzzles"))

from simulated import SimulationError, best_answers, checking  # noqa: E402
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


@pytest.mark.extended
@pytest.mark.skipif(
    not find_browser() or not shutil.which("npm"), reason="no chromium or no npm on this machine"
)
def test_a_reader_plays_the_ring_in_a_page(tmp_path):
    playing.write(tmp_path / "page")
    ring = best_answers()["ring"][1].rpartition("check(")[0]
    _, old, new, said = WRONG["ring"][0]
    waits = "def ring(rank):\n    return [rank.recv((rank.index + 1) % rank.world_size)]"
    with served(tmp_path / "page") as address, Browser(tmp_path) as browser:
        page = browser.page()
        page.goto(f"{address}/puzzle.html")
        page.wait("document.body.dataset.ready", timeout_s=240)
        tries = {
            None: "not solved yet",
            ring.replace(old, new): said,
            waits: "deadlock",
            ring: "solved",
        }
        for k, (program, answer) in enumerate(tries.items(), 1):
            page.evaluate(
                f"document.getElementById('program').value = {json.dumps(program)}"
                if program
                else "0"
            )
            page.evaluate("document.getElementById('run').click()")
            page.wait(f"document.body.dataset.tries == {k}", timeout_s=60)
            shown = page.evaluate("document.getElementById('said').textContent")
            assert answer in shown, (program, shown)
        assert "time 6 s (target 6), memory 5 GB" in shown
        assert page.evaluate("document.querySelectorAll('#drawing .bar').length") == 24, (
            "6 messages of each of 4 ranks"
        )
        hosts = page.evaluate(
            "performance.getEntriesByType('resource').map(entry => new URL(entry.name).host)"
        )
    assert {f"http://{host}" for host in hosts} == {address}
