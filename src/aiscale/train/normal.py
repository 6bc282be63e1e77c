"""Normal numbers that depend on a tensor's name and their place in it, not on who draws them."""

from __future__ import annotations

import hashlib

import torch


def normal(name, std, start, size, whole):
    """A part of a tensor of shape `whole` with normal numbers: of shape `size`, from `start` on.

    Each row of the tensor has a seed of its own.
    """
    first = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "big")
    generator, row = torch.Generator(), torch.empty(whole[1:], dtype=torch.float32)
    inner = slices(start[1:], size[1:])
    part = torch.empty(size, dtype=torch.float32)
    for number in range(size[0]):
        generator.manual_seed(first + start[0] + number)
        part[number] = row.normal_(0.0, std, generator=generator)[inner]
    return part


def slices(start, size):
    return tuple(slice(at, at + length) for at, length in zip(start, size, strict=True))
