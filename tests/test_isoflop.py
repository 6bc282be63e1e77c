"""The stored runs of equal FLOPs: rates off the edge, budgets spent, and what lesson 11 says."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from aiscale.plan import published

sys.path.append(str(Path(__file__).parents[1] / "notebooks"))
from instruments import isoflop

RUNS = published.measured("isoflop")["runs"]
BUDGETS = isoflop.budgets_of(RUNS)
CASES = [(b, width) for b in (1e10, 4e10, 1.6e11) for width in isoflop.WIDTHS[b]]


@pytest.mark.parametrize(("budget", "width"), CASES)
def test_a_searched_rate_has_a_worse_one_on_either_side(budget, width):
    assert budget in BUDGETS, "not all seeds ran at the rate of the search"
    losses = defaultdict(list)
    for run in RUNS:
        searched = run["seed"] in isoflop.SEARCH_SEEDS[budget]
        if searched and (run["budget"], run["width"]) == (budget, width):
            losses[run["log2_rate"]].append(run["loss"])
    best = int(np.log2(isoflop.best_rates(RUNS)[budget, width]))
    seeds = len(losses[best])
    for neighbour in (best - 1, best + 1):
        assert len(losses[neighbour]) == seeds
        assert fmean(losses[neighbour]) > fmean(losses[best])


def test_every_run_spends_its_budget_and_reads_no_byte_twice_on_average():
    text = len(isoflop.corpus()[0])
    for run in RUNS:
        flops = isoflop.shape_of_width(run["width"]).flops_per_token(isoflop.LENGTH)
        assert run["bytes"] * flops == pytest.approx(run["budget"], rel=0.01)
        assert run["bytes"] < 1.1 * text


def test_the_lesson_says_what_the_runs_say():
    """At four times the FLOPs about twice the parameters, each with 60 to 90 bytes of text."""
    sizes, each = [], []
    for budget in BUDGETS:
        parameters, read, losses = isoflop.curve(RUNS, budget)
        size = isoflop.lowest(parameters, losses.mean(1))[0]
        assert parameters[0] < size < parameters[-1]
        sizes.append(size)
        ratio = np.log(read / parameters)
        each.append(np.exp(np.interp(np.log(size), np.log(parameters), ratio)))
    slope = np.polyfit(np.log(BUDGETS), np.log(sizes), 1)[0]
    assert 0.5 < slope < 0.7
    assert 50 < min(each) and max(each) < 100


def test_without_embeddings_the_slope_is_kaplans():
    """0.73, as the lesson says; and embeddings are 72 to 21 % of the models of its panels."""
    sizes, shares = [], []
    for budget in BUDGETS:
        parameters, _, losses = isoflop.curve(RUNS, budget)
        embeddings = isoflop.embeddings_of(np.array(isoflop.WIDTHS[budget]))
        shares.extend(embeddings / parameters)
        sizes.append(isoflop.lowest(parameters - embeddings, losses.mean(1))[0])
    slope = np.polyfit(np.log(BUDGETS), np.log(sizes), 1)[0]
    assert slope == pytest.approx(0.73, abs=0.01)
    assert (max(shares), min(shares)) == pytest.approx((0.72, 0.21), abs=0.005)


def test_a_run_is_the_same_again_and_learns():
    short = isoflop.train(8, budget=2e9, rate=2**-5, seed=0)
    assert short == isoflop.train(8, budget=2e9, rate=2**-5, seed=0)
    assert short["parameters"] == 4320
    assert short["loss"] < np.log(256) - 1.5
