"""How often a rule is wrong: it judges studies of simulated machines, whose truth is known.

    noise = published.measured("noise")
    tried = try_rule(rule, noise, ratio=1.05, rounds=6)
    tried.wrong, tried.told                      # machines of 100

A rule takes runs, [(name, seconds)] in the order of the clock, base before and after each "a". It
returns (low, high): where it says that "a over base" lies.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from aiscale.measure.study.results import spread

Runs = list[tuple[str, float]]
Rule = Callable[[Runs], tuple[float, float]]

MACHINES = 100
DRIFTING = 0.5  #: share of machines that slow down, or speed up, from the first run to the last
DRIFT = 0.3  #: by so much at most
NEIGHBOURS = 0.3  #: share of machines on which another program runs for a while
NEIGHBOUR = 1.5  #: so many times as long a run takes meanwhile
NEIGHBOUR_RUNS = 3  #: runs that it meets


@dataclass(frozen=True, kw_only=True)
class Tried:
    """Of `machines`: how often the truth lay outside, and how often a difference was told."""

    machines: int
    wrong: int  #: the interval does not hold the true ratio
    told: int  #: the interval does not hold 1
    width: float  #: of the interval in the middle


def simulated_runs(records: Mapping[str, dict], ratio: float, rounds: int, seed: int) -> Runs:
    """A study of one machine: base, a, base, a, ..., base; "a" takes `ratio` times as long.

    Noise is a piece of one of the records, so that neighbours in time are as alike as they were.
    """
    draw = random.Random(seed)
    noise = draw.choice(list(records.values()))["over_median"]
    length = 2 * rounds + 1
    start = draw.randrange(len(noise) - length)
    drift = draw.uniform(-DRIFT, DRIFT) if draw.random() < DRIFTING else 0.0
    disturbed = range(0)
    if draw.random() < NEIGHBOURS:
        first = draw.randrange(length)
        disturbed = range(first, first + NEIGHBOUR_RUNS)
    runs = []
    for number in range(length):
        name = "a" if number % 2 else "base"
        seconds = ratio if name == "a" else 1.0
        seconds *= noise[start + number] * (1 + drift * number / length)
        if number in disturbed:
            seconds *= NEIGHBOUR
        runs.append((name, seconds))
    return runs


def paired_ratios(runs: Runs) -> list[float]:
    """Each run of "a" over the mean of the bases beside it."""
    ratios = []
    for number, (name, seconds) in enumerate(runs):
        if name == "a":
            ratios.append(seconds / statistics.fmean([runs[number - 1][1], runs[number + 1][1]]))
    return ratios


def try_rule(
    rule: Rule, records: Mapping[str, dict], *, ratio: float, rounds: int, machines: int = MACHINES
) -> Tried:
    """The rule on so many machines; the same ones for each rule."""
    wrong, told, widths = 0, 0, []
    for seed in range(machines):
        low, high = rule(simulated_runs(records, ratio, rounds, seed))
        wrong += not low <= ratio <= high
        told += not low <= 1 <= high
        widths.append(high - low)
    return Tried(machines=machines, wrong=wrong, told=told, width=statistics.median(widths))


# Rules -------------------------------------------------------------------------------------------


def one_pair(runs: Runs) -> tuple[float, float]:
    """One run of each, believed to 2 %."""
    ratio = runs[1][1] / runs[0][1]
    return 0.98 * ratio, 1.02 * ratio


def means(runs: Runs) -> tuple[float, float]:
    """The ratio of the means, plus and minus two standard errors, as if all runs were unrelated."""
    a, base = _seconds(runs, "a"), _seconds(runs, "base")
    ratio = statistics.fmean(a) / statistics.fmean(base)
    error = ratio * (_relative_error(a) ** 2 + _relative_error(base) ** 2) ** 0.5
    return ratio - 2 * error, ratio + 2 * error


def paired_range(runs: Runs) -> tuple[float, float]:
    """From the smallest to the largest of the ratios to the bases beside it."""
    ratios = paired_ratios(runs)
    return min(ratios), max(ratios)


def by_coins(runs: Runs) -> tuple[float, float]:
    """The range without as many ratios on both sides as leaves 95 %: what a study's `summary` does.

    Each ratio lies above the true one with probability 1/2, like heads of a coin.
    """
    found = spread(paired_ratios(runs))
    return found["low"], found["high"]


def _seconds(runs: Runs, name: str) -> list[float]:
    return [seconds for each, seconds in runs if each == name]


def _relative_error(seconds: Sequence[float]) -> float:
    return statistics.stdev(seconds) / len(seconds) ** 0.5 / statistics.fmean(seconds)
