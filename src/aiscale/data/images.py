"""Images for the lesson on a small CNN: folders of .npz files, in the format of OLCF's `NPZDataset`.

    write_npz("shapes/train", 4000, seed=1)                # 10 kinds of shapes, drawn by formulas
    dataset = NpzDataset("shapes/train")
    image, label = dataset[0]                              # (1,28,28) float32 in [0, 1], and an int

A file holds `images`, (N,H,W) or (N,C,H,W) uint8, and `labels`, (N,). Any folder of such files works.

N images, C channels, H and W pixels.
"""

from __future__ import annotations

import io
import zipfile
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from aiscale.config import ConfigError
from aiscale.data.shards import write_atomically

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


def draw_shapes(count: int, *, size: int = 28, seed: int = 0, noise: float = 0.2) -> tuple[np.ndarray, np.ndarray]:
    """`count` images (N,1,H,W) uint8 and their labels (N,) int64, indices into SHAPES: all kinds equally often (to
    within one), each shape shifted, scaled, rotated by up to 20 degrees, with strong noise."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(count) % len(SHAPES))
    x, y = rng.uniform(-0.25, 0.25, (2, count, 1, 1))
    scale = rng.uniform(0.5, 0.8, (count, 1, 1))
    angle = rng.uniform(-0.35, 0.35, (count, 1, 1))
    axis = np.linspace(-1, 1, size)
    right, up = (axis[None, None, :] - x) / scale, (-axis[None, :, None] - y) / scale
    u, v = np.cos(angle) * right + np.sin(angle) * up, np.cos(angle) * up - np.sin(angle) * right  # (N,H,W)
    images = np.zeros((count, size, size))
    for label, inside in enumerate(SHAPES.values()):
        ours = labels == label
        images[ours] = inside(u[ours], v[ours])
    images *= rng.uniform(0.5, 1.0, (count, 1, 1))
    images += rng.normal(0, noise, images.shape)
    return (images.clip(0, 1) * 255).astype(np.uint8)[:, None], labels.astype(np.int64)


def write_npz(
    folder: str | Path, count: int, *, per_file: int = 1000, size: int = 28, seed: int = 0, noise: float = 0.2
) -> list[Path]:
    """Draw `count` shapes into .npz files of at most per_file images; files of an earlier call are replaced."""
    images, labels = draw_shapes(count, size=size, seed=seed, noise=noise)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("shapes-*.npz"):
        old.unlink()
    files = []
    for number, start in enumerate(range(0, count, per_file)):
        rows = slice(start, start + per_file)
        buffer = io.BytesIO()
        np.savez_compressed(buffer, images=images[rows], labels=labels[rows])
        files.append(folder / f"shapes-{number:03d}.npz")
        write_atomically(files[-1], buffer.getvalue())
    return files


class NpzDataset(Dataset):
    """Images and labels of all .npz files in a folder, sorted by name. A file is unpacked when first needed and stays
    in memory."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.files = sorted(self.folder.glob("*.npz"))
        if not self.files:
            raise ConfigError(f"{self.folder} holds no .npz files: make some with aiscale.data.write_npz")
        self.labels = np.concatenate([self._labels(file) for file in self.files])  #: of all images, (N,)
        self._ends = np.cumsum([len(self._labels(file)) for file in self.files])
        self._images = cache(self._read)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """(C,H,W) float32 in [0, 1], and the label."""
        if not 0 <= index < len(self):
            raise IndexError(f"image {index} of {len(self)}")
        number = int(np.searchsorted(self._ends, index, side="right"))
        images = self._images(number)
        image = images[index - int(self._ends[number])]  # a negative index, from the end of the file
        return torch.from_numpy(image).float() / 255, int(self.labels[index])

    def _labels(self, file: Path) -> np.ndarray:
        return _array(file, "labels")

    def _read(self, number: int) -> np.ndarray:
        file = self.files[number]
        images, labels = _array(file, "images"), _array(file, "labels")
        if len(images) != len(labels) or images.ndim not in (3, 4):
            raise ConfigError(
                f"{file} holds images of shape {images.shape} and labels of shape {labels.shape}: "
                "images must be (N,H,W) or (N,C,H,W) and labels (N,)"
            )
        return images[:, None] if images.ndim == 3 else images


def _array(file: Path, name: str) -> np.ndarray:
    try:
        with np.load(file) as arrays:
            return arrays[name]
    except KeyError:
        raise ConfigError(f"{file} holds no array {name!r}: it needs images (N,H,W) and labels (N,)") from None
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{file} cannot be read as .npz: {error}") from None
