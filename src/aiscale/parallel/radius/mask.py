"""Which entries of each parameter a sparse step of Radius sends.

    masks = choose({name: scores}, density=0.4, scope="tensor", reach=0)      # {name: (N,) bool}
    when = in_turns(mask, 3)                                                  # {name: (N,) uint8}
    sent_now(when, turn)                                                      # (N,) bool

All ranks have the same optimizer states, so they choose the same entries and never send indices; `digest` checks this.
With ZeRO-1 only the owner of a parameter has its moments: it chooses, and `spread` sends its mask, one bit an entry.

Shapes: N entries of a parameter, flat.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from aiscale.cost.compression import chosen_entries
from aiscale.distributed import World

CHOSEN = 1  #: in a mask with turns: sent in every sparse step; larger values: sent only in that turn


def scores(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, by: str) -> Tensor:
    """The score of each entry of `parameter`, (N,), right after the optimizer's step.

    by: update, AdamW's direction m / (1 - beta1^t) over sqrt(v / (1 - beta2^t)) + eps, without weight decay (for SGD
    the momentum); gradient, the one just averaged; momentum, the first moment.
    """
    state = optimizer.state[parameter]
    if by == "update" and "exp_avg_sq" in state:
        group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
        (beta1, beta2), t = group["betas"], float(state["step"])
        root = (state["exp_avg_sq"] / (1 - beta2**t)).sqrt_().add_(group["eps"])
        return (state["exp_avg"] / (1 - beta1**t)).div_(root).abs_().view(-1)
    moment = state.get("exp_avg", state.get("momentum_buffer"))
    chosen = parameter.grad if by == "gradient" or moment is None else moment
    return chosen.abs().view(-1)


def choose(
    scored: Mapping[str, Tensor], *, density: float, scope: str, reach: int, turns: int = 0
) -> dict[str, Tensor]:
    """{name: scores (N,)} -> {name: mask (N,)}: the k largest of each tensor, or (scope global) of all together.

    Each also selects its neighbours up to the distance `reach` (r of Radius) within its tensor. With turns fewer are
    chosen, since the others use part of the density.
    """
    if scope == "global":
        everything = largest(torch.cat(list(scored.values())), density, turns)
        masks = dict(zip(scored, everything.split([s.numel() for s in scored.values()]), strict=True))
    else:
        masks = {name: largest(values, density, turns) for name, values in scored.items()}
    return {name: widened(mask, reach) for name, mask in masks.items()}


def largest(values: Tensor, density: float, turns: int = 0) -> Tensor:
    """The mask (N,) of the k = max(floor(density N), 1) largest values; of equal ones the first.

    torch.topk does not define which of equal values it takes, and many are equal: all zeros in the embedding's rows of
    tokens that did not occur.
    """
    n = values.numel()
    k = chosen_entries(density, n, turns)
    if not k:  # in a small tensor, turns may leave none
        return torch.zeros_like(values, dtype=torch.bool)
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


def in_turns(mask: Tensor, turns: int) -> Tensor:
    """`mask` (N,) bool -> (N,) uint8: CHOSEN where it is set; the others are assigned to the turns round robin."""
    turn = (~mask).cumsum(0).sub_(1).remainder_(turns).add_(CHOSEN + 1)
    return turn.masked_fill_(mask, CHOSEN).to(torch.uint8)


def sent_now(when: Tensor, turn: int) -> Tensor:
    """The entries that turn `turn` (0-based) sends, (N,) bool; `when` (N,) is from in_turns."""
    return (when == CHOSEN) | (when == CHOSEN + 1 + turn)


def turn_sizes(when: Tensor, turns: int) -> list[int]:
    """(entries that are always sent, entries of turn 0, of turn 1, ...); `when` (N,) is from in_turns."""
    return torch.bincount(when, minlength=CHOSEN + 1 + turns)[CHOSEN:].tolist()


def spread(world: World, masks: Mapping[str, Tensor], mine: list[str]) -> None:
    """Fill each mask (N,) in place with that of its owner, the rank that has it among `mine`. Collective."""
    for rank, names in enumerate(world.gather(mine)):
        owned = [masks[name] for name in names]
        if not owned:
            continue
        together = torch.cat(owned)
        bits = torch.from_numpy(np.packbits(together.cpu().numpy())).to(together.device)
        with world.control():
            dist.broadcast(bits, src=rank)
        theirs = torch.from_numpy(np.unpackbits(bits.cpu().numpy(), count=len(together)))
        for mask, part in zip(owned, theirs.split([len(m) for m in owned]), strict=True):
            mask.copy_(part)


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
