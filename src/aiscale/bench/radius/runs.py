"""One training run of `aiscale bench radius --sweep`: the list of cases, and the training itself.

    row = train(Job("dense", steps=500, lr=3e-3, seed=0))

One process simulates all ranks. Radius, random-k and PowerSGD are linear in the gradients: all ranks share the mask
(or the random indices, or the factor), so the mean of their residuals follows the same rule as each residual, and n
ranks update the weights as one rank with the whole batch does, up to rounding. Ordinary top-k is not linear, since each
rank selects by its own gradients: there the ranks are simulated one after another (`TopKRanks`), as they are where bf16
rounds each rank's gradient and their sum.

Cases are compared at equal bytes on the wire: top-k sends values and indices by an all-gather, which at n ranks sends n
times as much as an all-reduce of as many values, so its density is divided by n; PowerSGD gets the largest rank that
fits.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from functools import cache

import torch
from torch import Tensor

from aiscale import cost
from aiscale.config import Run
from aiscale.cost.compression import is_exempt, kept_entries, rivals_traffic
from aiscale.data import Batches, Corpus, open_corpus
from aiscale.distributed import World, connect
from aiscale.optim import lr_at
from aiscale.parallel import build
from aiscale.parallel.compress import GradientError
from aiscale.parallel.compress.topk import Unsent
from aiscale.parallel.radius import SimulatedRanks
from aiscale.parallel.serial import Engine, MicroBatch, StepResult
from aiscale.recipes import recipe

RANKS = 4  #: simulated
DENSITIES, INTERVALS, RESIDUALS, SWITCHES = (0.9, 0.5, 0.4, 0.1), (50, 200, 400), ("sum", "mean"), (0.0, 0.2)
TURNS = {0.9: 5, 0.5: 4, 0.4: 4, 0.1: 15}  #: by density: few, so that no entry waits long, but some are selected
VAL_BATCHES, POINTS = 16, 40


@dataclass(frozen=True)
class Case:
    """A way to send gradients; `switch` is the share of the steps that are dense before compression starts."""

    name: str
    settings: tuple[str, ...] = ()
    switch: float = 0.0
    contender: bool = False  #: one of the main cases: run first, longer, and tuned at every length
    rate_warmup: float = 0.02  #: share of the steps in which the learning rate rises

    def run(self, steps: int, lr: float, seed: int) -> Run:
        rises = int(self.rate_warmup * steps) + 1
        optimizer = (f"optimizer.lr={lr}", f"optimizer.min_lr={lr / 10}", f"optimizer.warmup_steps={rises}")
        loop = (f"loop.steps={steps}", f"loop.seed={seed}", f"data.seed={seed}")
        switch = (f"compression.warmup_steps={int(self.switch * steps)}",) if self.switch else ()
        return _model().override(*optimizer, *loop, *self.settings, *switch)


@dataclass(frozen=True)
class Job:
    case: str
    steps: int
    lr: float
    seed: int


@cache
def _model() -> Run:
    """116,480 parameters, 1024 tokens a step, from a text long enough for 8,000 steps without repetition."""
    shape = ("model.d_model=64", "loop.seq_len=64", "loop.global_batch=16", "loop.device=cpu", "data.corpus=stdlib")
    return recipe("laptop").override("parallel.strategy=ddp", *shape)


@cache
def cases() -> dict[str, Case]:
    """The whole grid by name: dense, Radius at d x T x residual x switch, and its competitors at equal bytes."""
    found = [Case("dense", contender=True), Case("dense bf16", ("compression.wire=bf16",))]
    found += [Case("dense, rate rises for 0.2", rate_warmup=0.2)]  # is a gain only the effect of a slow start?
    for switch in reversed(SWITCHES):
        for density in DENSITIES:
            found += [_radius(density, T, residual, switch) for T in INTERVALS for residual in RESIDUALS]
            found += [_radius(density, 200, "sum", switch, TURNS[density], moments) for moments in ("decay", "wait")]
            found += _rivals(density, switch)
    return {case.name: case for case in found}


def _radius(
    density: float, interval: int, residual: str, switch: float, turns: int = 0, moments: str = "decay"
) -> Case:
    settings = ["method=radius", f"density={density}", f"interval={interval}", f"residual={residual}"]
    settings += [f"turns={turns}", f"moments={moments}"]
    published = residual == "sum" and interval == 200 and not turns
    contender = switch > 0 and density == 0.4 and (published or moments == "wait")
    taken = f"turns {turns}{' wait' * (moments == 'wait')}" if turns else residual
    name = f"radius d {density:g} T {interval} {taken} switch {switch:g}"
    return Case(name, tuple(f"compression.{text}" for text in settings), switch, contender)


def _rivals(density: float, switch: float) -> list[Case]:
    rank = powersgd_rank(_model(), density)
    ways = {}
    for residual in RESIDUALS:
        mean, kept = " mean" if residual == "mean" else "", f"residual={residual}"
        ways[f"random-k d {density:g}{mean}"] = ("method=random-k", f"density={density}", kept)
        ways[f"top-k d {density / RANKS:g}{mean}"] = ("method=top-k", f"density={density / RANKS}", kept)
    if rank:
        ways[f"powersgd rank {rank}"] = ("method=powersgd", f"rank={rank}")
    return [
        Case(
            f"{name} switch {switch:g}",
            tuple(f"compression.{text}" for text in texts),
            switch,
            contender=switch > 0 and density == 0.4 and name.startswith(("top-k", "powersgd")) and "mean" not in name,
        )
        for name, texts in ways.items()
    ]


def powersgd_rank(run: Run, density: float) -> int:
    """The largest rank at which PowerSGD sends at most this share of the gradients; 0 if rank 1 already sends more,
    or if the fitting rank sends less than half of it."""
    powersgd = run.override("parallel.strategy=ddp", "compression.method=powersgd")
    sizes = [_wire_share(powersgd.override(f"compression.rank={r}")) for r in range(1, 129)]
    fitting = [r for r, share in enumerate(sizes, start=1) if share <= density]
    return fitting[-1] if fitting and sizes[fitting[-1] - 1] > density / 2 else 0


def wire_share(case: Case) -> float:
    """Bytes that a rank sends, over those of a dense fp32 step; average after the switch."""
    return _wire_share(case.run(1000, 1e-3, 0))


def _wire_share(run: Run) -> float:
    dense = cost.wire_bytes("all_reduce", 4 * cost.parameter_count(run.model), RANKS)
    method = run.compression.method
    if method == "radius":
        return cost.wire_bytes("all_reduce", cost.mean_payload_bytes(run), RANKS) / dense
    traffic = cost.radius_traffic(run, RANKS) if method == "none" else rivals_traffic(run, RANKS)
    return sum(cost.wire_bytes(op, nbytes, RANKS) for (op, _), nbytes in traffic.items()) / dense


class TopKRanks(Engine):
    """Ordinary top-k with error feedback on n ranks, simulated one after another, each with its own residual."""

    def __init__(self, run: Run, world: World, n_ranks: int) -> None:
        super().__init__(run, world)
        self.config, self.n_ranks, self.taken = run.compression, n_ranks, 0
        self.unsent = [
            {n: Unsent(self.config.residual, p) for n, p in self.model.named_parameters() if not is_exempt(n)}
            for _ in range(n_ranks)
        ]

    def step(self, micro_batches: list[MicroBatch], lr: float) -> StepResult:
        (tokens, targets), total, losses = micro_batches[0], {}, []
        for rank, batch in enumerate(zip(tokens.chunk(self.n_ranks), targets.chunk(self.n_ranks), strict=True)):
            self.optimizer.zero_grad(set_to_none=True)
            loss = self._forward(batch)
            loss.backward()
            losses.append(loss.item())
            for name, parameter in self.model.named_parameters():
                total[name] = total.get(name, 0) + self._sent(rank, name, parameter.grad.view(-1))
        for name, parameter in self.model.named_parameters():
            parameter.grad.copy_((total[name] / self.n_ranks).view_as(parameter))
        self.taken += 1
        norm, skipped = self.update(lr)
        return StepResult(sum(losses) / self.n_ranks, targets.numel(), norm, skipped)

    def _sent(self, rank: int, name: str, gradient: Tensor) -> Tensor:
        """What a rank contributes to the sum: its largest entries, zero elsewhere."""
        if self.taken < self.config.warmup_steps or is_exempt(name):
            return gradient.clone()
        offered = self.unsent[rank][name].offer(gradient)
        indices = offered.abs().topk(kept_entries(self.config.density, len(offered)), sorted=False).indices
        values = offered[indices]
        self.unsent[rank][name].sent(indices, values)
        return torch.zeros_like(gradient).scatter_(0, indices, values)


@cache
def _corpus() -> Corpus:
    return open_corpus(_model().data)


class RoundingRanks(SimulatedRanks):
    """n ranks with a share of the batch each; each rank's gradient and their sum are rounded."""

    def step(self, micro_batches: list[MicroBatch], lr: float) -> StepResult:
        ((tokens, targets),) = micro_batches
        shares = zip(tokens.chunk(len(self.ranks)), targets.chunk(len(self.ranks)), strict=True)
        return super().step([[share] for share in shares], lr)


