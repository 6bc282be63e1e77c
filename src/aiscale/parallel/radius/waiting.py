"""AdamW's step for those entries alone that arrived, where each is given as many steps as it has waited for.

    step_arrived(optimizer, parameter, at, waited)

Radius as published, and every method whose optimizer is a stock one, takes an entry that is not sent for one whose
gradient is zero: its moments decay, it goes on along the old one, and what arrives later meets moments that have
forgotten it. Here such an entry stays as it is, moments and weight. When its mean gradient over w steps arrives, the
moments take that up once and the weight moves by w steps.

Shapes: N entries of a parameter, flat; K of them arrived.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from aiscale.parallel.radius.mask import CHOSEN


def waits(turns: int, gathered: int) -> list[int]:
    """By its number in a mask with turns, of how many gradients an entry that is sent now sends the sum.

    gathered: sparse steps since the last dense one.
    """
    since = []
    for turn in range(turns):
        last = gathered - 1 - (gathered - 1 - turn) % turns  # sparse step in which it had its turn
        since.append(gathered - last if last >= 0 else gathered + 1)
    return [1] * (CHOSEN + 1) + since


@torch.no_grad()
def step_arrived(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, at: Tensor, waited: Tensor) -> None:
    """Step the entries `at` (K,) of `parameter`, each `waited` (K,) times as far; the others keep weight and moments.

    The optimizer is an AdamW that has taken a step before, and its state stays one that it can go on from.
    """
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    state, (beta1, beta2) = optimizer.state[parameter], group["betas"]
    state["step"] += 1
    t = float(state["step"])
    held = [tensor.view(-1) for tensor in (parameter, state["exp_avg"], state["exp_avg_sq"])]
    gradient = parameter.grad.view(-1).index_select(0, at)
    weight, first, second = (tensor.index_select(0, at) for tensor in held)
    first.lerp_(gradient, 1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root = (second / (1 - beta2**t)).sqrt_().add_(group["eps"])
    update = (first / (1 - beta1**t)).div_(root).add_(weight, alpha=group["weight_decay"])
    weight.addcmul_(update, waited, value=-group["lr"])
    for tensor, values in zip(held, (weight, first, second), strict=True):
        tensor.scatter_(0, at, values)
