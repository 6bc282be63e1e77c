"""Radius without a process group: one process simulates all ranks, with the code that real ranks run.

All ranks share one model and one optimizer; each has its own compressor with a mask (the same on all ranks) and a
residual. The weights equal those of n real processes up to the order of summation in the collective (tested).
"""

from __future__ import annotations

from typing import Any

import torch

from aiscale.config import ConfigError, Run
from aiscale.distributed import Traffic, World
from aiscale.parallel.compress import Bucket, Compressor, build_compressor
from aiscale.parallel.serial import Engine, MicroBatch, StepResult


class _Place(World):
    """The world of one simulated rank, whose collectives take its own value for that of every rank."""

    def gather(self, value: Any) -> list[Any]:
        return [value] * self.size

    def any(self, flag: bool) -> bool:
        return flag


class SimulatedRanks(Engine):
    """An engine whose step takes the micro-batches of all ranks."""

    def __init__(self, run: Run, n_ranks: int, device: str = "cpu") -> None:
        if run.compression.method not in ("none", "radius"):
            raise ConfigError(
                f"compression.method {run.compression.method} is not simulated: set it to radius or none, "
                "or start real ranks"
            )
        super().__init__(run, _place(0, 1, device))
        run.check_world(n_ranks)
        self.ranks: list[Compressor] = [
            build_compressor(run, _place(rank, n_ranks, device), self.model, self.optimizer) for rank in range(n_ranks)
        ]

    def step(self, shares: list[list[MicroBatch]], lr: float) -> StepResult:
        """One optimizer step; `shares` are each rank's micro-batches."""
        shared, total_loss, tokens = [], 0.0, 0
        for compressor, micro_batches in zip(self.ranks, shares, strict=True):
            self.optimizer.zero_grad(set_to_none=True)
            for batch in micro_batches:
                loss = self._forward(batch) / len(micro_batches)
                self.scaler.scale(loss).backward()
                total_loss, tokens = total_loss + loss.item() / len(self.ranks), tokens + batch[1].numel()
            bucket = self._bucket()
            compressor.check_finite(bucket.parameters, bucket.gradients)
            shared.append(compressor.share(compressor.pack(bucket)))
            compressor.after_backward()
        self.ranks[0].unpack(bucket, sum(shared))
        bucket.fill_gradients()
        grad_norm, skipped = self.update(lr)
        return StepResult(total_loss, tokens, grad_norm, skipped)

    def _after_update(self) -> None:
        for compressor in self.ranks:
            compressor.after_update()

    def _bucket(self) -> Bucket:
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        buffer = torch.cat([p.grad.reshape(-1) for p in parameters])
        pieces = buffer.split([p.numel() for p in parameters])
        return Bucket(buffer, parameters, [piece.view_as(p) for piece, p in zip(pieces, parameters, strict=True)])


def _place(rank: int, size: int, device: str) -> World:
    return _Place(rank, size, rank, torch.device(device), launcher="none", backend="gloo", traffic=Traffic())
