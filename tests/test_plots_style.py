"""The house style: distinct marks, colours for colour-blind readers, numbers with units."""

import itertools

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import to_rgb

from aiscale.measure import plots
from aiscale.measure.plots import style

matplotlib.use("agg")


@pytest.fixture(autouse=True)
def house_style():
    with plt.rc_context():
        plots.use_style()
        yield
    plt.close("all")


#: Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
VISION = {
    "usual": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.01182, 0.04294, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.3039],
    ],
}


def oklab(color, vision) -> np.ndarray:
    """A colour as seen, in the perceptual space OKLab (Ottosson 2020); black to white is 100."""
    srgb = np.array(to_rgb(color))
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(VISION[vision]) @ linear, 0, 1)
    cones = [
        [0.41222147, 0.53633254, 0.05144599],
        [0.2119035, 0.68069955, 0.10739696],
        [0.08830246, 0.28171884, 0.62997870],
    ]
    mix = [
        [0.21045426, 0.79361779, -0.00407205],
        [1.9779985, -2.42859221, 0.45059371],
        [0.02590404, 0.78277177, -0.80867577],
    ]
    return 100 * np.array(mix) @ np.cbrt(np.array(cones) @ seen)


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize(
    "palette",
    [
        style.STRATEGY_COLORS,
        style.MEMORY_COLORS,
        style.EVENT_COLORS,
        plots.PART_COLORS,
        plots.COLLECTIVE_COLORS,
    ],
    ids=["strategies", "memory", "events", "parts", "collectives"],
)
def test_palettes_are_distinguishable_for_every_kind_of_vision(palette, vision):
    for (a, one), (b, other) in itertools.combinations(palette.items(), 2):
        distance = np.linalg.norm(oklab(one, vision) - oklab(other, vision))
        assert distance > 8, f"{a} and {b} look alike: {distance:.1f}"


@pytest.mark.parametrize("vision", VISION)
def test_ranks_and_series_are_distinguishable(vision):
    cycle = [entry["color"] for entry in matplotlib.rcParams["axes.prop_cycle"]]
    for palette in (style.RANK_COLORS, cycle):
        for one, other in itertools.combinations(palette, 2):
            assert np.linalg.norm(oklab(one, vision) - oklab(other, vision)) > 8, (one, other)


def test_numbers_larger_than_a_laptops_have_their_units():
    sizes = [style.format_bytes(2.5 * 2**power) for power in (30, 40, 50)]
    assert sizes == ["2.5 GiB", "2.5 TiB", "2.5 PiB"]
    counts = [style.format_count(10**power) for power in (3, 6, 9, 12)]
    assert counts == ["1 k", "1 M", "1 B", "1 T"]
    assert style.format_seconds(86_400) == "86400 s"
