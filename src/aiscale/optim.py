"""The optimizer and its learning rate, the same for every strategy.

optimizer = build_optimizer(model, run.optimizer)
for step in range(total_steps):
    set_lr(optimizer, lr_at(step, total_steps, run.optimizer))
    loss = model(x, y); loss.backward()
    grad_norm = clip_(model.parameters(), run.optimizer.clip_norm)
    optimizer.step(); optimizer.zero_grad()
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from aiscale.config import ConfigError, OptimizerConfig

# Devices with torch's fused optimizer kernels; on a CPU they are 8 times as fast as one update per parameter.
FUSED_DEVICES = {"cpu", "cuda", "mps", "xpu"}


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Weight decay on matrices and embeddings; none on biases and norms."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter 2019) or SGD with momentum over the model's trainable parameters."""
    groups = parameter_groups(model, config.weight_decay)
    if not groups:
        raise ConfigError("the model has no trainable parameters: call requires_grad_(True) on some of them")
    fused = all(p.device.type in FUSED_DEVICES and p.is_floating_point() for group in groups for p in group["params"])
    if config.name == "sgd":
        # torch's fused SGD does not support FSDP's sharded tensors.
        fused = fused and all(type(p) is nn.Parameter for group in groups for p in group["params"])
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=fused)
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=fused)


def lr_at(step: int, total_steps: int, config: OptimizerConfig) -> float:
    """The learning rate of optimizer step `step`, 0-based.

    Linear warm-up over warmup_steps (step 0 is above 0, step warmup_steps is the first at the peak), then constant, or
    a half cosine or a line down to min_lr, reached at the last step, or at the last of decay_steps and kept after it.
    """
    if step < 0:
        raise ConfigError(f"step is {step}: steps count from 0")
    if step < config.warmup_steps:
        return config.lr * (step + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return config.lr
    falling = max(1, (config.decay_steps or total_steps) - 1 - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / falling)
    remaining = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.min_lr + (config.lr - config.min_lr) * remaining


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def clip_(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale the gradients in place so that their global norm is at most max_norm; 0 only measures. Returns the norm
    before clipping, a scalar tensor; for sharded parameters, the whole model's."""
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters])
    if isinstance(norm, torch.Tensor) and hasattr(norm, "full_tensor"):
        norm = norm.full_tensor()
    if max_norm > 0:
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm
