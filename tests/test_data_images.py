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


def test_kinds_are_separable_but_not_by_the_mean_image_alone():
    images, labels = draw_shapes(2000, seed=1)
    unseen, answers = draw_shapes(500, seed=2)
    means = np.stack([images[labels == kind].mean(axis=0).ravel() for kind in range(10)])  # (10,HW)
    means = (means - means.mean(axis=1, keepdims=True)) / means.std(axis=1, keepdims=True)
    guesses = (unseen.reshape(500, -1).astype(float) @ means.T).argmax(axis=1)
    accuracy = (guesses == answers).mean()
    assert 0.2 < accuracy < 0.8, "too easy, and a CNN has nothing to show; too hard, and it cannot"


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


def test_a_loader_makes_batches_of_it(tmp_path):
    write_npz(tmp_path, 12)
    images, labels = next(iter(torch.utils.data.DataLoader(NpzDataset(tmp_path), batch_size=4)))
    assert images.shape == (4, 1, 28, 28) and labels.shape == (4,) and labels.dtype == torch.int64


def test_colour_images_from_elsewhere_are_read(tmp_path):
    np.savez(tmp_path / "theirs.npz", images=np.zeros((2, 3, 8, 8), np.uint8), labels=np.array([0, 1]))
    assert NpzDataset(tmp_path)[1][0].shape == (3, 8, 8)
