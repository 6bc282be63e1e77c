"""Figures show the data they were given."""

from dataclasses import dataclass

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from aiscale import cost, plots
from aiscale.config import ConfigError, ModelConfig
from aiscale.plots import style

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
    shown = words(plots.collective("reduce_scatter", [["A0", "A1"], ["B0", "B1"]], [["Σ0", None], [None, "Σ1"]]))
    assert [word for word in shown if word[0] in "ABΣ"] == ["A0", "A1", "B0", "B1", "Σ0", "Σ1"]
    assert "reduce-scatter" in shown


def test_colours_follow_the_data_even_if_values_repeat():
    def colors(*example) -> list[int]:
        """Of each filled chunk, before and after; a sum has a stripe for each rank."""
        return ranks_of(box for box in plots.collective(*example).patches if box.get_fill() and box.get_facecolor()[3])

    assert colors("all_gather", [[7, None], [None, 7]], [[7, 7], [7, 7]]) == [0, 1, 0, 1, 0, 1]
    assert colors("broadcast", [[5], [None]], [[5], [5]]) == [0, 0, 0]
    assert colors("all_reduce", [[1], [2]], [[3], [3]]) == [0, 1, 0, 1, 0, 1]


def test_latency_and_bandwidth_match_the_points_and_the_link():
    points = {"all_reduce": (SIZES, [1e-4, 2e-4, 4e-3])}
    left, right = plots.latency_bandwidth(points, {"all_reduce": LINK}, world=4)
    np.testing.assert_allclose(lines(left, "measured")[0], np.column_stack([SIZES, [1e-4, 2e-4, 4e-3]]))
    sent = 1.5 * SIZES[2] / 4e-3 / 1e9
    assert lines(right, "measured")[0][-1] == pytest.approx([SIZES[2], sent])
    x, y = lines(left, "predicted")[0][-1]
    assert y == pytest.approx(LINK.seconds("all_reduce", x, 4))


def test_coinciding_curves_stay_visible():
    ax = plots.loss_curves({"serial": [3, 2], "mpi x2": [3, 2], "ddp x2": [3, 2]})
    widths = [line.get_linewidth() for line in ax.lines]
    assert widths == sorted(widths, reverse=True) and len(set(widths)) == 3
    np.testing.assert_array_equal(ax.lines[0].get_xydata(), [[1, 3], [2, 2]])


def test_validation_is_drawn_as_circles_at_its_own_losses():
    ax = plots.loss_curves({"ddp x2": [3, 2]}, {"ddp x2": [(1, 3.5), (2, 2.5)]})
    np.testing.assert_array_equal(lines(ax, "measured")[0], [[1, 3.5], [2, 2.5]])


def test_a_run_equal_bit_for_bit_is_labelled():
    ax = plots.loss_difference({"mpi x2": [0.0, 0.0], "ddp x2": [0.0, 1e-13]}, tolerance=1e-10)
    legend = [text.get_text() for text in ax.figure.legends[0].texts]
    assert legend == ["mpi x2 (equal bit for bit)", "ddp x2"]


def test_memory_bars_are_as_long_as_the_bytes():
    predicted = cost.training_bytes(MODEL, 4, 256)
    ax = plots.memory_bars({"fp32": predicted}, {"fp32": BYTES})
    drawn = bars(ax)
    for category, nbytes in BYTES.items():
        assert drawn[f"_measured:{category}"] * 2**20 == pytest.approx(nbytes)
        assert drawn[f"_predicted:{category}"] * 2**20 == pytest.approx(predicted[category])
    assert ax.get_xlabel() == "memory (MiB)"


def test_masks_show_which_tokens_each_token_attends_to():
    mask = np.tril(np.ones((4, 4)))
    gpt, bert = plots.attention_masks({"GPT": mask, "BERT": np.ones((4, 4))})
    np.testing.assert_array_equal(np.ravel(gpt.collections[0].get_array()), mask.ravel())
    np.testing.assert_array_equal(np.ravel(bert.collections[0].get_array()), np.ones(16))


