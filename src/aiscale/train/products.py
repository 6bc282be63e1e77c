"""Matrix products in fp32 on a CPU of AMD, by oneDNN: torch takes MKL there, which is slower.

Which library multiplies decides the last digits of a result. The processor's maker chooses it, not
a measured time: that could differ between ranks, and so would their results.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.flop_counter import register_flop_formula

CPUS = Path("/proc/cpuinfo")
HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
IS_FASTER = HAS_ONEDNN and CPUS.exists() and "AuthenticAMD" in CPUS.read_text()
MIN_WEIGHTS = 2**17  #: with fewer, the gain is smaller than what a call costs

if HAS_ONEDNN:

    @register_flop_formula(torch.ops.mkldnn._linear_pointwise)
    def _flops(x_shape, weight_shape, *_, **__) -> int:
        return 2 * math.prod(x_shape) * weight_shape[0]


class Linear(nn.Linear):
    """nn.Linear, by oneDNN where that is faster."""

    def forward(self, x: Tensor) -> Tensor:
        """x (..., inputs) -> (..., outputs)"""
        if not _by_onednn(x, self.weight):
            return linear(x, self.weight, self.bias)
        if not torch.is_grad_enabled():
            return _product(x, self.weight, self.bias)
        return _Product.apply(x, self.weight, self.bias)


def _by_onednn(x: Tensor, weight: Tensor) -> bool:
    return (
        IS_FASTER
        and weight.numel() >= MIN_WEIGHTS
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == "cpu"
        and type(x) is Tensor  # neither a DTensor nor one without memory
        and type(weight) in (Tensor, nn.Parameter)
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., inputs), weight (outputs, inputs) -> (..., outputs)"""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx, d_y):
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        rows = d_y.reshape(-1, d_y.shape[-1])
        d_x = d_weight = d_bias = None
        if needs_x:
            d_x = _product(rows, weight.t()).view(x.shape)
        if needs_weight:
            d_weight = rows.t() @ x.reshape(-1, x.shape[-1])  # here MKL is as fast
        if needs_bias:
            d_bias = rows.sum(0)
        return d_x, d_weight, d_bias
