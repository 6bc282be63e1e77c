"""Puts the shards of ranks together, and measures how far two tensors are apart.

found = wholes(traces, step, "weights")        # {name: Whole}
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Whole:
    """A tensor of the model, put together from what ranks had of it; or the sums of its sketch."""

    values: torch.Tensor
    copies: dict[
        int, float
    ]  #: rank -> how far its copy is from that of the first rank that has one
    is_sketch: bool

    @property
    def is_fp64(self) -> bool:
        return self.values.dtype == torch.float64 and not self.is_sketch


def wholes(traces: list[dict], step: int, kind: str, reduce: str = "first") -> dict[str, Whole]:
    """The tensors of which ranks had all parts. Of several copies the first counts, or their "mean"
    or "sum"."""
    pieces: dict[str, list[tuple[int, dict]]] = defaultdict(list)
    for trace in traces:
        if step < len(trace["steps"]):
            for name, piece in trace["steps"][step][kind].items():
                pieces[name].append((trace["rank"], piece))
    found = {}
    for name, parts in pieces.items():
        whole = _put_together(parts, reduce)
        if whole is not None:
            found[name] = whole
    return found


def _put_together(parts: list[tuple[int, dict]], reduce: str) -> Whole | None:
    shape = parts[0][1]["shape"]
    regions: dict[tuple, dict[int, torch.Tensor]] = defaultdict(dict)
    for rank, piece in parts:
        if piece["shape"] != shape or piece["partial"]:
            return None
        if math.prod(piece["size"]):
            regions[piece["at"], piece["size"]][rank] = piece["values"]
    if sum(math.prod(size) for _, size in regions) != math.prod(shape):
        return None
    is_sketch = next(iter(regions.values()), None) is not None and _is_sketched(regions)
    copies: dict[int, float] = {}
    total = None
    for (at, size), by_rank in regions.items():
        values = _reduced(list(by_rank.values()), reduce)
        first = next(iter(by_rank.values()))
        for rank, copy in by_rank.items():
            copies[rank] = max(copies.get(rank, 0.0), relative(copy, first))
        if is_sketch:
            total = values.clone() if total is None else total + values
        else:
            total = torch.zeros(shape, dtype=values.dtype) if total is None else total
            total[
                tuple(slice(begin, begin + length) for begin, length in zip(at, size, strict=True))
            ] = values
    return None if total is None else Whole(total, copies, is_sketch)


def _is_sketched(regions: dict) -> bool:
    (_, size), by_rank = next(iter(regions.items()))
    return tuple(next(iter(by_rank.values())).shape) != tuple(size)


def _reduced(copies: list[torch.Tensor], reduce: str) -> torch.Tensor:
    if reduce == "first":
        return copies[0]
    total = torch.stack(copies).sum(0)
    return total if reduce == "sum" else total / len(copies)


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    """The length of the difference, as a share of the length of `other`. Where both hold inf or
    NaN, 0."""
    if one.shape != other.shape:
        return math.inf
    if not torch.isfinite(one).all() or not torch.isfinite(other).all():
        return (
            0.0 if not torch.isfinite(one).all() and not torch.isfinite(other).all() else math.inf
        )
    one, other = one.double(), other.double()
    return float((one - other).norm() / other.norm().clamp_min(1e-30))


def ratio(one: torch.Tensor, other: torch.Tensor) -> float:
    """The number by which `other` is multiplied to be nearest to `one`."""
    one, other = one.double().flatten(), other.double().flatten()
    return float(one @ other / (other @ other).clamp_min(1e-60))


def is_multiple(one: torch.Tensor, other: torch.Tensor, within: float = 1e-3) -> bool:
    """Whether `one` is `other`, multiplied by a number."""
    return relative(one, other.double() * ratio(one, other)) < within


def is_garbage(values: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether it holds what memory held before, or no numbers."""
    if not torch.isfinite(values).all():
        return True
    return (
        bool(values.abs().max() > 1e6 * other.abs().max().clamp_min(1e-3))
        if values.numel()
        else False
    )
