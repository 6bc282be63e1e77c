"""Images for the lesson on a small CNN: folders of .npz files, in the format of OLCF's `NPZDataset`.

    write_npz("shapes/train", 4000, seed=1)                # 10 kinds of shapes, drawn by formulas, in one file
    dataset = NpzDataset("shapes/train")
    image, label = dataset[0]                              # (1,28,28) float32 in [0, 1], and an int

A file holds `images`, (N,H,W) or (N,C,H,W) uint8, and `labels`, (N,). Any folder of such files works, if it
fits in memory.

N images, C channels, H and W pixels.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from aiscale.config import ConfigError

#: Masks of the shapes, in coordinates u (right) and v (up): 0 in the centre, about 1 at the rim.
SHAPES = {
    "disc": lambda u, v: u**2 + v**2 < 0.8,
    "ring": lambda u, v: (u**2 + v**2 < 0.9) & (u**2 + v**2 > 0.35),
    "square": lambda u, v: np.maximum(abs(u), abs(v)) < 0.8,
    "frame": lambda u, v: (np.maximum(abs(u), abs(v)) < 0.9) & (np.maximum(abs(u), abs(v)) > 0.55),
    "triangle": lambda u, v: (v > -0.7) & (v < 0.9 - 2 * abs(u)),
    "plus": lambda u, v: (np.minimum(abs(u), abs(v)) < 0.25) & (np.maximum(abs(u), abs(v)) < 0.95),
    "cross": lambda u, v: (np.minimum(abs(u - v), abs(u + v)) < 0.35) & (np.maximum(abs(u), abs(v)) < 0.8),
    "rows": lambda u, v: (np.maximum(abs(u), abs(v)) < 0.9) & (np.sin(9 * v) > 0),
    "columns": lambda u, v: (np.maximum(abs(u), abs(v)) < 0.9) & (np.sin(9 * u) > 0),
    "half": lambda u, v: (u**2 + v**2 < 0.9) & (v < 0),
}


def draw_shapes(count: int, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """`count` images (N,1,28,28) uint8 and their labels (N,) int64, indices into SHAPES: all kinds equally often (to
    within one), each shape shifted, scaled, rotated by up to 20 degrees, with strong noise."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(count) % len(SHAPES))
    x, y = rng.uniform(-0.25, 0.25, (2, count, 1, 1))
    scale = rng.uniform(0.5, 0.8, (count, 1, 1))
    angle = rng.uniform(-0.35, 0.35, (count, 1, 1))
    axis = np.linspace(-1, 1, 28)
    right, up = (axis[None, None, :] - x) / scale, (-axis[None, :, None] - y) / scale
    u, v = np.cos(angle) * right + np.sin(angle) * up, np.cos(angle) * up - np.sin(angle) * right  # (N,H,W)
    images = np.zeros_like(u)
    for label, inside in enumerate(SHAPES.values()):
        ours = labels == label
        images[ours] = inside(u[ours], v[ours])
    images *= rng.uniform(0.5, 1.0, (count, 1, 1))
    images += rng.normal(0, 0.2, images.shape)
    return (images.clip(0, 1) * 255).astype(np.uint8)[:, None], labels.astype(np.int64)


def write_npz(folder: str | Path, count: int, *, seed: int = 0) -> None:
    """Draw `count` shapes into folder/shapes.npz; the file of an earlier call is replaced."""
    images, labels = draw_shapes(count, seed=seed)
    Path(folder).mkdir(parents=True, exist_ok=True)
    np.savez_compressed(Path(folder) / "shapes.npz", images=images, labels=labels)


class NpzDataset(Dataset):
    """Images and labels of all .npz files in a folder, sorted by name."""

    def __init__(self, folder: str | Path) -> None:
        files = sorted(Path(folder).glob("*.npz"))
        if not files:
            raise ConfigError(f"{folder} holds no .npz files: make some with aiscale.data.write_npz")
        images, labels = zip(*map(_read, files), strict=True)
        self.images = np.concatenate(images)  #: (N,C,H,W)
        self.labels = np.concatenate(labels)  #: (N,)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """(C,H,W) float32 in [0, 1], and the label."""
        return torch.from_numpy(self.images[index]).float() / 255, int(self.labels[index])


def _read(file: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images (N,C,H,W) and labels (N,) of one file."""
    with np.load(file) as arrays:
        images, labels = arrays["images"], arrays["labels"]
    if len(images) != len(labels) or images.ndim not in (3, 4):
        raise ConfigError(
            f"{file} holds images of shape {images.shape} and labels of shape {labels.shape}: "
            "images must be (N,H,W) or (N,C,H,W) and labels (N,)"
        )
    return images[:, None] if images.ndim == 3 else images, labels
