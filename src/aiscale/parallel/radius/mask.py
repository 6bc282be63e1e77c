"""Which entries of each parameter a sparse step of Radius sends; how they are packed, and the others kept.

    masks = choose({name: scores}, density=0.4, reach=0)      # {name: (N,) bool}
    packed = pack(gradient, positions(mask, k), residual)

All ranks have the same optimizer states, so they choose the same entries and never send indices; `digest` checks this.

Shapes: N entries of a parameter, flat.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from aiscale.cost.compression import kept_entries


def scores(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Tensor:
    """The score of each entry of `parameter`, (N,), right after the optimizer's step: the magnitude of AdamW's
    direction m / (1 - beta1^t) over sqrt(v / (1 - beta2^t)) + eps; with SGD that of the momentum, or of the gradient
    just averaged."""
    state = optimizer.state[parameter]
    if "exp_avg_sq" in state:
        group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
        (beta1, beta2), t = group["betas"], float(state["step"])
        root = (state["exp_avg_sq"] / (1 - beta2**t)).sqrt_().add_(group["eps"])
        return (state["exp_avg"] / (1 - beta1**t)).div_(root).abs_().view(-1)
    moment = state.get("exp_avg", state.get("momentum_buffer"))
    return (parameter.grad if moment is None else moment).abs().view(-1)


def choose(scored: Mapping[str, Tensor], *, density: float, reach: int) -> dict[str, Tensor]:
    """{name: scores (N,)} -> {name: mask (N,)}: the k largest of each tensor, and their neighbours up to `reach`."""
    return {name: widened(largest(values, density), reach) for name, values in scored.items()}


def largest(values: Tensor, density: float) -> Tensor:
    """The mask (N,) of the k = max(floor(density N), 1) largest values; of equal ones the first, which torch.topk does
    not promise, and many are 0 in the embedding."""
    n = values.numel()
    k = kept_entries(density, n)
    smallest = values.kthvalue(n - k + 1).values
    mask = values > smallest
    missing = k - int(mask.sum())
    mask[(values == smallest).nonzero().view(-1)[:missing]] = True
    return mask


def widened(mask: Tensor, reach: int) -> Tensor:
    """`mask` (N,) with all neighbours of its entries up to distance `reach`."""
    wide = mask.clone() if reach else mask
    for distance in range(1, min(reach, mask.numel() - 1) + 1):
        wide[distance:] |= mask[:-distance]
        wide[:-distance] |= mask[distance:]
    return wide


def digest(masks: Iterable[Tensor]) -> str:
    hashed = hashlib.sha256()
    for mask in masks:
        hashed.update(mask.cpu().numpy())
    return hashed.hexdigest()


def disagreeing(digests: list[str]) -> list[int]:
    """The ranks whose digest differs from the majority's; all ranks if there is no majority."""
    most = max(digests, key=digests.count)
    if digests.count(most) * 2 <= len(digests) != 1:
        return list(range(len(digests)))
    return [rank for rank, mine in enumerate(digests) if mine != most]


# Packing --------------------------------------------------------------------------------------------------------------
# On a CPU numpy's flatnonzero takes a ninth of nonzero's time, index_select and scatter_ a tenth of what masks take. So
# only the mask is kept, and indices are computed from it in each step. K of N entries are chosen.


class ByParameter:
    """One flat tensor for each parameter; those of one `together` call are adjacent in memory. State must not belong to
    a bucket: after the first backward pass DDP rebuilds its buckets."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], fill: float | bool, dtype: torch.dtype | None = None
    ) -> None:
        self._pieces = {p: torch.full((p.numel(),), fill, dtype=dtype or p.dtype, device=p.device) for p in parameters}
        self._runs: dict[tuple[int, ...], Tensor] = {}

    def __getitem__(self, parameter: nn.Parameter) -> Tensor:
        return self._pieces[parameter]

    def together(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """The concatenated tensors of `parameters`: a view, writes go through."""
        key = tuple(map(id, parameters))
        if key not in self._runs:
            run = torch.cat([self._pieces[p] for p in parameters])
            self._pieces.update(zip(parameters, run.split([p.numel() for p in parameters]), strict=True))
            self._runs = {old: tensor for old, tensor in self._runs.items() if set(old).isdisjoint(key)} | {key: run}
        return self._runs[key]

    def tensors(self) -> list[Tensor]:
        return list(self._pieces.values())


def positions(mask: Tensor, k: int) -> Tensor:
    """The indices (K,) int64 where `mask` (N,) is set; k is their number."""
    if mask.is_cuda:  # nonzero would wait for the GPU to learn k
        return torch.nonzero_static(mask, size=k).view(-1)
    return torch.from_numpy(np.flatnonzero(mask.numpy()))


def pack(
    gradient: Tensor, at: Tensor, residual: Tensor | None, wire: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """The entries `at` (K,) of `gradient` plus `residual` (N,), a copy; the residual, if any, keeps the others.

    wire: rounds packed entries (K,) to the wire's precision; the rounding error is added to the residual too.
    """
    if residual is None:
        return gradient.index_select(0, at)
    packed = residual.add_(gradient).index_select(0, at)
    # Scattering a tensor is three times as fast as scattering a number.
    rest = packed - wire(packed) if wire else packed.new_zeros(1).expand_as(at)
    residual.scatter_(0, at, rest)
    return packed


def unpack(gradient: Tensor, at: Tensor, mean: Tensor) -> None:
    """`mean` (K,) at the entries `at` of `gradient` (N,), zero elsewhere."""
    gradient.zero_().scatter_(0, at, mean.to(gradient.dtype))


def give_back(gradient: Tensor, residual: Tensor, at: Tensor | None = None, gathered: int = 1) -> None:
    """Add `residual` (N,) to `gradient` (N,) and empty it.

    gathered: how many gradients the sum then holds, to divide by; the entries `at` hold one and are not divided.
    """
    gradient.add_(residual)
    if at is not None and gathered > 1:
        sent = gradient.index_select(0, at)
        gradient.div_(gathered).scatter_(0, at, sent)
    residual.zero_()
