"""The optimizer of a trainer, and its rate."""

from __future__ import annotations

import math

import torch
from torch.distributed.tensor import DTensor


def make_optimizer(model, args, **options):
    """Weight decay on matrices, none on biases and norms."""
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    vectors = [weight for weight in model.parameters() if weight.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if args.optimizer == "lamb":
        return Lamb(groups, lr=args.lr, betas=(0.9, args.beta2))
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, args.beta2), **options)


def rate(step, args):
    """A linear warm-up, then --lr, or with --min-lr a cosine down to it."""
    if step < args.warm_up:
        return args.lr * (step + 1) / (args.warm_up + 1)
    if args.min_lr is None:
        return args.lr
    falling = max(1, (args.decay_steps or args.steps) - 1 - args.warm_up)
    done = min(1.0, (step - args.warm_up) / falling)
    return args.min_lr + (args.lr - args.min_lr) * (1 + math.cos(math.pi * done)) / 2


class Lamb(torch.optim.Optimizer):
    """Adam's step, as long as a share of the tensor that it changes (You et al. 2020, algorithm 2).

    w = w - lr |w| / |r + decay w| (r + decay w), with Adam's direction r. Tensors may be sharded.
    """

    def __init__(self, groups, lr, betas, eps=1e-8):
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self.change(weight, group)

    def change(self, weight, group):
        state = self.state[weight]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(weight)
            state["exp_avg_sq"] = torch.zeros_like(weight)
        state["step"] += 1
        steps, (beta1, beta2) = state["step"].item(), group["betas"]  # on the host already
        state["exp_avg"].lerp_(weight.grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(weight.grad, weight.grad, value=1 - beta2)
        mean = state["exp_avg"] / (1 - beta1**steps)
        deviation = (state["exp_avg_sq"] / (1 - beta2**steps)).sqrt_()
        update = mean / (deviation + group["eps"]) + group["weight_decay"] * weight
        size, length = whole_norm(weight), whole_norm(update)
        # A tensor that is 0, as biases are at first, could never leave it.
        ratio = torch.where((size > 0) & (length > 0), size / length, 1.0)
        local_weight, local_update = (
            each.to_local() if isinstance(each, DTensor) else each for each in (weight, update)
        )
        local_weight.sub_(local_update * (ratio * group["lr"]))


def whole_norm(tensor):
    """Of the whole tensor, of which this rank may have a part."""
    norm = torch.linalg.vector_norm(tensor)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
