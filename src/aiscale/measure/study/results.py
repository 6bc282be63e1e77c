"""Sums up the results of a study: medians, ratios to the base, and two studies side by side.

A ratio is taken run by run, against the runs of the base just before and after it, so that what
drifts with the machine drops out; and of an epoch of median steps, so that a hiccup of the
machine, which delays a few of them, does. Intervals are those of the median by the binomial
distribution where there are six runs or more, else the range.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def summary(rows: Sequence[dict]) -> list[dict]:
    """One entry a cell, in the order of the ratio; cells that failed last, with why."""
    base = [row for row in rows if row["cell"] == "base" and row["status"] == "ok"]
    entries = []
    for cell in dict.fromkeys(row["cell"] for row in rows):
        runs = [row for row in rows if row["cell"] == cell]
        good = [row for row in runs if row["status"] == "ok"]
        last = (good or runs)[-1]
        entry = {"cell": cell, "runs": len(runs), "good": len(good)}
        entry |= {
            key: last[key]
            for key in ("status", "error", "peak_bytes", "predicted_bytes")
            if key in last
        }
        if timed := [row for row in good if "epoch_s" in row]:
            entry["epoch_s"] = spread([row["epoch_s"] for row in timed])
            entry["tokens_per_s"] = statistics.median(row["tokens_per_s"] for row in timed)
            if base:
                entry["ratio"] = spread([_steady_s(row) / _base_beside(row, base) for row in timed])
        entries.append(entry)
    return sorted(entries, key=lambda entry: entry.get("ratio", {}).get("median", math.inf))


def _steady_s(row: dict) -> float:
    """Seconds of an epoch in which every step takes as long as the median one."""
    return row["step_s"] * row["steps"]


def _base_beside(row: dict, base: list[dict]) -> float:
    """Mean seconds of the base's runs around this one; of all rounds where its round has none."""
    if row["cell"] == "base":
        return statistics.median(map(_steady_s, base))
    here = [other for other in base if other["round"] == row["round"]]
    before = [other for other in here if other["turn"] < row["turn"]][-1:]
    after = [other for other in here if other["turn"] > row["turn"]][:1]
    return statistics.fmean(map(_steady_s, before + after or base))


def spread(values: Sequence[float]) -> dict[str, float]:
    """median, low and high: a 95 % interval by order statistics, the range below six values."""
    values, n = sorted(values), len(values)
    skip = 0
    while n >= 6 and 2 * sum(math.comb(n, k) for k in range(skip + 2)) / 2**n <= 0.05:
        skip += 1
    return {"median": statistics.median(values), "low": values[skip], "high": values[n - 1 - skip]}


def side_by_side(first: Sequence[dict], second: Sequence[dict]) -> list[dict]:
    """The cells that both have timed: ratios to the base, seconds of the second over the first."""
    one, two = ({entry["cell"]: entry for entry in summary(rows)} for rows in (first, second))
    entries = []
    for cell, a, b in ((cell, one[cell], two[cell]) for cell in one if cell in two):
        if "ratio" in a and "ratio" in b:
            times = {"median": b["epoch_s"]["median"] / a["epoch_s"]["median"]}
            near = abs(b["ratio"]["median"] / a["ratio"]["median"] - 1) <= 0.1
            both = {key: (a[key], b[key]) for key in ("ratio", "epoch_s", "peak_bytes")}
            entries.append({"cell": cell, **both, "within_10_pct": near, "times": times})
    return entries


def facts(rows: Sequence[dict]) -> str:
    """Machine, versions, dates and load."""
    some = next((row for row in rows if "device" in row), None)
    if some is None:
        return "no run has finished"
    dates, loads = [row["date"] for row in rows], [row["load"] for row in rows]
    return (
        f"{some['device']}, {some['cores']} cores, torch {some['torch']}, Python {some['python']}, "
        f"commit {some['commit']}, {min(dates)} to {max(dates)}, "
        f"load before a run {min(loads):g} to {max(loads):g}"
    )
