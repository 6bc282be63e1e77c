"""Make the participants' notebook, workshop/puzzles/puzzles.ipynb, from the solutions.

cd workshop/puzzles && python -m simulated
"""

from __future__ import annotations

from pathlib import Path

import nbformat

from aiscale.lesson.workbooks import answered
from simulated.checking import SOLUTIONS

NOTEBOOK = Path(__file__).parents[1] / "puzzles.ipynb"


def without_solutions() -> str:
    """The text of the participants' notebook."""
    notebook = nbformat.read(SOLUTIONS, as_version=4)
    stubs = answered(notebook.cells, 'raise NotImplementedError("write this program")')
    for cell, source in zip(notebook.cells, stubs, strict=True):
        cell.source = source
    return nbformat.writes(notebook, indent=1).rstrip("\n") + "\n"


if __name__ == "__main__":
    NOTEBOOK.write_text(without_solutions(), encoding="utf-8")
