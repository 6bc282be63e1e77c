"""Exercises: what `check` says and keeps, and graders that are themselves graded."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from aiscale.lesson import check, progress, workbooks
from aiscale.lesson.comparing import Wrong, same, same_on_ranks
from aiscale.lesson.grading import exercise
from aiscale.lesson.notebook import LessonError, Notebook
from lessons import code, prose, secrets, write

extended = pytest.mark.extended
ROOT = Path(__file__).parents[1]
HEADING = "## 09.1 · Twice (core, 5 minutes)"
SOLUTION = """def twice(x):
    ### BEGIN SOLUTION
    doubled = x + x + 0 * x + 0
    return doubled
    ### END SOLUTION"""
GRADER = """
import random
from aiscale.lesson.grading import exercise, same

@exercise("09.1", "Twice", "twice", minutes=5, hints=["More than once.", "Add it to itself."])
def twice(twice):
    for x in random.sample(range(5, 99), 3):
        same(twice(x), [x, x] and 2 * x, "the double", scale={0.5: "that is x itself"},
             causes={"a square": x * x})

twice.refuses("x itself", "that is x itself", "return x")
twice.refuses("a square", "a square", "return x * x")
twice.refuses("minus", "the negative of", "return -2 * x")
twice.refuses("hard-coded for the shown 2", "the double", "return 4")
"""


@pytest.fixture
def workshop(tmp_path, monkeypatch):
    """A workshop with one exercise, and a participant who has done nothing yet."""
    from nbformat.v4 import new_notebook

    cells = [
        prose("# Exercises 09"),
        code("from aiscale.lesson import check"),
        prose(HEADING),
        code(SOLUTION),
        prose(),
        code('check("09.1")'),
    ]
    for i, cell in enumerate(cells):
        cell.id = f"cell-{i:02d}"
    root = tmp_path / "workshop"
    write(new_notebook(cells=cells), root / "solutions/09_twice.ipynb")
    (root / "graders").mkdir()
    (root / "graders/09_twice.py").write_text(GRADER)
    list(workbooks.make_all(["09_twice"], root, root / "exercises"))
    monkeypatch.chdir(root / "exercises")
    monkeypatch.setattr(progress, "_FOLDER", tmp_path / "progress")
    return root


@pytest.fixture
def answer(monkeypatch):
    """answer(function) writes a function into the notebook."""
    import __main__

    return lambda function: monkeypatch.setattr(__main__, "twice", function, raising=False)


def unwritten(x):
    raise NotImplementedError("09.1")


# what is said ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            [[2, 4, 6], [8, 10, 13]],
            "5 of 6 numbers are right; the first wrong one, at [1, 2], is 13 and should be 12",
        ),
        ([[8, 16, 24], [32, 40, 48]], "v is 4 times what it should be: divide by the ranks"),
        ([[-2, -4, -6], [-8, -10, -12]], "v is the negative of what it should be"),
        (
            [[2, 8], [4, 10], [6, 12]],
            "v has the shape (3, 2), but it must have (2, 3) (the axes are swapped)",
        ),
        ([[1, 2, 3], [4, 5, 7]], "v: stale"),
    ],
)
def test_a_wrong_value_is_told_by_its_kind(found, said):
    expected = torch.tensor([[2.0, 4, 6], [8, 10, 12]])
    same(expected.tolist(), expected, "v")
    with pytest.raises(Wrong) as raised:
        same(
            found,
            expected,
            "v",
            scale={4: "divide by the ranks"},
            causes={"stale": [[1, 2, 3], [4, 5, 7]]},
        )
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([2, 3, 5, 1], r"x: each rank r has what rank \(r \+ 1\) % 4 should have: off by 1"),
        ([1, 2, 3, 10], r"x on rank 3 is 2 times what it should be: a sum"),
        ([3, 6, 9, 15], r"x on every rank is 3 times what it should be"),
    ],
)
def test_a_value_on_the_wrong_rank_is_told(found, said):
    same_on_ranks([1, 2, 3, 5], [1, 2, 3, 5], "x")
    with pytest.raises(Wrong, match=said):
        same_on_ranks(
            found, [1, 2, 3, 5], "x", scale={2: "a sum"}, causes={"the same everywhere": [7] * 4}
        )


# check -------------------------------------------------------------------------------------------


