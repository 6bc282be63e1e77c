"""Tiny valid notebooks for tests, which a test may break, and what solutions must not give away."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from aiscale.lesson.notebook import Notebook
from aiscale.lesson.workbooks import BLOCK

HEADER = """# {number} · A small lesson

Two numbers meet, and you will see their sum.

| minutes | ranks | hardware | comes before |
|---|---|---|---|
| 5 | 2 | any laptop | nothing |

## Questions
- What is a sum?
- Why?

## You will be able to
- add
- read $\\sum_{{i=1}}^n x_i$"""
PARAMETERS = (
    "steps = 3  # how many\nlr = 0.5  # how far\n"
    'label = "a"  # of the curve\nfused = True  # at once'
)
END = ("## Key points\n- one\n- two\n- three", "## Exercises\n1. Do it.")


def code(source: str, *tags: str):
    return new_code_cell(source, metadata={"tags": list(tags)} if tags else {})


def prose(source: str = "So it goes."):
    return new_markdown_cell(source)


def lesson(*cells, number: str = "03", imports: str = "import os", parameters: str = PARAMETERS):
    """A notebook whose lesson is `cells`; strings are code, with prose put between."""
    middle = []
    for cell in cells:
        middle += [code(cell), prose()] if isinstance(cell, str) else [cell]
    use = (
        code("print(os.name, steps, lr, label, fused)")
        if parameters == PARAMETERS
        else code("print(os.name)")
    )
    made = new_notebook(
        metadata={
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}
        },
        cells=[
            prose(HEADER.format(number=number)),
            code(imports),
            prose(),
            code(parameters, "parameters"),
            prose(),
            use,
            prose(),
            *middle,
            *map(prose, END),
        ],
    )
    for i, cell in enumerate(made.cells, 1):
        cell.id = f"cell-{i:02d}"
    return made


def write(notebook, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, path)
    return path


def run_script_cells(shell, notebook: Notebook, folder: Path) -> set[str]:
    """Run the cells of a lesson that write and change scripts; returns the names of these."""
    written = set()
    for cell in notebook.cells:
        if magic := re.match(r"%%(write|change) (.*)\n", cell.source):
            line = magic[2].replace("{folder}", str(folder))
            shell.run_cell_magic(magic[1], line, cell.source[magic.end() :] + "\n")
            written.add(Path(line.split()[-1]).name)
    return written


def secrets(source: Path) -> set[str]:
    """The lines of a notebook's solutions that its code does not give away itself.
    Nobody writes them by chance."""
    cells = [cell.source for cell in Notebook(source).cells if cell.cell_type == "code"]
    stub = "\n".join(BLOCK.sub("", cell) for cell in cells)
    lines = {
        line.strip()
        for cell in cells
        for block in BLOCK.finditer(cell)
        for line in block["code"].splitlines()
    }
    return {line for line in lines if len(line) >= 24 and line not in stub}
