"""Figures show the data they were given, with units, and are legible at the width of a notebook."""

import math
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from aiscale import cost, plots
from aiscale.config import ConfigError, ModelConfig
from aiscale.cost.parameters import block_shapes
from aiscale.plots import style

matplotlib.use("agg")
MODEL = ModelConfig(n_layer=6, n_head=6, d_model=384, vocab_size=172, max_seq_len=256)
PARALLEL = ModelConfig(n_layer=2, n_head=4, n_kv_head=2, d_model=64, parallel_residual=True, activation="swiglu")
LINK = cost.Link(50e-6, 1e9)
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


def test_figures_can_be_drawn_into_given_axes():
    figure, (left, right) = plt.subplots(1, 2)
    assert plots.loss_curves({"serial": [2, 1]}, ax=left) is left
    assert plots.memory_bars({"fp32": BYTES}, ax=right) is right


# Each draws its data -------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("world", [2, 3, 5])
def test_the_drawn_ring_ends_with_all_sums_everywhere_after_2_n_minus_2_steps(world):
    states = plots.ring_states(world)
    assert len(states) == 1 + 2 * (world - 1)
    after_reduce_scatter = states[world - 1][0]
    complete = [sum(len(cell) == world for cell in row) for row in after_reduce_scatter]
    assert complete == [1] * world
    assert all(len(cell) == world for row in states[-1][0] for cell in row)
    ax, top = plots.ring_steps(world), world + 2.4
    stripes = [box for box in ax.patches if box.get_facecolor()[3] and ranks_of([box]) and box.get_x() < world]
    start = sorted((box for box in stripes if box.get_y() > top), key=lambda box: -box.get_y())
    assert ranks_of(start) == [rank for rank in range(world) for _ in range(world)]
    key = [box for box in stripes if box.get_width() == 0.4]
    names = {round(text.get_position()[1], 6): text.get_text() for text in ax.texts}
    assert [names[round(box.get_y() + 0.2, 6)] for box in key] == [f"from rank {rank}" for rank in ranks_of(key)]


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


def test_memory_over_time_stacks_to_the_total():
    ax = plots.memory_over_time([0, 0.5], {"activations": [0, 3e6], "parameters": [1e6, 1e6]})
    top = max(vertex[1] for collection in ax.collections for vertex in collection.get_paths()[0].vertices)
    assert top * 2**20 == pytest.approx(4e6)


@pytest.mark.parametrize("model", [MODEL, PARALLEL])
def test_the_layers_boxes_have_the_parameters_of_their_tensors(model):
    shown = words(plots.transformer_layer(model))
    for name in ("attn_norm", "attn.qkv", "attn.out", "mlp_norm", "mlp.up", "mlp.down"):
        tensors = [shape for tensor, shape in block_shapes(model).items() if tensor.startswith(f"{name}.")]
        assert style.format_count(sum(map(math.prod, tensors))) in shown


def test_masks_show_which_tokens_each_token_attends_to():
    mask = np.tril(np.ones((4, 4)))
    gpt, bert = plots.attention_masks({"GPT": mask, "BERT": np.ones((4, 4))})
    np.testing.assert_array_equal(np.ravel(gpt.collections[0].get_array()), mask.ravel())
    np.testing.assert_array_equal(np.ravel(bert.collections[0].get_array()), np.ones(16))


@pytest.mark.parametrize("kind", plots.FORMATS, ids=lambda kind: kind.name)
def test_number_formats_match_torchs(kind):
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}.get(kind.name)
    if dtype is None:  # tf32 has fp32's range and fp16's precision, and no dtype
        assert kind.smallest_normal == torch.finfo(torch.float32).tiny
        assert kind.step_at_one == torch.finfo(torch.float16).eps
        return
    info = torch.finfo(dtype)
    assert (kind.largest, kind.smallest_normal, kind.step_at_one) == (info.max, info.tiny, info.eps)


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


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_filled_area_of_a_stage_is_its_bytes(ranks):
    ax = plots.zero_stages(ranks)
    for stage in range(4):
        for rank in range(ranks):
            boxes = [box for box in ax.patches if box.get_label().startswith(f"_{stage} {rank} ")]
            filled = sum(box.get_width() * box.get_height() for box in boxes)
            height = 8
            assert filled == pytest.approx(height * sum(cost.zero_state_bytes(1, stage, dp=ranks).values()))


