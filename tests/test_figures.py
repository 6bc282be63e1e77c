"""The drawings of notebooks/figures show what the strategies do, and the files are those that the script draws."""

import importlib.util
import math
import re
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_hex

from aiscale import cost, plots
from aiscale.cost.parameters import block_shapes
from aiscale.plots import style
from aiscale.recipes import recipe

matplotlib.use("agg")
ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("draw", ROOT / "notebooks" / "figures" / "draw.py")
draw = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(draw)


@pytest.fixture(autouse=True)
def house_style():
    with plt.rc_context():
        plots.use_style()
        yield
    plt.close("all")


def drawn(name):
    draw.DRAWINGS[name]()
    return plt.gcf().axes


def filled(ax, color):
    return [patch for patch in ax.patches if to_hex(patch.get_facecolor()) == to_hex(color) and patch.get_fill()]


def area(boxes):
    return sum(box.get_width() * box.get_height() for box in boxes)


def words(axes):
    return [text.get_text() for ax in axes for text in ax.texts]


@pytest.mark.parametrize("name", draw.DRAWINGS)
def test_the_committed_file_says_what_the_script_draws(name, tmp_path, monkeypatch):
    monkeypatch.setattr(draw, "__file__", str(tmp_path / "draw.py"))
    draw.main([name])
    files = (tmp_path / f"{name}.svg", ROOT / "notebooks" / "figures" / f"{name}.svg")
    fresh, stored = (re.findall(r"<text[^>]*>(.*?)</text>", path.read_text(), re.S) for path in files)
    assert fresh and fresh == stored, f"draw it again: python notebooks/figures/draw.py {name}"


def test_every_drawing_is_shown_and_every_one_that_is_shown_exists():
    pages = [*ROOT.glob("notebooks/**/*.ipynb"), *ROOT.glob("slides/*.md"), ROOT / "README.md"]
    shown = {name for page in pages for name in re.findall(r"\]\([./a-z]*figures/(\w+)\.svg\)", page.read_text())}
    assert shown == set(draw.DRAWINGS) == {path.stem for path in ROOT.glob("notebooks/figures/*.svg")}


def test_the_field_map_leaves_no_piece_of_the_model_out_and_draws_what_is_kept_once_on_one_rank():
    """By strategy: on how many of its ranks each cell of weights, gradients and Adam stands."""
    copies = {"ddp": (4, 4, 4), "zero1": (4, 4, 1), "zero2": (4, 1, 1), "3d": (2, 2, 2)}
    copies |= dict.fromkeys(("zero3", "fsdp", "tp", "pp"), (1, 1, 1))
    for name, expected in copies.items():
        draw.divided(name)
        (ax,) = plt.gcf().axes
        whole = 4 * 0.3 * 4 * 0.2 * (0.5 if name == "3d" else 1)  # eight ranks take the room of four
        for part, times in zip(draw.PARTS, expected, strict=True):
            assert area(filled(ax, style.MEMORY_COLORS[part])) / whole == pytest.approx(times), (name, part)


@pytest.mark.parametrize("world", [2, 3, 5])
def test_the_ring_ends_with_all_sums_everywhere_after_2_n_minus_2_steps(world):
    states = draw.ring_states(world)
    assert len(states) == 1 + 2 * (world - 1)
    complete = [sum(len(cell) == world for cell in row) for row in states[world - 1][0]]
    assert complete == [1] * world, "after the reduce-scatter"
    assert all(len(cell) == world for row in states[-1][0] for cell in row)


def test_the_ring_has_the_colour_of_a_rank_where_its_numbers_are():
    (ax,) = drawn("ring")
    states = draw.ring_states(4)
    for rank in range(4):
        stripes = [box for box in filled(ax, style.RANK_COLORS[rank]) if box.get_height() == 0.88]
        assert len(stripes) == sum(rank in cell for state, _ in states for row in state for cell in row)
        start = [box for box in stripes if box.get_x() < 4 and box.get_y() > 6]
        assert {math.floor(box.get_y() - 6.4) for box in start} == {3 - rank} and len(start) == 4


def test_the_filled_area_of_a_stage_is_its_bytes():
    (ax,) = drawn("zero_stages")
    for stage in range(4):
        for part, nbytes in cost.zero_state_bytes(1, stage, dp=4).items():
            boxes = [box for box in filled(ax, style.MEMORY_COLORS[part]) if 0 <= box.get_y() - 11 * stage < 8]
            assert area(boxes) == pytest.approx(4 * 8 * nbytes), (stage, part)
            assert {(box.get_y() - 11 * stage) / 2 for box in boxes} == {0, 1, 2, 3}, "no slice is lost"


def test_a_step_of_fsdp_borrows_one_layer_at_a_time_and_keeps_slices_of_gradients():
    (ax,) = drawn("fsdp_step")
    places = {(round(box.get_x(), 2), int(box.get_y() / 1.2)) for box in filled(ax, draw.BORROWED)}
    assert [layer for _, layer in sorted(places)] == [0, 1, 2, 2, 1, 0]
    last = max(x for x, _ in places)
    kept = [box for box in filled(ax, draw.GRADIENTS) if box.get_x() > last]
    assert sorted(int(box.get_y() / 1.2) for box in kept) == [0, 0, 0, 0, 1, 2]  # layer 0 is at work


def test_tensor_parallelism_cuts_an_mlps_first_matrix_by_columns_and_its_second_by_rows():
    (ax,) = drawn("mlp_cut")
    for rank in range(4):
        first, hidden, second = filled(ax, style.RANK_COLORS[rank])
        assert first.get_width() == hidden.get_width() == second.get_height() == 1.0
        assert first.get_x() == pytest.approx(2.7 + rank) and second.get_y() == rank


def test_the_grid_numbers_ranks_as_megatron_core_does_and_frames_one_ranks_groups():
    (ax,) = drawn("ranks_16")
    at = {text.get_position(): text.get_text() for text in ax.texts}
    groups = {}
    for patch in (patch for patch in ax.patches if patch.get_facecolor()[3] == 0):
        inset = (0.92 - patch.get_width()) / 2
        place = (patch.get_x() - inset + 0.46, patch.get_y() - inset + 0.46)
        (rank,) = (int(text) for (x, y), text in at.items() if math.dist((x, y), place) < 1e-6)
        groups.setdefault(to_hex(patch.get_edgecolor()), set()).add(rank)
    assert groups == {
        to_hex(draw.AXES["tensor"]): {4, 5, 6, 7},
        to_hex(draw.AXES["pipeline"]): {5, 13},
        to_hex(draw.AXES["data"]): {1, 5},
    }


def test_a_node_has_as_many_devices_and_adapters_as_the_catalogue():
    shown = words(drawn("node_frontier"))
    assert {str(i) for i in range(8)} <= set(shown) and shown.count("NIC") == 4


def test_the_layers_boxes_have_the_parameters_of_their_tensors():
    shown, model = words(drawn("layer_gpt2")), recipe("gpt2").model
    for name, shape in (("attn_norm", "768"), ("attn.qkv", "768 × 2304"), ("mlp.up", "768 × 3072")):
        tensors = [dims for tensor, dims in block_shapes(model).items() if tensor.startswith(f"{name}.")]
        assert f"{shape}\n{style.format_count(sum(map(math.prod, tensors)))}" in shown


def test_a_warp_reads_four_pieces_along_a_row_and_32_down_a_column():
    row, column = (len([box for box in filled(ax, draw.DATA) if box.get_y() == 0]) for ax in drawn("warp_reads"))
    assert (row, column) == (4, 32)
