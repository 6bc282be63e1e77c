"""Radius with ZeRO-1: only the owner of a parameter has its moments, so it chooses, and tells the others which.

    spread(world, masks, owners)

That costs one bit an entry at every refresh, as bookkeeping, where ranks that all hold the moments send nothing.

Shapes: N entries of a parameter, flat.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from aiscale.distributed import World


def spread(world: World, masks: Mapping[str, Tensor], owners: Mapping[str, int]) -> None:
    """Fill each mask (N,), in place, with that of the rank which owns the parameter. All ranks call it."""
    for rank in sorted(set(owners.values())):
        owned = [masks[name] for name, owner in owners.items() if owner == rank]
        together = torch.cat(owned)
        bits = to_bits(together)
        with world.control():
            dist.broadcast(bits, src=rank)
        for mask, part in zip(owned, from_bits(bits, len(together)).split([len(m) for m in owned]), strict=True):
            mask.copy_(part)


def to_bits(mask: Tensor) -> Tensor:
    """(N,) bool -> (ceil(N / 8),) uint8."""
    octets = F.pad(mask.to(torch.uint8), (0, -len(mask) % 8)).view(-1, 8)
    return (octets << torch.arange(8, dtype=torch.uint8, device=mask.device)).sum(1, dtype=torch.uint8)


def from_bits(bits: Tensor, size: int) -> Tensor:
    """The inverse of to_bits, (size,) bool."""
    octets = bits.view(-1, 1) >> torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (octets & 1).bool().view(-1)[:size]
