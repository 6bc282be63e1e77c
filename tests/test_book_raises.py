"""A cell that fails on purpose does not fail its notebook, and does not hide one that fails by accident."""

import lessons
from aiscale import book

ON_PURPOSE = lessons.code("raise ValueError('meant')", "raises-exception")


def run(tmp_path, *cells):
    lessons.write(lessons.lesson(*cells), tmp_path / "notebooks" / "03_small.ipynb")
    return book.run(["03"], root=tmp_path / "notebooks", out=tmp_path / "build")[0]


def test_a_notebook_with_a_cell_that_fails_on_purpose_passes(tmp_path):
    result = run(tmp_path, ON_PURPOSE, lessons.prose(), "print('still here')")
    assert result.state == "passed"


def test_a_cell_that_fails_after_one_on_purpose_is_the_one_that_is_named(tmp_path):
    result = run(tmp_path, ON_PURPOSE, lessons.prose(), "raise KeyError('by accident')")
    assert result.state == "failed"
    assert result.failure.message == "KeyError: 'by accident'"
    assert result.failure.source == "raise KeyError('by accident')"
