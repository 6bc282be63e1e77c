"""The planner's constants, of constants.toml, and how far it is from published runs.

`python benchmarks/planner/fit.py` fits the constants that have a range. SCOREBOARD: how far
predictions are from published runs, as lines, and as the bands of answers.
"""

from __future__ import annotations

import tomllib
from importlib import resources
from types import SimpleNamespace

FILE = resources.files("aiscale.plan") / "constants.toml"
TABLE = tomllib.loads(FILE.read_text(encoding="utf-8"))
SCOREBOARD = tomllib.loads(
    (resources.files("aiscale.plan") / "scoreboard.toml").read_text(encoding="utf-8")
)
DEVICES: dict[str, dict] = TABLE["devices"]


def constants(**changes: float) -> SimpleNamespace:
    """All constants by name."""
    return SimpleNamespace(
        **{name: row["value"] for name, row in TABLE["constants"].items()} | changes
    )


CONSTANTS = constants()
