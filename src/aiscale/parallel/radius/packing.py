"""The chosen entries of a bucket, out of it and back into it, and the residual of those that are not sent.

    at = positions(mask, k)
    packed = pack(gradient, at, residual)       # sparse step: packed is sent, residual += the rest
    packed = pack(gradient, at, residual, wire) # wire(packed) arrives: residual += what it takes off, too
    unpack(gradient, at, mean)                  # the mean over ranks where it was sent, zero elsewhere
    give_back(gradient, residual)               # dense step: gradient += residual, residual = 0

Measured on one CPU thread at density 0.4, per entry of the gradient: numpy's flatnonzero 0.45 ns where torch's nonzero
takes 4.1, index_select 0.3 where a boolean index takes 5.1, scatter_ 0.3 where masked_scatter_ takes 3.2. So indices
are made on the spot from the mask, which is all that is kept between steps; a whole sparse step costs 2.2 ns an entry,
2.8 where it finds them again for the way back.

Shapes: N entries of a bucket, K of them chosen.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor


def positions(mask: Tensor, k: int) -> Tensor:
    """Where `mask` (N,), which has k entries set, is set: (K,) int64."""
    if mask.is_cuda:  # nonzero would wait for the GPU to learn k
        return torch.nonzero_static(mask, size=k).view(-1)
    return torch.from_numpy(np.flatnonzero(mask.numpy()))


def pack(
    gradient: Tensor, at: Tensor, residual: Tensor | None, wire: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """The entries `at` of `gradient` (N,), a copy (K,); the others are added to `residual` (N,), where there is one.

    wire: what of packed entries (K,) arrives, rounded to the wire's precision. What it takes off an entry waits in the
    residual and goes with that entry the next time.
    """
    if residual is None:
        return gradient.index_select(0, at)
    packed = residual.add_(gradient).index_select(0, at)
    # A scattered tensor is three times as fast as a scattered number.
    rest = packed - wire(packed) if wire else packed.new_zeros(1).expand_as(at)
    residual.scatter_(0, at, rest)
    return packed


def unpack(gradient: Tensor, at: Tensor, mean: Tensor) -> None:
    """`mean` (K,) at the entries `at` of `gradient` (N,), zero elsewhere."""
    gradient.zero_().scatter_(0, at, mean.to(gradient.dtype))


def give_back(gradient: Tensor, residual: Tensor, at: Tensor | None = None, gathered: int = 1) -> None:
    """Add `residual` (N,) to `gradient` (N,) and empty it.

    gathered: divide by this number what gathered so many gradients, which is all but the entries `at`.
    """
    gradient.add_(residual)
    if at is not None and gathered > 1:
        sent = gradient.index_select(0, at)
        gradient.div_(gathered).scatter_(0, at, sent)
    residual.zero_()
