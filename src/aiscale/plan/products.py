"""Seconds of matrix products: full tiles on all units, a long inner dimension, or memory's speed.

    product_seconds(4096, 4096, 4096, 1, platform, platform.peak("bf16"), CONSTANTS)

A tile needs some time before its first and after its last multiplication, whatever its inner
dimension K is; a unit that multiplies faster loses more in it. So a product runs at K / (K + k) of
its best rate, and k grows with the peak of one unit. A kernel also takes some microseconds to fill
the device and to drain it. `benchmarks/planner/products.py` holds both to measured products of
A100, H100, B200 and MI300X.
"""

from __future__ import annotations

import math
from functools import lru_cache

from aiscale.plan.hardware import Platform

#: Tiles of a product: rows, columns, share of the best rate.
TILES = (
    (128, 256, 1.0),
    (256, 128, 1.0),
    (128, 192, 0.97),
    (192, 128, 0.97),
    (128, 128, 0.92),
    (64, 128, 0.75),
    (64, 64, 0.55),
)
#: Peak in bf16 of one unit of an H100, FLOP/s: `inner_half` is meant for it.
UNIT_FLOPS = 989e12 / 132


@lru_cache(maxsize=200_000)
def wave_share(rows: int, columns: int, inner: int, many: int, units: int, half: float) -> float:
    """Share of the best product rate: full tiles on all units, and a long inner dimension."""
    best = 0.0
    for high, wide, share in TILES:
        tiles = many * math.ceil(rows / high) * math.ceil(columns / wide)
        # half of the last one's idle units find work
        waves = (math.ceil(tiles / units) + max(1.0, tiles / units)) / 2
        used = rows * columns * many / (waves * units * high * wide)
        best = max(best, share * used)
    return best * inner / (inner + half)


@lru_cache(maxsize=256)
def unit_share(platform: Platform) -> float:
    """Peak of one of its units over that of an H100's."""
    return platform.peak("bf16") / platform.units / UNIT_FLOPS


def product_seconds(
    rows: int, columns: int, inner: int, many: int, platform: Platform, peak: float, c
) -> float:
    """`many` products of rows x inner by inner x columns, in one kernel."""
    half = c.inner_half * unit_share(platform)
    share = wave_share(rows, columns, inner, many, platform.units, half)
    if columns % 64 or inner % 64 or rows % 64:
        share *= c.unaligned_share
    flops = 2.0 * rows * columns * inner * many
    nbytes = 2.0 * many * (rows * inner + inner * columns + rows * columns)
    rate = peak * platform.best_product * c.product_share * share
    moved_s = nbytes / (platform.memory_bytes_s * c.memory_share)
    return max(flops / rate, moved_s) + c.kernel_s
