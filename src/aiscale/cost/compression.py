"""What a compressed DDP step sends, by closed formula: entries of each tensor, bytes of a step.

    kept_entries(0.4, 1000)                     # k = 400 of a tensor of 1000 entries

Published rule of Radius (its artifact appendix): k = max(floor(density x numel), 1) of each tensor, biases exempt.
"""

from __future__ import annotations

import math

#: torch's PowerSGD wants DDP's final buckets, which exist from the second step on.
FIRST_POWERSGD_STEP = 2


def is_exempt(name: str) -> bool:
    """Whether the parameter `name` is always sent whole: biases are, norms' biases with them."""
    return name.endswith("bias")


def kept_entries(density: float, numel: int) -> int:
    """k, the entries that are sent of a tensor of `numel`."""
    return max(math.floor(density * numel), 1)
