"""Lesson 07's two figures of stored measurements: Radius beside what its authors published.

results = published.measured("radius_cpu")
radius_plots.page(results, times=[(0.4, 0.8)], perplexities=[(0.4, -0.1)], share=0.49)     # what it gains and costs
radius_plots.long_curves(results["sweep"], {"radius d 0.4": "radius d 0.4 T 200 sum"})     # the artifact's curves
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from aiscale.config import ConfigError
from aiscale.plots import sparsity, style
from aiscale.plots.sparsity import Points

_AT_ONCE = "dense, fp32, at once"
_LINKS = {
    "dense, bf16, overlapped": "dense bf16, overlapped",
    "radius d 0.4, fp32, at once": "radius d 0.4",
    "radius d 0.4, fp32, overlapped": "radius d 0.4, overlapped",
    "radius d 0.4, bf16, overlapped": "radius d 0.4, bf16, overlapped",
}
_CASES = {
    "radius d 0.4": "radius d 0.4 T 200 sum",
    "radius turns, wait": "radius d 0.4 T 200 turns 4 wait",
    "top-k d 0.1": "top-k d 0.1",
    "powersgd rank 17": "powersgd rank 17",
}
_HIGHEST_PCT = 6.0  #: of the perplexities over bytes; what is above is written


def page(results: Mapping, *, times: Points, perplexities: Points, share: float) -> np.ndarray:
    """Four panels: time by density, speed-up by link, perplexity by bytes, perplexity by length of training.

    results: the stored measurement radius_cpu. Published: times [(density, step over a dense one)] and perplexities
    [(share of dense bytes, percent over dense)]. share: of a step, that the exchange takes. Raises ConfigError if the
    measurement lacks its times or its runs.
    """
    speed, sweep = results.get("speed"), results.get("sweep")
    if not (speed and speed["rates"] and sweep and sweep["rows"]):
        raise ConfigError("nothing to draw: give a measurement with speed, rates and sweep, as radius_cpu")
    axes = plt.subplots(2, 2, figsize=(9.6, 7.6), layout="constrained")[1]
    own = {row["density"]: row["step_s"]["median"] for row in speed["rows"] if _plain(row)}
    ratios = [(density, seconds / own[1.0]) for density, seconds in own.items() if density < 1]
    sparsity.density_times(ratios, [(0, 1 - share), (1, 1)], times, source="64 A100", ax=axes[0, 0])
    speedups: dict[str, list] = {}
    for row in speed["rates"]:
        if row["name"] in _LINKS:
            speedups.setdefault(_LINKS[row["name"]], []).append((row["link_mbit_s"], row["speedup"]["median"]))
    sparsity.link_speedups(speedups, marks={"Perlmutter's ratio": speed["link_mbit_s"]}, ax=axes[0, 1])
    _by_bytes(axes[1, 0], sweep, perplexities)
    trend = {label: [(row["steps"], *_over(row)) for row in _runs(sweep, case)] for label, case in _CASES.items()}
    sparsity.perplexity_trend(trend, ax=axes[1, 1])
    return axes


def _by_bytes(ax: Axes, sweep: Mapping, perplexities: Points) -> None:
    """Our cases at the length that all have, and the published ones."""
    steps = max(set.intersection(*({row["steps"] for row in _runs(sweep, case)} for case in _CASES.values())))
    cases = {"radius": [f"radius d {density} T 200 sum" for density in (0.1, 0.4, 0.5, 0.9)]}
    cases["radius turns, wait"] = [_CASES["radius turns, wait"]]
    ours = {
        label: [
            (row["wire_share"], *_over(row)) for case in names for row in _runs(sweep, case) if row["steps"] == steps
        ]
        for label, names in cases.items()
    }
    above = [point for points in ours.values() for point in points if point[1] > _HIGHEST_PCT]
    sparsity.perplexities({name: [p for p in ps if p not in above] for name, ps in ours.items()}, ax)
    style.draw(ax, "published", *zip(*perplexities, strict=True))
    for wire, mean, *_ in above:
        text = {"ha": "center", "va": "top", "fontsize": 8.5, "color": style.INK}
        ax.annotate(f"{mean:+.0f} % ↑", (wire, _HIGHEST_PCT), **text)
    ax.xaxis.set_major_formatter(PercentFormatter(1, 0))
    ax.set(xlim=(0, 1), ylim=(-_HIGHEST_PCT / 2, _HIGHEST_PCT), xlabel="sent (% of dense bytes)")


def long_curves(sweep: Mapping, cases: Mapping[str, str]) -> np.ndarray:
    """The artifact's three curves of the longest stored runs of `cases`, {label: case}, and of dense."""
    rows = {label: _runs(sweep, case) for label, case in cases.items()}
    steps = max(set.intersection(*({row["steps"] for row in group} for group in rows.values())), default=0)
    chosen = {label: row for label, group in rows.items() for row in group if row["steps"] == steps}
    dense = next((row for row in sweep["rows"] if row["case"] == "dense" and row["steps"] == steps), None)
    if dense is None:
        raise ConfigError(f"no length has runs of dense and of all of {', '.join(cases.values())}")
    everything = {"dense": dense, **chosen}
    losses = {label: [point[:2] for point in row["train_curve"]] for label, row in everything.items()}
    ppl = {label: [(n, *map(math.exp, nats)) for n, *nats in row["val_curve"]] for label, row in everything.items()}
    errors = {label: row["error_curve"] for label, row in chosen.items()}
    return sparsity.radius_curves(losses, ppl, errors=errors, switch=next(iter(chosen.values()))["switch"] * steps)


def _plain(row: Mapping) -> bool:
    """A step of dense or published Radius, in one fp32 message after the backward pass."""
    return row["name"] == _AT_ONCE or row["name"] == f"radius d {row['density']:g}, fp32, at once"


def _runs(sweep: Mapping, case: str) -> list[Mapping]:
    """The runs of a case after a dense fifth, with as many seeds as any."""
    seeds = max(len(row["seeds"]) for row in sweep["rows"])
    return [row for row in sweep["rows"] if row["case"] == f"{case} switch 0.2" and len(row["seeds"]) == seeds]


def _over(row: Mapping) -> tuple[float, float, float]:
    """(mean, lowest, highest) percent over dense."""
    over = row["val_over_dense_pct"]
    return over["mean"], over["low"], over["high"]
