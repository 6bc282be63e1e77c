"""What Radius remembers, by parameter, laid out as DDP's buckets are.

    residual = ByParameter(parameters, torch.float32, 0)
    residual[parameter]                     # (N,) of one parameter
    residual.together(bucket.parameters)    # (sum of N,) of a whole bucket, in its order: one operation serves them all

A bucket is no identity: after the first backward pass, also of a run that goes on from a checkpoint, DDP fills its
buckets anew, in the order in which gradients appeared. What is kept moves with the parameters then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn


class ByParameter:
    """One flat tensor for each parameter; those that were asked for together lie side by side in memory."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], fill: float | bool, dtype: torch.dtype | None = None
    ) -> None:
        self._pieces = {p: torch.full((p.numel(),), fill, dtype=dtype or p.dtype, device=p.device) for p in parameters}
        self._runs: dict[tuple[int, ...], Tensor] = {}

    def __getitem__(self, parameter: nn.Parameter) -> Tensor:
        return self._pieces[parameter]

    def together(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """The tensors of `parameters`, end to end: not a copy, it may be written to."""
        key = tuple(map(id, parameters))
        if key not in self._runs:
            run = torch.cat([self._pieces[p] for p in parameters])
            self._pieces.update(zip(parameters, run.split([p.numel() for p in parameters]), strict=True))
            self._runs = {old: tensor for old, tensor in self._runs.items() if set(old).isdisjoint(key)} | {key: run}
        return self._runs[key]

    def tensors(self) -> list[Tensor]:
        return list(self._pieces.values())
