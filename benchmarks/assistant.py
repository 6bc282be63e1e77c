"""The cells of appendix A5 with five seeds: how often each training's model is right.

    python benchmarks/assistant.py src/aiscale/plan/published/measured/assistant.json

It takes five minutes on one core. The notebook draws it.
"""

import json
import sys
from pathlib import Path

import matplotlib
import nbformat
from common import machine_facts

NOTEBOOK = Path(__file__).parents[1] / "notebooks/appendix/A5_assistant.ipynb"
SEEDS = range(5)


def shares(seed):
    """{training: share of right answers}, by the notebook's own code."""
    names = {"__name__": "__main__"}
    for cell in nbformat.read(NOTEBOOK, 4).cells:
        if cell.cell_type == "code" and "published.measured" not in cell.source:
            exec(cell.source, names)
            if "parameters" in cell.metadata.get("tags", []):
                names["seed"] = seed
    return names["share"]


def main(out):
    matplotlib.use("agg")
    found = [shares(seed) for seed in SEEDS]
    share = {name: [round(run[name], 4) for run in found] for name in found[0]}
    out.write_text(json.dumps({"machine": machine_facts(), "share": share}, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
