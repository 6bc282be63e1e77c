"""Bars of traffic show the bytes that they were given, in the unit that the axis names."""

import matplotlib
import pytest

from aiscale import plots
from aiscale.config import ConfigError

matplotlib.use("agg")


def test_bars_are_as_long_as_the_bytes_in_the_named_unit():
    predicted = {"zero1": {"all_reduce": 400.0, "all_gather": 200.0}, "zero3": {"all_gather": 400.0}}
    measured = {"zero1": {"all_reduce": 410.0}}
    ax = plots.traffic_bars(predicted, measured, unit_bytes=100, unit="weights")
    widths = {bar.get_label(): [p.get_width() for p in bar] for bar in ax.containers}
    assert [round(p.get_width(), 9) for bar in ax.containers for p in bar] == [4.0, 2.0, 4.1, 4.0], widths
    assert ax.get_xlabel() == "sent by a rank in one step (weights)"
    assert [tick.get_text() for tick in ax.get_yticklabels()] == [
        "zero1, predicted",
        "zero1, measured",
        "zero3, predicted",
    ]
    assert sorted(text.get_text() for text in ax.texts) == ["4", "4.1", "6"]


def test_nothing_to_draw_is_refused():
    with pytest.raises(ConfigError, match="nothing to draw"):
        plots.traffic_bars()
