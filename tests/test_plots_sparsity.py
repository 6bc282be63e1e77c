"""Figures of Radius draw the numbers they were given."""

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
from instruments import radius_plots

from aiscale.errors import ConfigError
from aiscale.measure import plots
from aiscale.plan import published

matplotlib.use("agg")


@pytest.fixture(autouse=True)
def house_style():
    with plt.rc_context():
        plots.use_style()
        yield
    plt.close("all")


def lines(ax, kind):
    return [line for line in ax.lines if line.get_label() == f"_{kind}"]


def test_loss_error_is_the_baseline_minus_the_run():
    losses = {"dense": [3.0, 2.0, 1.0, 1.0], "radius d 0.4": [3.0, 2.5, 1.5, 1.25]}
    axes = radius_plots.curves(losses, {"dense": [(4, 9.0)], "radius d 0.4": [(4, 9.5)]}, switch=1)
    assert axes[1].lines[0].get_ydata().tolist() == [0.0, -0.5, -0.5, -0.25]
    assert [line.get_ydata().tolist() for line in lines(axes[2], "measured")] == [[9.0], [9.5]]
    axes = radius_plots.curves(losses, {}, window=2)
    assert axes[1].lines[0].get_xydata().tolist() == [[2, -0.25], [4, -0.375]]
    errors = {"radius d 0.4": [(2, -0.3, -0.4, -0.1), (4, -0.2, -0.2, -0.2)]}
    spread = {"dense": [(4, 9.0, 8.5, 9.2)]}
    axes = radius_plots.curves(losses, spread, errors=errors)
    assert axes[1].lines[0].get_xydata().tolist() == [[2, -0.3], [4, -0.2]]
    shades = [ax.collections[0].get_paths()[0].get_extents() for ax in axes[1:]]
    assert [(shade.ymin, shade.ymax) for shade in shades] == [(-0.4, -0.1), (8.5, 9.2)]
    with pytest.raises(ConfigError, match=r"^the baseline 'dense' is not among the runs radius$"):
        radius_plots.curves({"radius": [1.0]}, {})


def test_speedups_over_the_link_show_their_marks():
    measured = {
        "radius d 0.4": [(100, 1.6), (1000, 1.1)],
        "dense bf16, overlapped": [(100, 1.9), (1000, 1.2)],
    }
    ax = plots.link_speedups(measured, marks={"here": 300})
    assert [line.get_ydata().tolist() for line in lines(ax, "measured")] == [[1.6, 1.1], [1.9, 1.2]]
    assert [text.get_text() for text in ax.texts] == ["here"]
    assert 300 in [line.get_xdata()[0] for line in ax.lines]
    assert ax.get_xscale() == "log"


def test_the_page_of_radius_draws_the_stored_ratios_shares_and_intervals():
    results = published.measured("radius_cpu")
    axes = radius_plots.page(results, times=[(0.4, 0.8)], perplexities=[(1, 0)], share=0.4)
    (times, links), (by_bytes, trend) = axes
    step_s = {row["name"]: row["step_s"]["median"] for row in results["speed"]["rows"]}
    ratio = step_s["radius d 0.4, fp32, at once"] / step_s["dense, fp32, at once"]
    assert [0.4, ratio] in lines(times, "measured")[0].get_xydata().tolist()
    assert lines(times, "predicted")[0].get_xydata().tolist() == [[0, 0.6], [1, 1]]
    rates = [row for row in results["speed"]["rates"] if row["name"] == "dense, bf16, overlapped"]
    expected = [[row["link_mbit_s"], row["speedup"]["median"]] for row in rates]
    assert lines(links, "measured")[0].get_xydata().tolist() == expected
    radius = [
        row
        for row in results["sweep"]["rows"]
        if row["case"] == "radius d 0.4 T 200 sum switch 0.2"
    ]
    over = {row["steps"]: row["val_over_dense_pct"] for row in radius}
    measured = lines(by_bytes, "measured")[0].get_xydata().tolist()
    assert [radius[0]["wire_share"], over[2000]["mean"]] in measured
    (bar,) = trend.containers[0].lines[2]
    drawn = [segment[:, 1] for segment in bar.get_segments()]
    np.testing.assert_allclose(
        drawn, [[each["low"], each["high"]] for _, each in sorted(over.items())]
    )


def test_a_studys_ratios_have_a_mark_at_the_median_and_a_line_over_the_interval():
    ax = plots.study_ratios({"micro 2": [{"median": 2.0, "low": 1.5, "high": 3.0}]})
    interval, mark = ax.lines[:2]
    assert (interval.get_xdata().tolist(), mark.get_xdata().tolist()) == ([1.5, 3.0], [2.0])
