"""What lessons claim stands in one table, and follows from the stored files.

A row of plan/published/measured/claims.csv:

    lesson, cell         where the reader meets it: 12, 12_forge#12-energy
    claim                a sentence without a number
    number, unit         the number; or none, for what only the lesson's run can show
    low, high, interval  between which values it lies, and what that interval is
    draws                how many draws, seeds, runs or networks
    source               measured (the file), published (who), computed, counted
    control              what could have refuted it, with its number; or none, and why
    recomputed           the function below that computes the number from stored files

`published.claims("12")` shows a lesson's rows. A new claim is a row, and a function here if stored
files have what it follows from.
"""

from __future__ import annotations

import csv
import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from instruments import jobs
from scipy.sparse import csr_matrix
from sklearn.model_selection import GroupShuffleSplit, ShuffleSplit

from aiscale.measure.study import coverage
from aiscale.plan import published

ROOT = Path(__file__).parents[1]
TABLE = Path(published.__file__).parent / "measured/claims.csv"
SOURCES = ("measured", "published", "computed", "counted")


def read_rows() -> list[dict[str, str]]:
    with TABLE.open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


# Lesson 12: science ------------------------------------------------------------------------------


@cache
def lesson_12() -> dict:
    """The lesson's own `science`, `score` and `vectors`."""
    content = json.loads((ROOT / "notebooks/12_forge.ipynb").read_text(encoding="utf-8"))
    sources = {cell["id"]: "".join(cell["source"]) for cell in content["cells"]}
    names: dict = {}
    exec(sources["11-01-0975"], names)
    names["science"] = np.load(Path(published.__file__).parent / "measured/science.npz")
    exec(sources["12-science"], names)
    return names


@cache
def titles() -> dict[str, np.ndarray]:
    """Accuracies with 100 labels, as the lesson draws them."""
    taught = lesson_12()
    y = taught["science"]["titles.y"]
    inputs = taught["vectors"]("titles") | {"TF-IDF": csr_matrix(taught["science"]["titles.words"])}
    draws = list(ShuffleSplit(5, train_size=1000, random_state=0).split(y))
    return {
        way: np.array([taught["score"](X, y, learn[:100], exam) for learn, exam in draws])
        for way, X in inputs.items()
    }


@cache
def phases(test: str) -> dict[str, np.ndarray]:
    """Accuracies of one of the lesson's tests of phases."""
    taught = lesson_12()
    science, score = taught["science"], taught["score"]
    y = science["alloys.y"]
    dense = np.hstack([science["alloys.fractions"], science["alloys.descriptors"]])
    inputs = {"descriptors": dense}
    for way, X in taught["vectors"]("alloys").items():
        inputs[way] = np.hstack([dense, X])
    rows = {
        "at random": np.arange(len(y)),
        "with a digit": np.flatnonzero(~bare()),
        "3 elements or more": np.flatnonzero((science["alloys.fractions"] > 0).sum(1) > 2),
    }[test]
    split = GroupShuffleSplit(10, test_size=0.2, random_state=0)
    draws = list(split.split(rows, groups=rows))
    return {
        way: np.array([score(X[rows], y[rows], *draw) for draw in draws])
        for way, X in inputs.items()
    }


def bare() -> np.ndarray:
    """Which formulas have no digit."""
    formulas = lesson_12()["science"]["alloys.formulas"]
    return np.array([not any(map(str.isdigit, formula)) for formula in formulas])


def points(one: np.ndarray, other: np.ndarray, exam_over_learnt: float) -> tuple[float, ...]:
    """Mean difference in points, and two standard errors to each side.

    Draws overlap: the variance is corrected as by Nadeau and Bengio (2003).
    """
    gaps = 100 * (one - other)
    error = gaps.std(ddof=1) * np.sqrt(1 / len(gaps) + exam_over_learnt)
    return gaps.mean(), gaps.mean() - 2 * error, gaps.mean() + 2 * error


#: 400 titles are the exam, and the fit learns from 100 of the 1,000 others
EXAM_OVER_LEARNT = 400 / 100


def fields_over_words():
    return points(titles()["encoder"], titles()["TF-IDF"], EXAM_OVER_LEARNT)


def fields_over_random():
    return points(titles()["encoder"], titles()["random weights"], EXAM_OVER_LEARNT)


def token_table_share():
    """Of the gain, by the means; and the lowest and the highest of the draws."""
    stored = published.measured("science_controls")["titles at 100 labels, by draw"]
    words, table, encoder = (
        np.array(stored[way]) for way in ("TF-IDF", "its table of tokens", "encoder")
    )
    of_draws = 100 * (table - words) / (encoder - words)
    whole = 100 * (table - words).mean() / (encoder - words).mean()
    return whole, of_draws.min(), of_draws.max()


def random_networks():
    stored = published.measured("science_controls")["titles at 100 labels"]
    means = [mean for way, (mean, _) in stored.items() if way.startswith("random weights")]
    return np.mean(means), min(means), max(means)


def phases_encoder_over_descriptors():
    found = phases("at random")
    return points(found["encoder"], found["descriptors"], 1 / 4)


def phases_encoder_over_random():
    found = phases("at random")
    return points(found["encoder"], found["random weights"], 1 / 4)


def phases_with_a_digit():
    found = phases("with a digit")
    return points(found["encoder"], found["descriptors"], 1 / 4)


