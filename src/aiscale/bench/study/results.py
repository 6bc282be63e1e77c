"""Reads the rows of a study and sums them up: medians, ratios to the base, and two studies side by side.

    rows = load("runs/laptop.csv")
    summary(rows)                        # one entry a cell: median time, its ratio to the base with an interval, memory
    side_by_side(rows, load("other.csv"))        # cells that both have, base against base and ratio against ratio
    drift(rows)                          # the base through the study: (turn, seconds)

A ratio is taken run by run, against the runs of the base just before and after it, so that what drifts with the machine
drops out; and of an epoch of median steps, so that a hiccup of the machine, which delays a few of them, does. Intervals
are those of the median by the binomial distribution where there are six runs or more, else the range.
"""

from __future__ import annotations

import ast
import csv
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from aiscale.bench.tables import table
from aiscale.config import ConfigError

_TEXT = {"study", "cell", "id", "status", "error", "size", "settings", "date", "device", "python", "torch", "commit"}
_NEEDED = ("study", "cell", "id", "round", "turn", "status", "epoch_s", "step_s", "steps")


def load(path: str | Path) -> list[dict]:
    """The rows of a file, numbers as numbers; a line that was cut off is left out. Raises ConfigError."""
    end = ": name a file of aiscale bench study"
    try:
        with open(path, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            raw = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path} cannot be read as a study's CSV ({why}){end}") from None
    if missing := [column for column in _NEEDED if column not in (reader.fieldnames or ())]:
        raise ConfigError(f"{path} is not a study's CSV, it has no column {missing[0]}{end}")
    whole = [row for row in raw if None not in row.values() and None not in row]
    return [{key: value if key in _TEXT else _number(value) for key, value in row.items()} for row in whole]


def summary(rows: Sequence[dict]) -> list[dict]:
    """One entry a cell, in the order of the ratio; cells that failed last, with why."""
    base = sorted(((row["round"], row["turn"]), _steady_s(row)) for row in _base_runs(rows))
    found = []
    for cell in dict.fromkeys(row["cell"] for row in rows):
        runs = [row for row in rows if row["cell"] == cell]
        good = [row for row in runs if row["status"] == "ok"]
        entry = {"cell": cell, "runs": len(runs), "good": len(good), "status": (good or runs)[-1]["status"]}
        entry |= {"error": next((row["error"] for row in reversed(runs) if row["error"]), "")}
        timed = [row for row in good if row["epoch_s"] != ""]
        if timed:
            entry["epoch_s"] = spread([row["epoch_s"] for row in timed])
            entry["tokens_per_s"] = statistics.median(row["tokens_per_s"] for row in timed)
            entry["wire_bytes_per_step"] = timed[-1]["wire_bytes_per_step"]
            # What the first step takes beyond a later one: building, first touches, compilation
            entry["ready_s"] = statistics.median(row["ready_s"] - row["step_s"] for row in timed)
            beside = [(_steady_s(row), _base_beside(row, base)) for row in timed]
            ratios = [seconds / reference for seconds, reference in beside if reference]
            entry |= {"ratio": spread(ratios)} if ratios else {}
        keys = ("peak_bytes", "predicted_bytes", "largest_layers", "predicted_layers")
        entry |= {key: good[-1][key] for key in keys if good and good[-1].get(key, "") != ""}
        found.append(entry)
    return sorted(found, key=lambda entry: entry.get("ratio", {}).get("median", math.inf))


def drift(rows: Sequence[dict]) -> list[tuple[tuple[int, int], float]]:
    """((round, turn), seconds) of each run of the base, in order."""
    return sorted(((row["round"], row["turn"]), row["epoch_s"]) for row in _base_runs(rows))


def _base_runs(rows: Sequence[dict]) -> list[dict]:
    return [row for row in rows if row["cell"] == "base" and row["status"] == "ok"]


def _steady_s(row: dict) -> float:
    """Seconds of an epoch in which every step takes as long as the median one."""
    return row["step_s"] * row["steps"]


def _base_beside(row: dict, base: list[tuple[tuple[int, int], float]]) -> float | None:
    """Seconds of the base's runs around this one in its round, their mean; of all rounds where it has none."""
    place = (row["round"], row["turn"])
    if row["cell"] == "base":
        return statistics.median(seconds for _, seconds in base)
    here = [(at[1], seconds) for at, seconds in base if at[0] == place[0]]
    before = [seconds for turn, seconds in here if turn < place[1]][-1:]
    after = [seconds for turn, seconds in here if turn > place[1]][:1]
    around = before + after or [seconds for _, seconds in base]
    return statistics.fmean(around) if around else None


