"""Top-k by its definition, on ranks simulated in one process: `benchmarks/radius_sweep.py` sweeps with it."""

from __future__ import annotations

import torch

from aiscale.config import Run
from aiscale.cost.compression import is_exempt, kept_entries
from aiscale.parallel.radius import SimulatedRanks
from aiscale.parallel.serial import MicroBatch, StepResult


class PlainTopK(SimulatedRanks):
    """Of every tensor, each rank sends the k largest entries that it has not sent so far; biases are sent whole, and
    in the first `compression.warmup_steps` steps everything."""

    def __init__(self, run: Run, n_ranks: int) -> None:
        super().__init__(run.override("compression.method=none", "compression.density=0.4"), n_ranks)
        self.density, self.dense_steps = run.compression.density, run.compression.warmup_steps
        self.unsent = [{name: torch.zeros_like(p) for name, p in self.model.named_parameters()} for _ in range(n_ranks)]

    def step(self, shares: list[list[MicroBatch]], lr: float) -> StepResult:
        """One optimizer step; `shares` holds each rank's micro-batches."""
        parameters, n = dict(self.model.named_parameters()), len(shares)
        mean = {name: torch.zeros_like(p) for name, p in parameters.items()}
        total, tokens = 0.0, 0
        for unsent, micro_batches in zip(self.unsent, shares, strict=True):
            loss = sum(self._forward(batch) for batch in micro_batches) / len(micro_batches)
            for (name, p), gradient in zip(
                parameters.items(), torch.autograd.grad(loss, parameters.values()), strict=True
            ):
                unsent[name] += gradient
                is_whole = is_exempt(name) or self.dense_steps > 0
                k = p.numel() if is_whole else kept_entries(self.density, p.numel())
                sent = unsent[name].abs() >= unsent[name].abs().flatten().topk(k).values[-1]
                mean[name] += unsent[name] * sent / n
                unsent[name][sent] = 0
            total, tokens = total + loss.item() / n, tokens + sum(targets.numel() for _, targets in micro_batches)
        for name, p in parameters.items():
            p.grad = mean[name]
        self.dense_steps -= 1
        grad_norm, skipped = self.update(lr)
        return StepResult(total, tokens, grad_norm, skipped)