def phases_of_many_elements():
    found = phases("3 elements or more")
    return points(found["encoder"], found["descriptors"], 1 / 4)


def phases_of_random_networks():
    stored = published.measured("science_controls")["alloys, frozen: mean of 10 draws"]
    found = [100 * mean for way, mean in stored.items() if "random weights" in way]
    encoder = 100 * stored["descriptors + encoder"]
    return encoder, min(found), max(found)


def bare_formulas():
    science = lesson_12()["science"]
    labels = science["alloys.labels"][science["alloys.y"]][bare()]
    return ((labels == "multi-phase").sum(),)


def energies(column: str) -> tuple[float]:
    stored = published.measured("science")["energies"]
    return (100 * stored["columns"][column]["gain"],)


def energy_random():
    stored = published.measured("science")["energies"]
    low, median, high = stored["three random numbers, gain at 5, 50, 95 %"]
    return 100 * median, 100 * low, 100 * high


def energy_encoder():
    return energies("+ the encoder's three")


def energy_powers():
    return energies("+ x^2, x^3")


def energy_matscibert():
    return energies("+ MatSciBERT's three, by FORGE")


def forge_l_over_plan():
    found = published.measured("planner")["points"]["forge_frontier_throughput"]
    return (found["published_s"][-1] / found["predicted_s"][-1],)


# Lesson 13: frameworks and jobs ------------------------------------------------------------------


def took_from_deepspeed():
    entries = published.facts("frameworks")["frameworks"]
    return (sum("DeepSpeed" in {t["framework"] for t in entry["took"]} for entry in entries),)


def alive_today():
    entries = published.facts("frameworks_today")["frameworks"]
    newest = [max(entry["newest_commit"], entry["release"]["date"]) for entry in entries]
    return (sum(date >= "2026" for date in newest),)


def own_frameworks():
    return (sum(job["public"]["own"] for job in jobs.ten().values()),)


def tp_inside():
    return (sum(jobs.in_public(job).tp <= job["per_node"] for job in jobs.ten().values()),)


def smallest_with_pipeline():
    sizes = [job["parameters_B"] for job in jobs.ten().values() if jobs.in_public(job).pp > 1]
    return (min(sizes),)


def share_of_states():
    shares = [
        100 * jobs.states_GB(job, jobs.in_public(job)) / job["memory_GB"]
        for job in jobs.ten().values()
        if not job["public"].get("states_in_host_memory")
    ]
    return max(shares), min(shares), max(shares)


# Lesson 10: rules --------------------------------------------------------------------------------


def tried(rule, rounds: int) -> coverage.Tried:
    return coverage.try_rule(rule, published.measured("noise"), ratio=1.05, rounds=rounds)


def wrong_by_range() -> tuple[float]:
    return (tried(coverage.paired_range, 6).wrong,)


def wrong_by_coins() -> tuple[float]:
    return (tried(coverage.by_coins, 20).wrong,)


def told_by_coins() -> tuple[float]:
    return (tried(coverage.by_coins, 20).told,)


def told_by_means() -> tuple[float]:
    return (tried(coverage.means, 20).told,)


# The table ---------------------------------------------------------------------------------------


def faults(row: dict[str, str]) -> list[str]:
    """What is wrong with a row."""
    name, _, cell = row["cell"].partition("#")
    path = ROOT / "notebooks" / f"{name}.ipynb"
    found = [key for key in ("claim", "interval", "source", "control") if not row[key]]
    found = [f"{key} is empty" for key in found]
    if not name.startswith(f"{row['lesson']}_") or not path.is_file():
        return [*found, f"there is no lesson {name}"]
    if cell not in {cell["id"] for cell in json.loads(path.read_text("utf-8"))["cells"]}:
        found.append(f"{name} has no cell {cell}")
    if not row["source"].startswith(SOURCES):
        found.append(f"its source begins with none of {', '.join(SOURCES)}")
    if not row["recomputed"]:
        return found
    if row["recomputed"] not in globals():
        return [*found, f"there is no function {row['recomputed']}"]
    computed = globals()[row["recomputed"]]()
    told = [row[key] for key in ("number", "low", "high")[: len(computed)] if row[key]]
    for text, value in zip(told, computed, strict=False):
        # as many digits as are printed
        unit = 10.0 ** -len(text.partition(".")[2])
        if abs(float(text) - value) > 0.51 * unit:
            found.append(f"{text} is printed, {value:.4g} follows from the stored files")
    return found


@pytest.mark.parametrize("row", read_rows(), ids=lambda row: f"{row['lesson']}, {row['claim']}")
def test_a_claim_has_its_control_and_follows_from_the_stored_files(row):
    assert faults(row) == []


def test_a_wrong_number_a_missing_control_and_a_lost_cell_are_found():
    (row,) = [row for row in read_rows() if row["recomputed"] == "own_frameworks"]
    assert faults(row | {"number": "8"}) == ["8 is printed, 7 follows from the stored files"]
    assert faults(row | {"control": ""}) == ["control is empty"]
    assert faults(row | {"cell": "13_landscape#0"}) == ["13_landscape has no cell 0"]
    assert faults(row | {"source": "known"})[0].startswith("its source begins with none")


def test_a_lesson_shows_its_rows():
    shown = published.claims("13").splitlines()
    assert len(shown) == 2 + sum(row["lesson"] == "13" for row in read_rows())
    assert shown[0].startswith("| claim | number | interval |")
