"""Tokens per second of runs, beside the smallest: `python -m aiscale.measure.speed FOLDER ...`.

A kind is what stands before the first - in a folder's name: weak-1-nodes and weak-2-nodes are
two of one kind. Of each run the median step counts, without the first three.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

LEFT_OUT = 3  #: steps in which kernels are compiled and caches filled


def rows(folders: Sequence[str]) -> list[dict]:
    """{name, kind, ranks, tokens_per_s, efficiency} of each run, by kind and ranks.

    `efficiency` is a rank's tokens/s over those of a rank of the kind's smallest run.
    """
    found = [_read(Path(folder)) for folder in folders]
    found.sort(key=lambda row: (row["kind"], row["ranks"]))
    smallest = {}
    for row in found:
        each = row["tokens_per_s"] / row["ranks"]
        first = smallest.setdefault(row["kind"], each)
        row["efficiency"] = each / first
    return found


def _read(folder: Path) -> dict:
    note = json.loads((folder / "run.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    speeds = [line["tokens_per_s"] for line in lines if line["kind"] == "train"]
    return {
        "name": folder.name,
        "kind": folder.name.partition("-")[0],
        "ranks": note["world_size"],
        "tokens_per_s": statistics.median(speeds[LEFT_OUT:] or speeds),
    }


def main(folders: Sequence[str]) -> None:
    print(f"{'run':24} {'ranks':>6} {'tokens/s':>12} {'a rank':>10} {'efficiency':>10}")
    for row in rows(folders):
        each = row["tokens_per_s"] / row["ranks"]
        speeds = f"{row['tokens_per_s']:12,.0f} {each:10,.0f}"
        print(f"{row['name']:24} {row['ranks']:6} {speeds} {row['efficiency']:10.0%}")


if __name__ == "__main__":
    main(sys.argv[1:])
