"""Images: drawn the same everywhere, separable by a simple rule, and read back as they were written."""

import numpy as np
import pytest
import torch

from aiscale.data import NpzDataset, draw_shapes, write_npz
from aiscale.data.images import SHAPES


def test_images_depend_on_the_seed_and_all_kinds_are_equally_frequent():
    images, labels = draw_shapes(205, seed=3)
    again, _ = draw_shapes(205, seed=3)
    other, _ = draw_shapes(205, seed=4)
    assert images.shape == (205, 1, 28, 28) and images.dtype == np.uint8 and labels.dtype == np.int64
    assert np.array_equal(images, again) and not np.array_equal(images, other)
    assert sorted(np.bincount(labels)) == [20] * 5 + [21] * 5 and len(SHAPES) == 10


def test_images_are_read_in_the_order_they_were_written(tmp_path):
    images, labels = draw_shapes(25, seed=5)
    write_npz(tmp_path, 25, seed=5)
    np.savez(tmp_path / "after.npz", images=images[:10], labels=labels[:10])
    (tmp_path / "shapes.npz").rename(tmp_path / "z.npz")
    dataset = NpzDataset(tmp_path)
    images, labels = np.concatenate([images[:10], images]), np.concatenate([labels[:10], labels])
    assert len(dataset) == 35
    for index in (0, 9, 10, 34):
        image, label = dataset[index]
        assert image.shape == (1, 28, 28) and image.dtype == torch.float32
        assert torch.equal(image, torch.from_numpy(images[index]).float() / 255) and label == labels[index]
    with pytest.raises(IndexError):
        dataset[35]
