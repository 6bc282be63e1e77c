"""Images for the lesson on a small CNN: 10 kinds of shapes, drawn by formulas."""

from __future__ import annotations

import numpy as np

#: Masks of the shapes, in coordinates u (right) and v (up): 0 in the centre, about 1 at the rim.
SHAPES = {
    "disc": lambda u, v: u**2 + v**2 < 0.8,
    "ring": lambda u, v: (u**2 + v**2 < 0.9) & (u**2 + v**2 > 0.35),
    "square": lambda u, v: np.maximum(abs(u), abs(v)) < 0.8,
    "frame": lambda u, v: (np.maximum(abs(u), abs(v)) < 0.9) & (np.maximum(abs(u), abs(v)) > 0.55),
    "triangle": lambda u, v: (v > -0.7) & (v < 0.9 - 2 * abs(u)),
    "plus": lambda u, v: (np.minimum(abs(u), abs(v)) < 0.25) & (np.maximum(abs(u), abs(v)) < 0.95),
    "cross": lambda u, v: (
        (np.minimum(abs(u - v), abs(u + v)) < 0.35) & (np.maximum(abs(u), abs(v)) < 0.8)
    ),
    "rows": lambda u, v: (np.maximum(abs(u), abs(v)) < 0.9) & (np.sin(9 * v) > 0),
    "columns": lambda u, v: (np.maximum(abs(u), abs(v)) < 0.9) & (np.sin(9 * u) > 0),
    "half": lambda u, v: (u**2 + v**2 < 0.9) & (v < 0),
}


def draw_shapes(count: int, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """`count` images (N,1,28,28) uint8 and their labels (N,) int64, indices into SHAPES.

    All kinds equally often (to within one), each shape shifted, scaled, rotated by up to 20
    degrees, with strong noise.
    """
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(count) % len(SHAPES))
    x, y = rng.uniform(-0.25, 0.25, (2, count, 1, 1))
    scale = rng.uniform(0.5, 0.8, (count, 1, 1))
    angle = rng.uniform(-0.35, 0.35, (count, 1, 1))
    axis = np.linspace(-1, 1, 28)
    right, up = (axis[None, None, :] - x) / scale, (-axis[None, :, None] - y) / scale
    u = np.cos(angle) * right + np.sin(angle) * up  # (N,H,W)
    v = np.cos(angle) * up - np.sin(angle) * right
    images = np.zeros_like(u)
    for label, inside in enumerate(SHAPES.values()):
        ours = labels == label
        images[ours] = inside(u[ours], v[ours])
    images *= rng.uniform(0.5, 1.0, (count, 1, 1))
    images += rng.normal(0, 0.2, images.shape)
    return (images.clip(0, 1) * 255).astype(np.uint8)[:, None], labels.astype(np.int64)
