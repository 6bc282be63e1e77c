"""Figures show the data they were given."""

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from aiscale.measure import plots
from aiscale.measure.plots import style
from aiscale.plan import cost
from aiscale.plan.config import ModelConfig

matplotlib.use("agg")
MODEL = ModelConfig(n_layer=6, n_head=6, d_model=384, vocab_size=172, max_seq_len=256)
LINK = cost.AlphaBeta(50e-6, 1e9)
SIZES = [2**10, 2**15, 2**20]
BYTES = {"parameters": 4.0e6, "gradients": 4.0e6, "optimizer states": 8.0e6, "activations": 3.0e7}


@pytest.fixture(autouse=True, scope="module")
def house_style():
    with plt.rc_context({"figure.max_open_warning": 0}):
        plots.use_style()
        yield
    plt.close("all")


def bars(ax: Axes) -> dict[str, float]:
    return {c.get_label(): sum(patch.get_width() for patch in c.patches) for c in ax.containers}


def lines(ax: Axes, kind: str) -> list[np.ndarray]:
    return [line.get_xydata() for line in ax.lines if line.get_label() == f"_{kind}"]


def ranks_of(boxes) -> list[int]:
    """The rank whose colour each box has; boxes in other colours are left out."""
    colors = [to_hex(box.get_facecolor()).upper() for box in boxes]
    return [style.RANK_COLORS.index(color) for color in colors if color in style.RANK_COLORS]


def words(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.texts]


def test_a_collective_shows_every_chunk_before_and_after():
    shown = words(
        plots.collective(
            "reduce_scatter", [["A0", "A1"], ["B0", "B1"]], [["Σ0", None], [None, "Σ1"]]
        )
    )
    assert [word for word in shown if word[0] in "ABΣ"] == ["A0", "A1", "B0", "B1", "Σ0", "Σ1"]
    assert "reduce-scatter" in shown


def test_colours_follow_the_data_even_if_values_repeat():
    def colors(*example) -> list[int]:
        """Of each filled chunk, before and after; a sum has a stripe for each rank."""
        return ranks_of(
            box
            for box in plots.collective(*example).patches
            if box.get_fill() and box.get_facecolor()[3]
        )

    assert colors("all_gather", [[7, None], [None, 7]], [[7, 7], [7, 7]]) == [0, 1, 0, 1, 0, 1]
    assert colors("broadcast", [[5], [None]], [[5], [5]]) == [0, 0, 0]
    assert colors("all_reduce", [[1], [2]], [[3], [3]]) == [0, 1, 0, 1, 0, 1]


def test_latency_and_bandwidth_match_the_points_and_the_link():
    left, right = plots.latency_bandwidth(SIZES, [1e-4, 2e-4, 4e-3], LINK, world=4)
    np.testing.assert_allclose(
        lines(left, "measured")[0], np.column_stack([SIZES, [1e-4, 2e-4, 4e-3]])
    )
    sent = 1.5 * SIZES[2] / 4e-3 / 1e9
    assert lines(right, "measured")[0][-1] == pytest.approx([SIZES[2], sent])
    x, y = lines(left, "predicted")[0][-1]
    assert y == pytest.approx(LINK.seconds("all_reduce", x, 4))
    (legend,) = left.figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["measured", "fitted"]


def test_memory_bars_are_as_long_as_the_bytes():
    predicted = cost.training_bytes(MODEL, 4, 256)
    ax = plots.memory_bars({"fp32": predicted}, {"fp32": BYTES})
    drawn = bars(ax)
    for category, nbytes in BYTES.items():
        assert drawn[f"_measured:{category}"] * 2**20 == pytest.approx(nbytes)
    (ticks,) = (ticks for ticks in ax.collections if ticks.get_label() == "_predicted:fp32")
    ends = sorted(segment[0][0] * 2**20 for segment in ticks.get_segments())
    assert ends[-1] == pytest.approx(sum(predicted.values()))
    assert ax.get_xlabel() == "memory (MiB)"
    ax = plots.memory_bars({"fp32": predicted}, capacity_bytes=2**30)
    assert min(ax.get_ylim()) < -0.5, (
        "the first bar is whole below the words of the device's memory"
    )


def test_the_timeline_draws_every_event_at_its_rank_and_time():
    events = [
        (1, "backward", 0.010, 0.030, "backward"),
        (1, "all-reduce 1", 0.020, 0.040, "communication"),
    ]
    ax = plots.timeline(events)
    (backward,), (sends,) = (container.patches for container in ax.containers)
    assert (backward.get_x(), backward.get_width()) == pytest.approx((10, 20))
    assert (sends.get_x(), sends.get_width()) == pytest.approx((20, 20))
    assert backward.get_y() + backward.get_height() <= sends.get_y() + 1e-9  # rows do not overlap
    assert [label.get_text() for label in ax.get_yticklabels()] == ["rank 1"]


def test_speedup_draws_its_points():
    ax = plots.speedup([1, 2, 4], {"ddp": [1, 1.9, 2.2]}, {"ddp": [1, 2, 2.1]})
    np.testing.assert_array_equal(lines(ax, "measured")[0], [[1, 1], [2, 1.9], [4, 2.2]])
    np.testing.assert_array_equal(lines(ax, "predicted")[0], [[1, 1], [2, 2], [4, 2.1]])


def test_bars_are_as_long_as_the_bytes_in_the_named_unit():
    predicted = {
        "zero1": {"all_reduce": 400.0, "all_gather": 200.0},
        "zero3": {"all_gather": 400.0},
    }
    measured = {"zero1": {"all_reduce": 410.0}}
    ax = plots.traffic_bars(predicted, measured, unit_bytes=100, unit="weights")
    widths = {bar.get_label(): [p.get_width() for p in bar] for bar in ax.containers}
    assert [round(p.get_width(), 9) for bar in ax.containers for p in bar] == [4.1, 4.0], widths
    assert sorted(text.get_text() for text in ax.texts) == ["4", "4.1"]
