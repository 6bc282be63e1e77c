"""The reference for cases that send only part of their gradients: one process simulates all ranks in turn, Radius with
`SimulatedRanks`, top-k with its definition, written again on whole tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aiscale.config import Run
from aiscale.cost.compression import is_exempt, kept_entries
from aiscale.data import Batches
from aiscale.optim import lr_at
from aiscale.parallel.radius import SimulatedRanks
from aiscale.parallel.serial import MicroBatch, StepResult
from aiscale.recipes import recipe
from aiscale.train.loop import load_corpus
from aiscale.verify.cases import Case

Outcome = tuple[list[dict], list[dict], dict[str, Tensor]]  #: results of a run: training lines, evaluations, weights


def simulate(case: Case) -> Outcome:
    """The results that `fit` would give for this case, computed in this process."""
    run = recipe("laptop").override(*case.settings())
    loop, n = run.loop, case.ranks
    with torch.random.fork_rng():  # engines seed torch
        engine = _ENGINES[run.compression.method](run, n)
        corpus = load_corpus(run, engine.world)
        batches = Batches(corpus.train, seq_len=loop.seq_len, global_batch=loop.global_batch, seed=run.data.seed)
        held_out = Batches(corpus.val, seq_len=loop.seq_len, global_batch=loop.global_batch, seed=None)
        n_micro, _ = loop.micro_batches(n)
        metrics, evaluations = [], []
        for step in range(loop.steps):
            shares = [batches.share(step, rank, n, n_micro) for rank in range(n)]
            outcome = engine.step(shares, lr_at(step, loop.steps, run.optimizer))
            metrics.append({"step": step + 1, "loss": outcome.loss, "grad_norm": outcome.grad_norm})
            if (step + 1) % loop.eval_every == 0:
                loss, tokens = engine.evaluate(held_out.share(0, 0, 1, 1))
                evaluations.append({"step": step + 1, "loss": loss, "tokens": tokens})
    return metrics, evaluations, engine.state(full=True)


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


_ENGINES = {"radius": SimulatedRanks, "top-k": PlainTopK}