def spread(values: Sequence[float]) -> dict[str, float]:
    """median, low and high: a 95 % interval of the median from order statistics, the range below six values."""
    values, n = sorted(values), len(values)
    skip = 0
    while n >= 6 and 2 * sum(math.comb(n, k) for k in range(skip + 2)) / 2**n <= 0.05:
        skip += 1
    return {"median": statistics.median(values), "low": values[skip], "high": values[n - 1 - skip]}


def side_by_side(first: Sequence[dict], second: Sequence[dict]) -> list[dict]:
    """The cells that both have: second over first, and whether the intervals of their ratios to the base overlap."""
    one, two = ({entry["cell"]: entry for entry in summary(rows)} for rows in (first, second))
    found = []
    for cell in (name for name in one if name in two):
        a, b = one[cell], two[cell]
        entry = {"cell": cell, "status": (a["status"], b["status"])}
        if "epoch_s" in a and "epoch_s" in b:
            low, high = b["epoch_s"]["low"] / a["epoch_s"]["high"], b["epoch_s"]["high"] / a["epoch_s"]["low"]
            middle = b["epoch_s"]["median"] / a["epoch_s"]["median"]
            entry |= {"seconds": (a["epoch_s"], b["epoch_s"]), "times": {"median": middle, "low": low, "high": high}}
        if "ratio" in a and "ratio" in b:
            entry["ratio"] = (a["ratio"], b["ratio"])
            entry["agree"] = a["ratio"]["low"] <= b["ratio"]["high"] and b["ratio"]["low"] <= a["ratio"]["high"]
            entry["within_10_pct"] = abs(b["ratio"]["median"] / a["ratio"]["median"] - 1) <= 0.1
        found.append(entry)
    if not found:
        raise ConfigError("the two files have no cell in common: compare runs of the same study")
    return sorted(found, key=lambda entry: entry["cell"] != "base")


#: of `cells`
HEADS = ("", "runs", "epoch s", "over base", "tokens/s", "first step s", "peak MiB", "predicted", "sent a step", "")


def cells(entry: dict) -> tuple[str, ...]:
    """An entry of `summary` as the cells of a table."""
    seconds, ratio = entry.get("epoch_s"), entry.get("ratio")
    note = "" if entry["status"] == "ok" else f"{entry['status']}: {entry['error'][:80]}"
    if "largest_layers" in entry:
        note = f"{entry['largest_layers']:g} layers, predicted {entry['predicted_layers']:g}"
    return (
        entry["cell"],
        f"{entry['good']} of {entry['runs']}",
        f"{seconds['median']:.3f}" if seconds else "",
        _interval(ratio) if ratio else "",
        f"{entry['tokens_per_s']:,.0f}" if seconds else "",
        f"{entry['ready_s']:.2f}" if seconds else "",
        *(f"{entry[key] / 2**20:.1f}" if key in entry else "" for key in ("peak_bytes", "predicted_bytes")),
        f"{entry['wire_bytes_per_step'] / 1e6:.2f} MB" if entry.get("wire_bytes_per_step") else "",
        note,
    )


def show(rows: Sequence[dict]) -> None:
    """Print the summary as a table."""
    if rows:
        table(f"study {rows[0]['study']}, {facts(rows)}", HEADS, [cells(entry) for entry in summary(rows)])


def facts(rows: Sequence[dict]) -> str:
    """Machine, versions and dates."""
    some = next((row for row in rows if row["device"]), None)
    if some is None:
        return "no run has finished"
    dates = sorted(row["date"] for row in rows)
    loads = [row["load"] for row in rows if row["load"] != ""]
    return (
        f"{some['device']}, {some['cores']:g} cores, torch {some['torch']}, Python {some['python']}, commit "
        f"{some['commit']}, {dates[0]} to {dates[-1]}, load before a run {min(loads):g} to {max(loads):g}"
    )


def show_side_by_side(entries: Sequence[dict], names: tuple[str, str]) -> None:
    rows = []
    for entry in entries:
        ratios = map(_interval, entry["ratio"]) if "ratio" in entry else entry["status"]
        times = _interval(entry["times"]) if "times" in entry else ""
        rows.append((entry["cell"], times, *ratios, {True: "overlap", False: "differ"}.get(entry.get("agree"), "")))
    table("second over first", ("", "times as long", *(f"over base, {name}" for name in names), "intervals"), rows)


def agreement(entries: Sequence[dict]) -> tuple[int, int]:
    """(cells whose ratios to the base are within 10 % of each other, cells that have two), without the base."""
    near = [entry["within_10_pct"] for entry in entries if "within_10_pct" in entry and entry["cell"] != "base"]
    return sum(near), len(near)


def _interval(values: dict) -> str:
    one = values["low"] == values["high"]  # one run: no interval
    return f"{values['median']:.2f}" + (" (one run)" if one else f" ({values['low']:.2f} to {values['high']:.2f})")


def _number(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
