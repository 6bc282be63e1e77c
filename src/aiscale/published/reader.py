"""Published measurements and facts, each with its source and how we verified it.

    published.table("gpt2_c_mpi_cuda")      # list of rows: {"version": "serial", "train_s": 15264, ..., "source": ...}
    published.facts("turing_facts")         # a JSON document
    published.measured("radius_cpu")        # our own earlier measurement, with machine, versions and command
    published.names()

Units are in the column names. `verification` is primary (read in the source itself), secondary (in a copy or a summary
of it), inferred, or recalled_unverified (from memory; `verified` leaves these rows out). Figures draw the numbers in
papers/, none of which are ours, as hollow diamonds (`plots.style`). A long table may be packed (`.csv.gz`).
"""

from __future__ import annotations

import csv
import difflib
import gzip
import json
from importlib import resources

from aiscale.config import ConfigError

_FOLDER = resources.files("aiscale.published") / "papers"
_MEASURED = resources.files("aiscale.published") / "measured"


def names() -> list[str]:
    kinds = (".csv", ".csv.gz", ".json")
    return sorted(entry.name.partition(".")[0] for entry in _FOLDER.iterdir() if entry.name.endswith(kinds))


def table(name: str) -> list[dict[str, str | int | float | None]]:
    """The rows of a table; numbers as numbers, empty cells as None. Raises ConfigError for an unknown name."""
    rows = csv.DictReader(_read(name, "csv").splitlines())
    return [{key: _number(cell) for key, cell in row.items()} for row in rows]


def facts(name: str) -> dict:
    """A JSON document of facts. Raises ConfigError for an unknown name."""
    return json.loads(_read(name, "json"))


def measured(name: str) -> dict:
    """Our own measurement that takes too long for a lesson: a JSON document with machine and command."""
    return json.loads((_MEASURED / f"{name}.json").read_text(encoding="utf-8"))


def verified(rows: list[dict]) -> list[dict]:
    """The rows that were read in a source; only these may be used in a comparison or a test."""
    return [row for row in rows if "recalled" not in str(row["verification"])]


def _read(name: str, kind: str) -> str:
    file = _FOLDER / f"{name}.{kind}"
    packed = _FOLDER / f"{name}.{kind}.gz"
    if packed.is_file():
        return gzip.decompress(packed.read_bytes()).decode()
    if not file.is_file():
        close = difflib.get_close_matches(name, names(), n=1, cutoff=0.4)
        hint = f"did you mean {close[0]}?" if close and close[0] != name else f"there are {', '.join(names())}"
        noun = "table" if kind == "csv" else "document"
        raise ConfigError(f"no published {noun} is called {name!r}: {hint}")
    return file.read_text(encoding="utf-8")


def _number(cell: str | None) -> str | int | float | None:
    if not cell:
        return None
    for kind in (int, float):
        try:
            return kind(cell)
        except ValueError:
            continue
    return cell