def test_hints_come_one_by_one_and_then_the_solution(workshop, answer, capsys):
    def said(function=None, **how):
        if function:
            answer(function)
        check("09.1", **how)
        return capsys.readouterr().out

    assert said(unwritten).startswith(
        '09.1: nothing written yet. Replace `raise NotImplementedError("09.1")`'
    )
    first, second, third = said(lambda x: x), said(lambda x: x), said(lambda x: 1 / 0)
    assert "09.1: not yet: the double is 1/2 of what it should be: that is x itself" in first
    assert "Hint" not in first and 'check("09.1", hint=1)' in first
    assert "Hint 1 of 2: More than once." in second and "Hint 2" not in second
    assert "solution" in said(solution=True) and "doubled = x" not in capsys.readouterr().out
    assert "raised ZeroDivisionError" in third and "Hint 2 of 2: Add it to itself." in third
    assert 'check("09.1", solution=True) shows a solution' in third
    assert "doubled = x + x" in said(solution=True)
    assert said(lambda x: 2 * x).startswith("09.1: ✓ right")
    kept = json.loads((workshop.parent / "progress/09_twice.json").read_text())["exercises"]["09.1"]
    assert (kept["state"], kept["tries"], kept["hints"], kept["solution"]) == ("right", 4, 2, True)


def test_each_failing_try_shows_the_hint_that_was_promised(workshop, answer, capsys, monkeypatch):
    def said(**how):
        check("09.1", **how)
        return capsys.readouterr().out

    answer(lambda x: x)
    assert "Another try shows hint 2" in said(hint=1)
    assert "Hint 2 of 2" in said(), "the same answer is a try as well"
    (workshop.parent / "progress/09_twice.json").unlink()
    monkeypatch.setattr(progress, "write", lambda *_: (_ for _ in ()).throw(PermissionError()))
    monkeypatch.setattr(progress, "_unwritten", {})
    assert "Another try shows hint 1" in said()
    assert "Hint 1 of 2" in said(), "the folder cannot be written"
    answer(lambda x: 2 * x)
    assert "right" in said()
    answer(lambda x: x)
    for _ in range(2):
        once_right = said()
        assert "Another try" not in once_right
        assert 'check("09.1", hint=2) shows hint 2' in once_right


def test_the_card_counts_what_is_done_and_which_predictions_held(workshop, answer, capsys):
    progress.save("predictions", "bytes", {"grade": "close"}, "09_twice")
    progress.save("predictions", "seconds", {"grade": "off"}, "09_twice")
    answer(lambda x: 2 * x)
    check("09.1")
    capsys.readouterr()
    check.card()
    title, head, row, where = capsys.readouterr().out.splitlines()
    assert title == "1 of 1 exercises and gaps that you came by are done; 1 of 2 predictions held"
    assert row.split(" | ")[:2] == ["09.1 Twice", "✓       "] or "✓" in row
    assert where.endswith("card.json; nothing leaves this machine")
    card = json.loads((workshop.parent / "progress/card.json").read_text())
    assert card["lessons"]["09_twice"]["exercises"]


def test_what_is_done_stays_done(workshop, answer):
    for function in (lambda x: 2 * x, lambda x: x):
        answer(function)
        check("09.1")
    assert progress.load("exercises", "09_twice")["09.1"]["state"] == "right"


def graded(grade, function, **how):
    task = exercise("09.1", "t", "f", minutes=1, hints=[])(grade)
    return task.graded({"f": function}, None, **how)


def test_an_answer_that_never_ends_is_refused():
    def forever(x):
        while True:
            pass

    before = signal.getsignal(signal.SIGALRM)
    assert "it hangs" in graded(lambda f: same(f(1), 1, "x"), forever, limit_s=0.3).text
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_each_grading_counts_its_own_comparisons():
    for _ in range(2):
        assert "in 1 comparisons" in graded(lambda f: same(f(1), 1, "x"), lambda x: x).text
    with pytest.raises(LessonError, match="compared nothing"):
        graded(lambda f: f(1), lambda x: x)


def test_inputs_are_drawn_anew_and_the_notebook_keeps_its_own_random_numbers():
    drawn = []

    def seed():
        for each in (torch.manual_seed, random.seed, np.random.seed):
            each(0)

    seed()
    expected = torch.rand(1), random.random(), np.random.rand()
    seed()
    for _ in range(2):
        graded(lambda f: same(f(torch.rand(1)), drawn[-1], "x"), lambda x: drawn.append(x) or x)
    assert drawn[0] != drawn[1] and (torch.rand(1), random.random(), np.random.rand()) == expected


