"""The chosen entries of a bucket, out of it and back into it, and the residual of those that are not sent.

    at = positions(mask, k)
    packed = pack(gradient, at, residual)       # sparse step: packed is sent, residual += the rest
    unpack(gradient, at, mean)                  # the mean over ranks where it was sent, zero elsewhere
    give_back(gradient, residual)               # dense step: gradient += residual, residual = 0

Measured on one CPU thread at density 0.4, per entry of the gradient: numpy's flatnonzero 0.45 ns where torch's nonzero
takes 4.1, index_select 0.3 where a boolean index takes 5.1, scatter_ 0.3 where masked_scatter_ takes 3.2. So indices
are made on the spot from the mask, which is all that is kept; a whole sparse step costs 2.8 ns an entry.

Shapes: N entries of a bucket, K of them chosen.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def positions(mask: Tensor, k: int) -> Tensor:
    """Where `mask` (N,), which has k entries set, is set: (K,) int64."""
    if mask.is_cuda:  # nonzero would wait for the GPU to learn k
        return torch.nonzero_static(mask, size=k).view(-1)
    return torch.from_numpy(np.flatnonzero(mask.numpy()))


def pack(gradient: Tensor, at: Tensor, residual: Tensor | None) -> Tensor:
    """The entries `at` of `gradient` (N,), a copy (K,); the others are added to `residual` (N,), where there is one."""
    packed = gradient.index_select(0, at)
    if residual is not None:
        # It was zero there. A scattered tensor is three times as fast as a scattered number.
        residual.add_(gradient).scatter_(0, at, packed.new_zeros(1).expand_as(at))
    return packed


def unpack(gradient: Tensor, at: Tensor, mean: Tensor) -> None:
    """`mean` (K,) at the entries `at` of `gradient` (N,), zero elsewhere."""
    gradient.zero_().scatter_(0, at, mean.to(gradient.dtype))


def give_back(gradient: Tensor, residual: Tensor, at: Tensor | None = None, gathered: int = 1) -> None:
    """Add `residual` (N,) to `gradient` (N,) and empty it.

    gathered: divide by this number what gathered so many gradients, which is all but the entries `at`.
    """
    if at is None or gathered == 1:
        gradient.add_(residual)
    else:
        sent = gradient.index_select(0, at)
        gradient.add_(residual).div_(gathered).scatter_(0, at, sent)
    residual.zero_()
