"""Rules that judge a benchmark, tried on machines whose truth is known."""

import itertools
import random

import pytest

from aiscale.measure.study import coverage
from aiscale.plan import published

NOISE = published.measured("noise")
SILENT = {"silent": {"over_median": [1.0] * 100}}


def test_a_study_has_the_planted_ratio_where_nothing_disturbs_it(monkeypatch):
    monkeypatch.setattr(coverage, "DRIFTING", 0.0)
    monkeypatch.setattr(coverage, "NEIGHBOURS", 0.0)
    runs = coverage.simulated_runs(SILENT, ratio=1.3, rounds=4, seed=0)
    assert [name for name, _ in runs] == ["base", "a"] * 4 + ["base"]
    assert coverage.paired_ratios(runs) == pytest.approx([1.3] * 4)
    tried = coverage.try_rule(coverage.by_coins, SILENT, ratio=1.3, rounds=6)
    assert (tried.wrong, tried.told, tried.width) == (0, 100, 0)


def test_a_neighbour_and_a_drift_disturb_some_machines():
    unlike = 0
    for seed in range(100):
        seconds = [s for name, s in coverage.simulated_runs(SILENT, 1.0, 6, seed) if name == "base"]
        unlike += max(seconds) / min(seconds) > 1.01
    # 65 of 100 by design: 1 - 0.5 * 0.7
    assert 50 <= unlike <= 80


def test_coins_about_keep_their_promise_and_tell_more_the_longer_they_measure():
    """What lesson 10 says of the three rules and of its own."""
    wrong, told = {}, {}
    rules = (coverage.one_pair, coverage.means, coverage.paired_range, coverage.by_coins)
    for rule, rounds in itertools.product(rules, (6, 20)):
        tried = coverage.try_rule(rule, NOISE, ratio=1.05, rounds=rounds)
        wrong[rule.__name__, rounds], told[rule.__name__, rounds] = tried.wrong, tried.told
    assert wrong["one_pair", 6] > 30
    # It promises 5; neighbouring ratios share a base, and the lesson says so.
    assert wrong["by_coins", 6] < 10 and wrong["by_coins", 20] < 10
    assert told["by_coins", 20] > told["by_coins", 6]
    assert told["by_coins", 20] > told["paired_range", 20]
    assert told["by_coins", 20] > told["means", 20]


def test_a_rule_that_lies_is_seen():
    def narrow(runs):
        middle = random.Random(0).gauss(1.2, 0.1)
        return middle, middle + 0.01

    assert coverage.try_rule(narrow, NOISE, ratio=1.05, rounds=6).wrong > 90
