"""The planner's constants: one file with value, meaning, source and range; fitted once over all sources.

    CONSTANTS.product_share                  # 0.9
    constants(without="nanotron_sweep")      # fitted without that source
    constants(jitter=0.01)                   # with another value

`constants.toml` holds them; `aiscale plan --validate --refit` writes the fitted ones and those with a source left out.
"""

from __future__ import annotations

import tomllib
from importlib import resources
from types import SimpleNamespace

FILE = resources.files("aiscale.plan") / "constants.toml"
TABLE = tomllib.loads(FILE.read_text(encoding="utf-8"))
DEVICES: dict[str, dict] = TABLE["devices"]
FITTED = tuple(name for name, row in TABLE["constants"].items() if "range" in row)
LEFT_OUT: dict[str, dict[str, float]] = {
    source: {name: row["without"][at] for name, row in TABLE["constants"].items() if "without" in row}
    for at, source in enumerate(TABLE["left_out"])
}


def constants(without: str | None = None, **changes: float) -> SimpleNamespace:
    """All constants by name; `without` a source: those fitted without it."""
    values = {name: row["value"] for name, row in TABLE["constants"].items()}
    return SimpleNamespace(**values | LEFT_OUT.get(without, {}) | changes)


CONSTANTS = constants()