def test_a_step_of_fsdp_borrows_one_layer_at_a_time_and_keeps_slices_of_gradients():
    labels = {box.get_label() for box in plots.fsdp_step(3, 4).patches}
    borrowed = {label for label in labels if label.endswith("parameters") and " own " not in label}
    assert borrowed == {f"_{column} {layer} parameters" for column, layer in enumerate([0, 1, 2, 2, 1, 0])}
    kept_at_the_end = {label for label in labels if label.startswith("_5 ") and label.endswith("own gradients")}
    assert kept_at_the_end == {"_5 1 own gradients", "_5 2 own gradients"}


def test_memory_of_a_step_is_stacked_in_mebibytes():
    held = {"parameters": [2**20] * 3, "activations": [0, 2**21, 0], "gathered parameters": [0, 2**20, 0]}
    trace = Trace([0.0, 0.1, 0.2], held)
    axes = plots.step_memory({"a": trace, "b": trace, "c": trace})
    assert [ax.get_visible() for ax in axes.flat] == [True, True, True, False]
    ax = axes[0, 0]
    top = {layer.get_label(): layer.get_paths()[0].vertices[:, 1].max() for layer in ax.collections}
    assert (top["_parameters"], top["_gathered parameters"], top["_activations"]) == (1, 2, 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plots.matrices({"": np.ones((40, 2))}), "at most 16 x 16 numbers: cut a corner out"),
        (lambda: plots.speedup([1, 2], {"ddp": [1.0]}, {}), "1 values"),
        (lambda: plots.zero_stages(9), "9 ranks: from 1 to 8 can be drawn"),
    ],
)
def test_bad_data_is_refused_in_one_line(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


def test_the_field_map_leaves_no_piece_of_the_model_out_and_draws_what_is_kept_once_on_one_rank():
    """By strategy: on how many of its ranks each cell of weights, gradients and Adam stands."""
    copies = {
        "ddp": (4, 4, 4),
        "zero1": (4, 4, 1),
        "zero2": (4, 1, 1),
        "zero3": (1, 1, 1),
        "fsdp": (1, 1, 1),
        "tp": (1, 1, 1),
        "pp": (1, 1, 1),
        "3d": (2, 2, 2),
    }
    for name, expected in copies.items():
        (ax,) = plots.divided(name)
        whole = 4 * 0.3 * 4 * 0.2 * (0.5 if name == "3d" else 1)  # eight ranks take the room of four
        for part, times in zip(("parameters", "gradients", "optimizer states"), expected, strict=True):
            color = style.MEMORY_COLORS[part].lower()
            held = [patch for patch in ax.patches if to_hex(patch.get_facecolor()) == color]
            area = sum(patch.get_width() * patch.get_height() for patch in held)
            assert area / whole == pytest.approx(times), (name, part)
    with pytest.raises(ConfigError, match="it draws ddp, zero1"):
        plots.divided("zero4")


def test_the_map_in_the_readme_is_the_one_that_is_drawn(tmp_path):
    plots.use_style()
    plots.field_map(tmp_path / "field_map.svg")
    kept = Path(__file__).parents[1] / "workshop" / "field_map.svg"
    drawn, stored = ((path.read_text().splitlines()) for path in (tmp_path / "field_map.svg", kept))
    words = [[line for line in lines if "<text" in line] for lines in (drawn, stored)]
    assert words[0] == words[1] and len(drawn) == len(stored), (
        "draw it again: plots.field_map('workshop/field_map.svg')"
    )


def test_the_drawing_of_a_warp_counts_pieces():
    def texts(axes):
        return [text.get_text() for ax in np.atleast_1d(axes) for text in ax.texts]

    said = texts(plots.warp_reads({"row": range(8, 40), "column": range(0, 320, 10)}, size=512))
    assert "row: 4 pieces, 100 % of their bytes wanted" in said
    assert "column: 32 pieces, 12.5 % of their bytes wanted" in said