def test_the_breakdown_adds_up_to_a_hundred():
    drawn = bars(plots.parameter_breakdown({"small": MODEL}))
    assert sum(drawn.values()) == pytest.approx(100)
    assert drawn["_mlp"] == pytest.approx(100 * cost.parameters(MODEL)["mlp"] / cost.parameter_count(MODEL))


def test_the_timeline_draws_every_event_at_its_rank_and_time():
    events = [(1, "backward", 0.010, 0.030, "backward"), (1, "all-reduce 1", 0.020, 0.040, "communication")]
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


def test_published_bars_end_at_their_value_in_a_hollow_diamond():
    ax = plots.published_vs_measured({"serial": 15264, "MPI": 1287}, {"serial": 400.0})
    ends = {c.get_label(): c.patches[0].get_x() + c.patches[0].get_width() for c in ax.containers}
    assert ends == pytest.approx({"_published:serial": 15264, "_published:MPI": 1287, "_measured:serial": 400})
    assert [point[0][0] for point in lines(ax, "published")] == [15264, 1287]


def test_message_counts_and_seconds_are_drawn_with_message_sizes_on_the_upper_axis():
    ax = plots.message_count([1, 4, 16], [0.1, 0.2, 0.4], [0.1, 0.15, 0.3], payload_bytes=16384)
    np.testing.assert_array_equal(lines(ax, "measured")[0], [[1, 0.1], [4, 0.2], [16, 0.4]])
    np.testing.assert_array_equal(lines(ax, "predicted")[0], [[1, 0.1], [4, 0.15], [16, 0.3]])
    assert [label.get_text() for label in ax.child_axes[0].get_xticklabels()] == ["16 KiB", "4 KiB", "1 KiB"]


def test_bars_are_as_long_as_the_bytes_in_the_named_unit():
    predicted = {"zero1": {"all_reduce": 400.0, "all_gather": 200.0}, "zero3": {"all_gather": 400.0}}
    measured = {"zero1": {"all_reduce": 410.0}}
    ax = plots.traffic_bars(predicted, measured, unit_bytes=100, unit="weights")
    widths = {bar.get_label(): [p.get_width() for p in bar] for bar in ax.containers}
    assert [round(p.get_width(), 9) for bar in ax.containers for p in bar] == [4.0, 2.0, 4.1, 4.0], widths
    assert sorted(text.get_text() for text in ax.texts) == ["4", "4.1", "6"]


def test_shards_show_each_ranks_rows_and_the_padding():
    ax = plots.shards({"weight": (67, 8), "bias": (3,)}, 4)
    widths = [[bar.get_width() for bar in group] for group in ax.containers]
    assert widths == [[17], [17], [17], [16], [1], [1], [1], [0]]
    assert ranks_of(bar for group in ax.containers for bar in group) == [0, 1, 2, 3] * 2
    assert ranks_of(ax.figure.legends[0].get_patches()) == [0, 1, 2, 3]
    padding = [patch.get_width() for patch in ax.patches if patch.get_label() == "_padding"]
    assert padding == [1, 1]


@dataclass
class Trace:
    seconds: list
    held_bytes: dict


def test_memory_of_a_step_is_stacked_in_mebibytes():
    held = {"parameters": [2**20] * 3, "activations": [0, 2**21, 0], "gathered parameters": [0, 2**20, 0]}
    trace = Trace([0.0, 0.1, 0.2], held)
    axes = plots.step_memory({"a": trace, "b": trace, "c": trace})
    assert [ax.get_visible() for ax in axes.flat] == [True, True, True, False]
    ax = axes[0, 0]
    top = {layer.get_label(): layer.get_paths()[0].vertices[:, 1].max() for layer in ax.collections}
    assert (top["_parameters"], top["_gathered parameters"], top["_activations"]) == (1, 2, 4)


def test_matrices_too_large_for_their_numbers_are_refused():
    with pytest.raises(ConfigError, match="at most 16 x 16 numbers: cut a corner out"):
        plots.matrices({"": np.ones((40, 2))})
