"""Make the participants' notebook, workshop/puzzles/puzzles.ipynb, from the solutions.

cd workshop/puzzles && python -m simulated
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from simulated.checking import SOLUTIONS

NOTEBOOK = Path(__file__).parents[1] / "puzzles.ipynb"
_SOLUTION = re.compile(r"^    ### BEGIN SOLUTION\n.*?^    ### END SOLUTION\n", re.M | re.S)
STUB = '    raise NotImplementedError("write this program")\n'


def without_solutions() -> str:
    """The text of the participants' notebook."""
    notebook = json.loads(SOLUTIONS.read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        cell["source"] = _SOLUTION.sub(STUB, "".join(cell["source"])).splitlines(keepends=True)
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    NOTEBOOK.write_text(without_solutions(), encoding="utf-8")
