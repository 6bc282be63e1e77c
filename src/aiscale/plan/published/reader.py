"""Published measurements and facts, each with its source and how we verified it.

    published.table("gpt2_c_mpi_cuda")   # rows: {"version": "serial", "train_s": 15264, ...}
    published.facts("turing_facts")      # a JSON document
    published.measured("radius_cpu")     # our own, with machine, versions and command
    published.claims("12")               # what a lesson claims, as a table with controls
    published.names()

Units are in the column names. `verification` is primary (read in the source itself), secondary (in
a copy or a summary of it), inferred, or recalled_unverified (from memory; `verified` leaves these
rows out). Figures draw the numbers in papers/, none of which are ours, as hollow diamonds
(`plots.style`). A long table may be packed (`.csv.gz`).
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path

from aiscale.errors import ConfigError, hint

_FOLDER = resources.files("aiscale.plan.published") / "papers"
_MEASURED = resources.files("aiscale.plan.published") / "measured"


def names() -> list[str]:
    kinds = (".csv", ".csv.gz", ".json")
    files = (entry.name for entry in _FOLDER.iterdir())
    return sorted(file.partition(".")[0] for file in files if file.endswith(kinds))


def table(name: str, folder: Path = _FOLDER) -> list[dict[str, str | int | float | None]]:
    """The rows of a table; numbers as numbers, empty cells as None.

    Raises ConfigError for an unknown name.
    """
    rows = csv.DictReader(_read(name, "csv", folder).splitlines())
    return [{key: _number(cell) for key, cell in row.items()} for row in rows]


def facts(name: str) -> dict:
    """A JSON document of facts. Raises ConfigError for an unknown name."""
    return json.loads(_read(name, "json"))


def measured(name: str) -> dict:
    """Our own measurement, too long for a lesson: a JSON document with machine and command."""
    return json.loads((_MEASURED / f"{name}.json").read_text(encoding="utf-8"))


def claims(lesson: str) -> str:
    """What a lesson claims, and what each claim rests on; tests/test_claims.py recomputes it."""
    head = ["claim", "number", "interval", "draws", "source", "control"]
    lines = []
    for row in csv.DictReader((_MEASURED / "claims.csv").read_text("utf-8").splitlines()):
        if row["lesson"] == lesson:
            number = f"{row['number']} {row['unit']}".strip() or "none"
            between = f"{row['low']} to {row['high']}: " if row["low"] else ""
            about = (row["draws"], row["source"], row["control"])
            lines.append([row["claim"], number, between + row["interval"], *about])
    return _markdown(head, lines)


def verified(rows: list[dict]) -> list[dict]:
    """The rows that were read in a source; only these may be used in a comparison or a test."""
    return [row for row in rows if "recalled" not in str(row["verification"])]


def _read(name: str, kind: str, folder: Path = _FOLDER) -> str:
    file = folder / f"{name}.{kind}"
    packed = folder / f"{name}.{kind}.gz"
    if packed.is_file():
        return gzip.decompress(packed.read_bytes()).decode()
    if not file.is_file():
        noun = "table" if kind == "csv" else "document"
        others = [other for other in names() if other != name]
        raise ConfigError(f"no published {noun} is called {name!r}: {hint(name, others)}")
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


# Radius's tables ---------------------------------------------------------------------------------


DENSE_SHARE = 0.2  #: of all steps, before Radius begins: as published, 60,000 of 300,000
#: of our runs that stand beside the published ones: the longest that all densities have
STEPS = 2000


def radius_beside_ours(results: Mapping) -> str:
    """Table 2 for GPT-2.0B, right of it what `benchmarks/radius.py` stored.

    Time saved is 1 - time / dense, on both sides; the artifact prints dense / time - 1.
    """
    step_s = {row["name"]: row["step_s"]["median"] for row in results["speed"]["rows"]}
    runs = {row["case"]: row for row in results["sweep"]["rows"] if row["steps"] == STEPS}
    rows = [row for row in table("radius_perlmutter") if row["model"] == "GPT-2.0B"]
    lines = []
    for row in rows:
        density, interval, days = row["density_d"], row["update_T"], row["wall_clock_days"]
        if density is None:
            ours = ["", f"{runs['dense']['val_ppl']['mean']:.2f}"]
            lines.append(["dense", "", days, "", row["val_ppl"], "", *ours])
            continue
        saved = 1 - step_s[f"radius d {density:g}, fp32, at once"] / step_s["dense, fp32, at once"]
        over = runs.get(f"radius d {density:g} T {interval} sum switch {DENSE_SHARE:g}")
        theirs = f"{row['val_ppl'] / rows[0]['val_ppl'] - 1:+.1%}"
        ours = ["", ""]
        if over:
            change = over["val_over_dense_pct"]["mean"]
            ours = [f"{(1 - DENSE_SHARE) * saved:.1%}", f"{change:+.1f}%"]
        published = f"{1 - days / rows[0]['wall_clock_days']:.1%}"
        lines.append(
            [f"Radius, d {density:g}", interval, days, published, row["val_ppl"], theirs, *ours]
        )
    head = [
        "",
        "interval",
        "days",
        "time saved",
        "validation ppl",
        "change",
        "**ours:** time saved",
        "ppl, change",
    ]
    return _markdown(head, lines)


def _markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