def play(run: Run, world: World) -> Engine:
    """An engine that computes in this process what RANKS ranks would."""
    if run.compression.method == "top-k":
        return TopKRanks(run, world, RANKS)
    return RoundingRanks(run, RANKS) if run.compression.wire == "bf16" else build(run, world)


def train(job: Job) -> dict:
    """Train it: training losses in nats a token, averaged between two recorded points, and the final validation loss.

    If the run diverged, its training and validation loss are None.
    """
    run, start = cases()[job.case].run(job.steps, job.lr, job.seed), time.perf_counter()
    world = connect("cpu")
    engine = play(run, world)
    loop, corpus, every = run.loop, _corpus(), max(1, job.steps // POINTS)
    batches = Batches(corpus.train, seq_len=loop.seq_len, global_batch=loop.global_batch, seed=run.data.seed)
    held_out = Batches.in_order(corpus.val, seq_len=loop.seq_len, global_batch=loop.global_batch)
    apart = max(1, held_out.steps_per_epoch // VAL_BATCHES)  # spread over the whole held-out text

    def validate() -> float:
        return engine.evaluate(held_out.batch(i * apart) for i in range(VAL_BATCHES))[0]

    losses, val_curve = [], []
    for step in range(job.steps):
        try:
            losses.append(engine.step([batches.batch(step)], lr_at(step, job.steps, run.optimizer)).loss)
        except GradientError:  # not finite from here on
            break
        if (step + 1) % (4 * every) == 0:
            val_curve.append((step + 1, round(validate(), 5)))
    tail = losses[-max(1, job.steps // 20) :]
    val_loss = validate()
    converged = len(losses) == job.steps and math.isfinite(val_loss)
    engine.close()
    world.close()
    means = [sum(losses[i : i + every]) / every for i in range(0, len(losses) - every + 1, every)]
    return {
        **asdict(job),
        "train_loss": sum(tail) / len(tail) if converged else None,
        "val_loss": val_loss if converged else None,
        "train_curve": [(every * (i + 1), round(mean, 5)) for i, mean in enumerate(means)],
        "val_curve": val_curve,
        "seconds": round(time.perf_counter() - start, 1),
    }
