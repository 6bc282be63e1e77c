"""Products in 8, 6 and 4 bits, emulated: operands are rounded to what the format can hold, then multiplied in fp32.

    y = product(x, weight, "fp8_e4m3")                         # in place of F.linear
    error = (y - F.linear(x, weight)).norm() / y.norm()        # doubles for each bit less of the fraction
    y = product(x, weight, "fp4_e2m1", block=32)               # a scale for every 32 numbers, as in the MX formats

fp8: Micikevicius et al. 2022, as torch.float8_e4m3fn and float8_e5m2; fp6 and fp4: OCP Microscaling Formats (MX) 1.0.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

#: bits of the exponent, bits of the fraction, largest number
FORMATS = {"fp8_e4m3": (4, 3, 448.0), "fp8_e5m2": (5, 2, 57344.0)}
FORMATS |= {"fp6_e2m3": (2, 3, 7.5), "fp6_e3m2": (3, 2, 28.0), "fp4_e2m1": (2, 1, 6.0)}


def rounded(x: Tensor, name: str) -> Tensor:
    """Each number's nearest in the format, ties to even; larger ones become the largest."""
    exponent_bits, fraction_bits, largest = FORMATS[name]
    smallest = 2 - 2 ** (exponent_bits - 1)  # exponent of the smallest normal number; below it steps stay equal
    exponent = (torch.frexp(x.float())[1] - 1).clamp(min=smallest)
    step = torch.ldexp(torch.ones_like(x, dtype=torch.float32), exponent - fraction_bits)
    return ((x / step).round() * step).clamp(-largest, largest).to(x.dtype)


def product(x: Tensor, weight: Tensor, name: str, block: int = 0) -> Tensor:
    """x (...,in), weight (out,in) -> (...,out). Both are scaled so that the largest number of the tensor, or of every
    `block` numbers along in, is the format's largest; block must divide in."""
    return F.linear(*(_scaled(t, name, block) for t in (x, weight)))


def _scaled(x: Tensor, name: str, block: int) -> Tensor:
    parts = x.unflatten(-1, (-1, block)) if block else x.reshape(1, -1)
    scale = parts.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / FORMATS[name][2]
    return (rounded(parts / scale, name) * scale).reshape(x.shape)
