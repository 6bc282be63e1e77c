"""Images: drawn the same everywhere."""

import numpy as np

from aiscale.train.prepare import draw_shapes
from aiscale.train.prepare.images import SHAPES


def test_images_depend_on_the_seed_and_all_kinds_are_equally_frequent():
    images, labels = draw_shapes(205, seed=3)
    again, _ = draw_shapes(205, seed=3)
    other, _ = draw_shapes(205, seed=4)
    assert (
        images.shape == (205, 1, 28, 28) and images.dtype == np.uint8 and labels.dtype == np.int64
    )
    assert np.array_equal(images, again) and not np.array_equal(images, other)
    assert sorted(np.bincount(labels)) == [20] * 5 + [21] * 5 and len(SHAPES) == 10