class CalculatedRanks:
    """Two ranks whose answer to 06.1 is calculated here: the right loss, times a factor."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __len__(self) -> int:
        return 2

    def run(self, function, *args):
        if function.__name__ == "_knows":
            return [True, True]
        _, args_by_rank, _ = args
        parts, picked = zip(*args_by_rank, strict=True)
        loss = (torch.cat(parts, 1).logsumexp(1) - sum(picked)).mean()
        return [(self.factor * loss, {})] * 2


@pytest.mark.parametrize(("factor", "state"), [(1.0, "right"), (1.001, "wrong"), (0.9, "wrong")])
def test_a_loss_that_is_off_by_a_tenth_of_a_percent_is_refused(factor, state):
    task = workbooks.exercises(ROOT / "workshop/graders/06_tensor_pipeline.py")["06.1"]
    assert task.graded({}, CalculatedRanks(factor)).state == state


# sources, and what is made of them ---------------------------------------------------------------


def test_every_lessons_exercises_are_in_step():
    lessons = workbooks.lessons(root=ROOT / "workshop")
    assert {lesson: workbooks.problems(lesson, ROOT / "workshop") for lesson in lessons} == {
        name: [] for name in lessons
    }
    assert {path.stem for path in (ROOT / "workshop/exercises").glob("*.ipynb")} == set(lessons)


def test_the_exercise_inside_a_lesson_is_the_one_of_the_exercises():
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = [cell.source for cell in Notebook(path).cells]
        ids = re.findall(r'^(?:\w+ = )?check\("(\d\d\.\d+)"\)$', "\n".join(cells), flags=re.M)
        if not ids and re.search(r'^check\("\d\d\.[a-z]"\)$', "\n".join(cells), flags=re.M):
            continue  # they write lines of their script instead
        own = [cell.source for cell in Notebook(ROOT / "workshop/exercises" / path.name).cells]
        assert ids, path.name
        for id in ids:
            (stub,) = [cell for cell in cells if f'NotImplementedError("{id}")' in cell]
            assert stub in own and f'check("{id}")' in own, id


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_no_solution_stands_in_decks_or_in_pages_of_the_site():
    """Lessons are read before their exercises, and may show a line that an answer uses too."""
    shown = [
        "slides/*.md",
        "workshop/*.md",
        "workshop/blocks/*.md",
        "workshop/clinic/*.md",
        "workshop/exercises/*.ipynb",
    ]
    given = {path: path.read_text() for pattern in shown for path in ROOT.glob(pattern)}
    given |= {
        path: "\n".join(cell.source for cell in Notebook(path).cells)
        for path in given
        if path.suffix == ".ipynb"
    }
    assert len(given) >= 40
    for source in (ROOT / "workshop/solutions").glob("*.ipynb"):
        secret = secrets(source)
        assert secret
        # gives a line away
        others = {path: text for path, text in given.items() if path.name != "puzzles.ipynb"}
        assert [
            (path.name, line) for path, text in others.items() for line in secret if line in text
        ] == []


def test_a_grader_that_accepts_a_wrong_answer_fails_the_check(workshop):
    command = [sys.executable, "-m", "aiscale", "exercises", "--check"]
    change(
        workshop / "graders/09_twice.py",
        "same(twice(x), [x, x] and 2 * x,",
        "same(abs(twice(x)), 2 * x,",
    )
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "stub: ok: nothing written yet" in done.stdout, done.stderr
    assert re.findall("(\\w+): NOT OK", done.stdout) == ["minus"]


# all of them, on real ranks ----------------------------------------------------------------------


@extended
def test_every_solution_passes_and_every_stub_and_wrong_answer_is_refused():
    command = [sys.executable, "-m", "aiscale", "exercises", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, re.findall(".*NOT OK.*", done.stdout)
    solutions = (path.read_text() for path in (ROOT / "workshop/solutions").glob("[0-9]*.ipynb"))
    assert done.stdout.count(" solution: ok") == sum(
        text.count("### BEGIN SOLUTION") for text in solutions
    )


@extended
def test_a_participants_own_notebook_is_what_is_graded(tmp_path):
    """In a real kernel, with a participant's answers: one right, one wrong, one without %%px."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(ROOT / "workshop/exercises/03_ddp.ipynb", as_version=4)
    right = (
        "dist.all_reduce(total := torch.tensor(n_samples)); gradient *= n_samples / total; "
        "dist.all_reduce(gradient)"
    )
    answers = {
        "03.1": right,
        "03.2": "return 2.5",
    }
    for cell in notebook.cells:
        for id, text in answers.items():
            cell.source = cell.source.replace(f'raise NotImplementedError("{id}")', text)
        cell.source = cell.source.replace(
            "%%px\ndef all_reduce_in_buckets", "def all_reduce_in_buckets"
        )
    path = tmp_path / "mine.ipynb"
    nbformat.write(notebook, path)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": tmp_path}}).execute()
    outputs = [
        out.data["text/plain"]
        for cell in notebook.cells
        for out in cell.get("outputs", [])
        if "data" in out
    ]
    shown = "\n".join(outputs)
    assert (
        "03.1: ✓ right" in shown
        and "03.2: not yet: " in shown
        and "03.3: the cell that defines" in shown
    )
    assert "1 of 2 exercises and gaps that you came by are done" in shown
    card = json.loads((tmp_path / "progress/card.json").read_text())
    kept = card["lessons"]["03_ddp"]["exercises"]
    assert {id: entry["state"] for id, entry in kept.items()} == {"03.1": "right", "03.2": "wrong"}
    command = [sys.executable, "-m", "aiscale", "exercises", "--grade", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and re.findall(
        r"^(03\.\d) .*: (ok|NOT OK): ", done.stdout, re.M
    ) == [
        ("03.1", "ok"),
        ("03.2", "NOT OK"),
        ("03.3", "NOT OK"),
    ]
