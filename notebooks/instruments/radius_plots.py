"""Figures of lesson 08 and its appendix: how training goes, and Radius beside what its authors published.

radius_plots.curves({"dense": losses, "radius d 0.4": losses}, perplexities)
case = radius_plots.case()                                                                 # the published times
results = published.measured("radius_cpu")
radius_plots.page(results, times=[(0.4, 0.8)], perplexities=[(0.4, -0.1)], share=0.49)     # what it gains and costs
radius_plots.long_curves(results["sweep"], {"radius d 0.4": "radius d 0.4 T 200 sum"})     # the artifact's curves
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from aiscale.errors import ConfigError
from aiscale.measure.plots import sparsity, style
from aiscale.measure.plots.curves import Series, xy
from aiscale.measure.plots.sparsity import Points
from aiscale.plan import published

_AT_ONCE = "dense, fp32, at once"
_LINKS = {
    "dense, bf16, overlapped": "dense bf16, overlapped",
    "radius d 0.4, fp32, at once": "radius d 0.4",
    "radius d 0.4, fp32, overlapped": "radius d 0.4, overlapped",
    "radius d 0.4, bf16, overlapped": "radius d 0.4, bf16, overlapped",
}
_CASES = {
    "radius d 0.4": "radius d 0.4 T 200 sum",
    "top-k d 0.1": "top-k d 0.1",
    "powersgd rank 17": "powersgd rank 17",
}
_HIGHEST_PCT = 6.0  #: of the perplexities over bytes; what is above is written


def case() -> dict:
    """Draw the published times of GPT-2.0B by density, and a line through them. Returns times [(density, step over a
    dense one)], perplexities [(share of dense bytes, percent over dense)], the fitted share of a whole exchange in a
    dense step, and the fitted step at density 1 over a dense one. A run has 300,000 steps, whose first fifth is dense.
    """
    dense, *rows = (row for row in published.table("radius_perlmutter") if row["model"] == "GPT-2.0B")
    rows = [row for row in rows if row["update_T"] == 200]  # T: steps from one dense step to the next
    sent = [row["density_d"] + (1 - row["density_d"]) / row["update_T"] for row in rows]  # with the dense steps
    steps = [(row["s_per_iter_if_300k"] / dense["s_per_iter_if_300k"] - 0.2) / 0.8 for row in rows]
    share, fixed = np.polyfit(sent, steps, 1)
    times = [(row["density_d"], step) for row, step in zip(rows, steps, strict=True)]
    ax = sparsity.density_times(published=times, source="64 A100")
    ax.plot([0, 1], [fixed, fixed + share], color=style.MUTED, linewidth=1.2, zorder=1)
    ax.text(0.1, fixed + 0.1 * share - 0.06, f"fitted: {fixed:.2f} + {share:.2f} d", va="top", color=style.MUTED)
    ax.set_ylim(0, 1.08 * (fixed + share))
    worse = [(w, 100 * (row["val_ppl"] / dense["val_ppl"] - 1)) for w, row in zip(sent, rows, strict=True)]
    return {"times": times, "perplexities": worse, "share": share, "at density 1": fixed + share}


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
    by_bytes(axes[1, 0], sweep, perplexities)
    trend = {label: [(row["steps"], *_over(row)) for row in _runs(sweep, case)] for label, case in _CASES.items()}
    sparsity.perplexity_trend(trend, ax=axes[1, 1])
    return axes


def by_bytes(ax: Axes, sweep: Mapping, perplexities: Points) -> None:
    """Our cases at the length that all have, and the published ones."""
    steps = max(set.intersection(*({row["steps"] for row in _runs(sweep, case)} for case in _CASES.values())))
    cases = [f"radius d {density} T 200 sum" for density in (0.1, 0.4, 0.5, 0.9)]
    runs = [row for case in cases for row in _runs(sweep, case) if row["steps"] == steps]
    ours = [(row["wire_share"], *_over(row)) for row in runs]
    above = [point for point in ours if point[1] > _HIGHEST_PCT]
    sparsity.perplexities({"radius": [point for point in ours if point not in above]}, ax)
    style.draw(ax, "published", *zip(*perplexities, strict=True))
    for wire, mean, *_ in above:
        text = {"va": "top", "fontsize": 8.5, "color": style.INK}
        ax.annotate(f"↑ ours: {mean:+.0f} %", (wire, _HIGHEST_PCT), **text)
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
    return curves(losses, ppl, errors=errors, switch=next(iter(chosen.values()))["switch"] * steps)


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


# How training goes ---------------------------------------------------------------------------------------------------


def curves(
    losses: Mapping[str, Series],
    perplexities: Mapping[str, Series],
    *,
    errors: Mapping[str, Sequence[tuple[float, ...]]] | None = None,
    switch: float | None = None,
    window: int = 1,
) -> np.ndarray:
    """Training loss, loss error (dense minus the run) and validation perplexity, as in the artifact's figures.

    losses, perplexities: {label: values by step, or [(step, value)]}, "dense" among them. errors: {label: [(step,
    mean, low, high)]} over several seeds; by default the differences of `losses`. A perplexity may also have low and
    high. switch: the last dense step. window: steps over which losses are averaged. Returns three Axes.
    """
    if "dense" not in losses:
        raise ConfigError(f"the baseline 'dense' is not among the runs {', '.join(losses) or '(none)'}")
    axes = plt.subplots(3, 1, figsize=(7.5, 7.4), layout="constrained", sharex=True)[1]
    looks = style.method_looks(dict.fromkeys([*losses, *perplexities]))
    colors = {label: look["color"] for label, look in looks.items()}
    smooth = {label: _averaged(*xy(series), window) for label, series in losses.items()}
    for label, (steps, values) in smooth.items():
        axes[0].plot(steps, values, color=colors[label], linewidth=3.2 if label == "dense" else 1.4)
        if label != "dense" and errors is None:
            shared, here, there = np.intersect1d(steps, smooth["dense"][0], return_indices=True)
            axes[1].plot(shared, smooth["dense"][1][there] - values[here], color=colors[label], linewidth=1.4)
    for label, points in (errors or {}).items():
        steps, means, *_ = zip(*points, strict=True)
        axes[1].plot(steps, means, color=colors[label], linewidth=1.4)
        _shade(axes[1], points, colors[label])
    for label, series in perplexities.items():
        spread = [point for point in series if np.ndim(point) and len(point) == 4]
        style.draw(axes[2], "measured", *xy([point[:2] for point in spread] or series), **looks[label])
        _shade(axes[2], spread, colors[label])
    axes[1].axhline(0, color=style.FAINT, linewidth=1.4, zorder=1)
    for ax in axes if switch is not None else ():
        ax.axvline(switch, color=style.MUTED, linewidth=0.9, linestyle=":", zorder=1)
    style.steps_axis(axes[2].xaxis)
    axes[0].set_ylabel("training loss (nats)")
    axes[1].set_ylabel("dense minus run (nats)")
    axes[2].set(ylabel="validation perplexity", xlabel="optimizer step")
    style.legend_above(axes[0], [Line2D([], [], label=label, **look) for label, look in looks.items()])
    return axes


def _shade(ax: Axes, points: Sequence[tuple[float, ...]], color: str) -> None:
    if points:
        steps, _, low, high = zip(*points, strict=True)
        ax.fill_between(steps, low, high, color=color, alpha=0.2, linewidth=0, zorder=1)


def _averaged(steps: np.ndarray, values: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Means over consecutive windows of `window` points, each at its last step."""
    whole = len(values) // window * window
    return steps[window - 1 : whole : window], values[:whole].reshape(-1, window).mean(axis=1)
