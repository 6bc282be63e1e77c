"""The drawings of notebooks/figures show what strategies do; the files are the script's."""

import importlib.util
import re
from itertools import pairwise
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import rgb_to_hsv, to_hex, to_rgb

from aiscale.measure import plots
from aiscale.measure.plots import style

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


def filled(ax, color):
    return [
        patch
        for patch in ax.patches
        if to_hex(patch.get_facecolor()) == to_hex(color) and patch.get_fill()
    ]


def area(boxes):
    return sum(box.get_width() * box.get_height() for box in boxes)


@pytest.mark.parametrize("name", draw.DRAWINGS)
def test_the_committed_file_says_what_the_script_draws(name, tmp_path, monkeypatch):
    monkeypatch.setattr(draw, "__file__", str(tmp_path / "draw.py"))
    draw.main([name])
    files = (tmp_path / f"{name}.svg", ROOT / "notebooks" / "figures" / f"{name}.svg")
    fresh, stored = (
        re.findall(r"<text[^>]*>(.*?)</text>", path.read_text(), re.S) for path in files
    )
    assert fresh and fresh == stored, f"draw it again: python notebooks/figures/draw.py {name}"


def test_every_drawing_is_shown_and_every_one_that_is_shown_exists():
    pages = [*ROOT.glob("notebooks/**/*.ipynb"), *ROOT.glob("slides/*.md"), ROOT / "README.md"]
    shown = {
        name
        for page in pages
        for name in re.findall(r"\]\([./a-z]*figures/(\w+)\.svg\)", page.read_text())
    }
    assert (
        shown == set(draw.DRAWINGS) == {path.stem for path in ROOT.glob("notebooks/figures/*.svg")}
    )


def test_the_field_map_leaves_nothing_out_and_draws_what_is_done_or_kept_once_on_one_rank():
    """By strategy: on how many ranks each computation, weight, gradient and Adam's state stands."""
    copies = {"ddp": (4, 4, 4, 4), "zero1": (4, 4, 4, 1), "zero2": (4, 4, 1, 1), "3d": (2, 2, 2, 2)}
    copies |= {"fsdp": (4, 1, 1, 1), "tp": (1, 1, 1, 1), "pp": (1, 1, 1, 1)}
    for name, expected in copies.items():
        draw.divided(name)
        (ax,) = plt.gcf().axes
        # eight ranks take the room of four
        whole = 4 * 0.3 * 4 * 0.2 * (0.5 if name == "3d" else 1)
        found = [sum(area(filled(ax, color)) for color in draw.SHARES)]
        found += [area(filled(ax, style.MEMORY_COLORS[part])) for part in draw.PARTS]
        assert found == pytest.approx([times * whole for times in expected]), name


def test_the_field_map_tells_what_a_rank_computes_from_what_it_holds_by_colour():
    held = [style.MEMORY_COLORS[part] for part in draw.PARTS]
    assert all(rgb_to_hsv(to_rgb(share))[1] < 0.25 for share in draw.SHARES), "greys"
    assert all(rgb_to_hsv(to_rgb(color))[1] > 0.5 for color in held)
    lightness = [sum(to_rgb(share)) / 3 for share in draw.SHARES]
    assert all(b - a > 0.15 for a, b in pairwise(lightness)), "four greys that one can tell apart"


def test_a_dead_replica_is_missing_in_one_round_and_its_share_is_not():
    draw.rounds()
    (ax,) = plt.gcf().axes
    shares = [len(filled(ax, color)) for color in style.RANK_COLORS[:3]]
    assert shares == [3, 2, 3]
    said = [text.get_text() for text in ax.texts]
    assert said.count("1/3 of the batch") == 6 and said.count("1/2 of the batch") == 2


@pytest.mark.parametrize("world", [2, 3, 5])
def test_the_ring_ends_with_all_sums_everywhere_after_2_n_minus_2_steps(world):
    states = draw.ring_states(world)
    assert len(states) == 1 + 2 * (world - 1)
    complete = [sum(len(cell) == world for cell in row) for row in states[world - 1][0]]
    assert complete == [1] * world, "after the reduce-scatter"
    assert all(len(cell) == world for row in states[-1][0] for cell in row)


def test_ten_chunks_come_in_a_step_and_a_lost_rank_leaves_a_copy_of_its_stage():
    draw.chunks()  # as lesson 13 counts them
    assert sum(isinstance(patch, draw.Circle) for patch in plt.gca().patches) == 10
    draw.bamboo(lost=2)
    said = [text.get_text() for text in plt.gca().texts]
    assert "stage 2" not in said and "copy of 2" in said and "lost" in said
