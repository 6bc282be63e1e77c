"""Appendix A8: which entries a sparse step of published Radius sends, and how they are packed.

    masks = choose({name: scores(optimizer, p)}, density=0.4, reach=0)    # {name: (N,) bool}
    at = positions(mask)
    packed = pack(gradient, at, residual)             # the residual keeps the others

All ranks have the same optimizer states, so they choose the same entries and never send indices.

Shapes: N entries of a parameter, flat; K of them are chosen.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from aiscale.plan.cost.compression import kept_entries


def scores(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Tensor:
    """(N,): how far AdamW's latest step moved each entry, in units of the rate, without decay.

    That is the magnitude of m / (1 - beta1^t) over sqrt(v / (1 - beta2^t)) + eps.
    """
    state = optimizer.state[parameter]
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    (beta1, beta2), t = group["betas"], float(state["step"])
    mean = state["exp_avg"] / (1 - beta1**t)
    root = (state["exp_avg_sq"] / (1 - beta2**t)).sqrt() + group["eps"]
    return (mean / root).abs().flatten()


def choose(scored: Mapping[str, Tensor], *, density: float, reach: int) -> dict[str, Tensor]:
    """The k largest of each tensor, and their neighbours up to `reach`: {name: mask (N,)}."""
    return {name: widened(largest(values, density), reach) for name, values in scored.items()}


def largest(values: Tensor, density: float) -> Tensor:
    """The mask (N,) of the k = max(floor(density N), 1) largest values; of equal ones the first.

    torch.topk does not promise which of equal ones it takes, and many are 0 in the embedding.
    """
    n = values.numel()
    k = kept_entries(density, n)
    smallest = values.kthvalue(n - k + 1).values
    mask = values > smallest
    missing = k - int(mask.sum())
    mask[(values == smallest).nonzero().view(-1)[:missing]] = True
    return mask


def widened(mask: Tensor, reach: int) -> Tensor:
    """`mask` (N,) with all neighbours of its entries up to distance `reach`."""
    wide = mask.clone()
    for distance in range(1, min(reach, mask.numel() - 1) + 1):
        wide[distance:] |= mask[:-distance]
        wide[:-distance] |= mask[distance:]
    return wide


# On a CPU numpy's flatnonzero takes a ninth of nonzero's time, index_select and scatter_ a tenth
# of what masks take.


def positions(mask: Tensor) -> Tensor:
    """The indices (K,) int64 where `mask` (N,) is set."""
    return torch.from_numpy(np.flatnonzero(mask.numpy()))


def pack(gradient: Tensor, at: Tensor, residual: Tensor) -> Tensor:
    """The entries `at` (K,) of `gradient` plus `residual` (N,); the residual keeps the others."""
    packed = residual.add_(gradient).index_select(0, at)
    # Scattering a tensor is three times as fast as scattering a number.
    residual.scatter_(0, at, packed.new_zeros(1).expand_as(at))
    return packed


def unpack(gradient: Tensor, at: Tensor, mean: Tensor) -> None:
    """`mean` (K,) at the entries `at` of `gradient` (N,), zero elsewhere."""
    gradient.zero_().scatter_(0, at, mean)
