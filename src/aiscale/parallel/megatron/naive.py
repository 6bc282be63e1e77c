"""Tensor parallelism by hand: Megatron-LM's f and g around a pair of matrices (Shoeybi et al. 2019).

    y = Leave.apply(gelu(Enter.apply(x) @ columns) @ rows)      # A by columns, B by rows: one sum in each pass

Megatron-Core's engine does the same in every layer; see `engine`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class Enter(torch.autograd.Function):
    """f: nothing forward; backward, every rank's contribution to the gradient of x is added up."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        dist.all_reduce(gradient := gradient.clone())
        return gradient


class Leave(torch.autograd.Function):
    """g: forward, every rank's contribution to y is added up; nothing backward."""

    @staticmethod
    def forward(ctx, y: Tensor) -> Tensor:
        dist.all_reduce(y := y.clone())
        return y

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient
