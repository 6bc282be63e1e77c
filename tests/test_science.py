"""Lesson 12's claims about science follow from the stored vectors, and from FORGE's own table."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import numpy as np
import pytest
from scipy.sparse import csr_matrix
from sklearn.linear_model import BayesianRidge
from sklearn.model_selection import KFold, LeaveOneGroupOut, ShuffleSplit, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from aiscale import lesson
from aiscale.plan import published

ROOT = Path(__file__).parents[1]
STORED = published.measured("science")
FOLDS = KFold(5, shuffle=True, random_state=0)
TABLE = ROOT.parent / "shared/published/fept_configurations.csv.gz"


@pytest.fixture(scope="module")
def taught():
    """The lesson's own `science`, `score` and `vectors`."""
    (notebook,) = (
        one for one in lesson.notebooks(root=ROOT / "notebooks") if one.name == "12_forge"
    )
    source, names = {cell.id: cell.source for cell in notebook.cells}, {}
    exec(source["11-01-0975"], names)
    names["science"] = np.load(Path(published.__file__).parent / "measured/science.npz")
    exec(source["12-science"], names)
    return names


def mean_and_error(values) -> tuple[float, float]:
    return np.mean(values), np.std(values, ddof=1) / np.sqrt(len(values))


def test_random_weights_help_the_descriptors_of_alloys_as_much_as_trained_ones(taught):
    science, score = taught["science"], taught["score"]
    dense = np.hstack([science["alloys.fractions"], science["alloys.descriptors"]])
    inputs = [dense] + [np.hstack([dense, X]) for X in taught["vectors"]("alloys").values()]
    draws = ShuffleSplit(6, test_size=0.2, random_state=1).split(dense)
    alone, encoder, random = np.array(
        [[score(X, science["alloys.y"], *draw) for X in inputs] for draw in draws]
    ).T
    difference, error = mean_and_error(encoder - random)
    gain, spread = mean_and_error(random - alone)
    assert difference < 2 * error and gain > 2 * spread and abs(difference) < gain / 3


def test_formulas_tell_the_phase_by_their_notation(taught):
    bare = np.array(
        [not any(map(str.isdigit, formula)) for formula in taught["science"]["alloys.formulas"]]
    )
    y = taught["science"]["alloys.y"]
    multi = taught["science"]["alloys.labels"][y[bare]] == "multi-phase"
    stored = STORED["phases"]["formulas without a digit, multi-phase among them"]
    assert [bare.sum(), multi.sum()] == stored
    assert multi.all() and bare.mean() > 0.3


@pytest.mark.parametrize("name", ["titles", "abstracts"])
def test_with_a_hundred_labels_the_encoder_beats_counted_words_and_random_weights_do_not(
    taught, name
):
    science, score = taught["science"], taught["score"]
    inputs = taught["vectors"](name) | {"TF-IDF": csr_matrix(science[f"{name}.words"])}
    y = science[f"{name}.y"]
    orders = [np.random.default_rng(seed).permutation(len(y)) for seed in range(3)]
    found = {
        way: np.array([score(X, y, order[:100], order[1000:]) for order in orders])
        for way, X in inputs.items()
    }
    assert (found["encoder"] > found["TF-IDF"]).all()
    assert (found["TF-IDF"] > found["random weights"]).all()
    mean, error = STORED["fields"][name]["100"]["encoder"]
    assert abs(found["encoder"].mean() - mean) < 4 * error + 0.01


@pytest.mark.skipif(
    not TABLE.is_file(), reason="FORGE's table has no licence, and is not in this repository"
)
def test_three_random_numbers_for_each_formula_improve_the_energies():
    lines = (line for line in gzip.open(TABLE, "rt") if not line.startswith("#"))
    rows = np.array([[float(value) for value in row.values()] for row in csv.DictReader(lines)])
    n, shells, E = rows[:, :1], rows[:, 1:7], rows[:, 7]
    # all pairs of 32 places
    assert len(rows) == STORED["energies"]["rows"] and len(rows[n[:, 0] == 2]) == 496

    def squared_error(*columns, cv=FOLDS, groups=None):
        fit = make_pipeline(StandardScaler(), BayesianRidge())
        X = np.hstack([shells, n, *columns])
        return np.mean((cross_val_predict(fit, X, E, cv=cv, groups=groups) - E) ** 2)

    base, which = squared_error(), np.unique(n, return_inverse=True)[1].ravel()
    gains = [
        1 - squared_error(np.random.default_rng(seed).normal(size=(10, 3))[which]) / base
        for seed in range(20)
    ]
    low, median, high = STORED["energies"]["three random numbers, gain at 5, 50, 95 %"]
    assert min(gains) > 0 and abs(np.median(gains) - median) < 0.015
    for name in ("+ the encoder's three", "+ MatSciBERT's three, by FORGE"):
        assert low < STORED["energies"]["columns"][name]["gain"] < high
    assert 1 - squared_error(n**2, n**3) / base > high
    unseen = {"cv": LeaveOneGroupOut(), "groups": which}
    stored = STORED["energies"]["each share left out"]["columns"]
    gain = 1 - squared_error(n**2, n**3, **unseen) / squared_error(**unseen)
    assert abs(gain - stored["+ x^2, x^3"]["gain"]) < 1e-3
    assert stored["+ MatSciBERT's three, by FORGE"]["gain"] < 0 < stored["+ x^2, x^3"]["gain"]
