"""The figure of one payload in many messages draws what it is given."""

import matplotlib
import pytest

matplotlib.use("Agg")

from aiscale import plots  # noqa: E402
from aiscale.config import ConfigError  # noqa: E402


def test_counts_and_seconds_are_drawn_and_the_upper_axis_says_how_large_one_message_is():
    ax = plots.message_count([1, 4, 16], [0.1, 0.2, 0.4], [0.1, 0.15, 0.3], payload_bytes=16384)
    measured, predicted = ax.lines
    assert list(measured.get_xdata()) == list(predicted.get_xdata()) == [1, 4, 16]
    assert list(measured.get_ydata()) == [0.1, 0.2, 0.4]
    assert list(predicted.get_ydata()) == [0.1, 0.15, 0.3]
    assert predicted.get_linestyle() == "--" and measured.get_linestyle() == "-"
    upper = ax.child_axes[0]
    assert [label.get_text() for label in upper.get_xticklabels()] == ["16 KiB", "4 KiB", "1 KiB"]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["measured", "predicted"]


def test_a_prediction_may_be_left_out():
    ax = plots.message_count([1, 2], [0.1, 0.2], payload_bytes=1024)
    assert len(ax.lines) == 1


def test_as_many_times_as_counts_or_one_line_that_says_so():
    with pytest.raises(ConfigError, match="2 counts of messages but 1 values of predicted_s"):
        plots.message_count([1, 2], [0.1, 0.2], [0.1], payload_bytes=1024)


def test_the_time_axis_has_several_labels_even_where_times_differ_little():
    ax = plots.message_count([1, 4, 16], [0.0021, 0.0022, 0.009], payload_bytes=1024)
    ax.figure.canvas.draw()
    low, high = ax.get_ylim()
    assert sum(low <= tick <= high for tick in ax.get_yticks()) >= 2
