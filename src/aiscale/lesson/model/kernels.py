"""Three operations in which a small model spends its time on a CPU, faster than in plain torch.

Products, bf16 attention, the loss. `benchmarks/model.py` measures steps with and without each
(`ON`).

The library that multiplies, and so the last digits of fp32 results, depends on the processor's
maker: oneDNN on AMD, MKL on all others. bf16 attention up to 512 tokens rounds differently from
torch's fused kernel.

Shapes: B batch, H heads, G key/value heads, T tokens, C width of a head, N = B T, D width, V
vocabulary, n tokens of one chunk.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

#: a kernel that is off runs plain torch, to measure what it gains
ON = dict.fromkeys(("products", "attention", "cross-entropy"), True)


# Products in fp32 --------------------------------------------------------------------------------
# Eager torch uses Intel's MKL for all fp32 products on a CPU. On AMD's processors oneDNN is faster.


HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
_CPUS = Path("/proc/cpuinfo")
#: decided by the maker, not by timing: timings, and then results, could differ between ranks
ONEDNN_IS_FASTER = HAS_ONEDNN and _CPUS.exists() and "AuthenticAMD" in _CPUS.read_text()
MIN_WEIGHTS = 2**17  #: for a smaller weight the overhead exceeds the gain

if HAS_ONEDNN:

    @register_flop_formula(torch.ops.mkldnn._linear_pointwise)
    def _linear_flops(x_shape, weight_shape, *_, **__) -> int:
        # So that torch's FlopCounterMode counts these products.
        return 2 * math.prod(x_shape) * weight_shape[0]


def _by_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether x weight^T goes to oneDNN: fp32 on a CPU, plain tensors, large enough."""
    return (
        weight.numel() >= MIN_WEIGHTS
        and ON["products"]
        and (ONEDNN_IS_FASTER and not torch.compiler.is_compiling())
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == "cpu"
        and type(x) is Tensor
        and type(weight) in (Tensor, nn.Parameter)
        and not torch.is_autocast_enabled("cpu")
    )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear with oneDNN, without autograd: x (...,in), weight (out,in) -> (...,out)."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _OneDnnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx, d_y: Tensor):
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad
        d_y = d_y.reshape(-1, d_y.shape[-1])
        return (
            _product(d_y, weight.t()).view(x.shape) if need_x else None,
            d_y.t() @ x.reshape(-1, x.shape[-1]) if need_weight else None,  # here MKL is as fast
            d_y.sum(0) if need_bias else None,
        )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear with faster products on a CPU: x (...,in), weight (out,in) -> (...,out)."""
    if not _by_onednn(x, weight):
        return F.linear(x, weight, bias)
    return (_OneDnnLinear.apply if torch.is_grad_enabled() else _product)(x, weight, bias)


class Linear(nn.Linear):
    """nn.Linear with faster products on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        """x (...,in) -> (...,out)."""
        return linear(x, self.weight, self.bias)


# Attention ---------------------------------------------------------------------------------------
# In bf16, a few whole heads at a time, whose scores fit in the cache, take 0.6 times as long as
# torch's fused kernel up to 512 tokens; at 1024 that, which skips the masked half, is as fast.

MAX_TOKENS_BY_HEADS = 512


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(C)) v, causal: q (B,H,T,C), k and v (B,G,T,C) -> (B,H,T,C)."""
    by_heads = (
        ON["attention"]
        and torch.is_grad_enabled()
        and q.device.type == "cpu"
        and q.dtype == k.dtype == v.dtype == torch.bfloat16
        and q.shape == k.shape == v.shape
        and q.shape[2] <= MAX_TOKENS_BY_HEADS
        and type(q) is Tensor
    )
    if by_heads:
        return _AttentionByHeads.apply(q, k, v)
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=q.shape[2] > 1, enable_gqa=q.shape[1] != k.shape[1]
    )


class _AttentionByHeads(torch.autograd.Function):
    """Saves q, k and v; the backward pass recomputes the probabilities, as the fused kernel's."""

    CHUNK = 2**20  #: scores computed at a time

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.shape = q.shape
        q, k, v = (t.reshape(-1, *t.shape[2:]) for t in (q, k, v))  # (B H,T,C)
        ctx.save_for_backward(q, k, v)
        y, mask = torch.empty_like(v), _later_tokens(q)
        for q_n, k_n, v_n, y_n in _heads(q, k, v, y):
            torch.bmm(_probabilities(q_n, k_n, mask), v_n, out=y_n)
        return y.view(ctx.shape)

    @staticmethod
    def backward(ctx, d_y: Tensor):
        q, k, v = ctx.saved_tensors
        mask, scale = _later_tokens(q), q.shape[-1] ** -0.5
        grads = [torch.empty_like(t) for t in (q, k, v)]
        chunks = _heads(q, k, v, d_y.reshape(q.shape), *grads)
        for q_n, k_n, v_n, d_y_n, d_q_n, d_k_n, d_v_n in chunks:
            p = _probabilities(q_n, k_n, mask)  # (n,T,T)
            torch.bmm(p.mT, d_y_n, out=d_v_n)
            d_scores = torch.ops.aten._softmax_backward_data(d_y_n @ v_n.mT, p, -1, p.dtype)
            torch.bmm(d_scores, k_n, out=d_q_n).mul_(scale)
            torch.bmm(d_scores.mT, q_n, out=d_k_n).mul_(scale)
        return tuple(grad.view(ctx.shape) for grad in grads)


def _later_tokens(q: Tensor) -> Tensor:
    """(T,T): -inf above the diagonal, else 0."""
    return q.new_full((q.shape[1], q.shape[1]), -math.inf).triu_(1)


def _probabilities(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    """q, k (n,T,C) -> (n,T,T). Not torch.softmax, which returns fp32 under autocast."""
    scores = torch.baddbmm(mask, q, k.mT, alpha=q.shape[-1] ** -0.5)
    return torch.ops.aten._softmax(scores, -1, False)


def _heads(*tensors: Tensor):
    """Split each (B H,T,C) into chunks of a few heads."""
    T = tensors[0].shape[1]
    return zip(*(t.split(max(1, _AttentionByHeads.CHUNK // T**2)) for t in tensors), strict=True)


# Cross-entropy -----------------------------------------------------------------------------------
# The logits are the largest tensor of a small model, and the plain form holds three copies of them.


def cross_entropy_plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The mean of -log softmax(hidden weight^T)[target], a scalar.

    hidden (B,T,D), head weight (V,D), targets (B,T).
    """
    logits = F.linear(hidden, weight).flatten(0, -2)
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.to(wide), targets.flatten())


def cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """cross_entropy_plain, holding the logits of a few hundred tokens at a time.

    Under torch.compile it is the plain form: the compiler fuses its steps, and then few large
    products are faster.
    """
    if torch.compiler.is_compiling() or not ON["cross-entropy"]:
        return cross_entropy_plain(hidden, weight, targets)
    with_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return _ChunkedCrossEntropy.apply(hidden.flatten(0, -2), weight, targets.flatten(), with_grad)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The forward pass also computes the gradients, and frees the logits chunk by chunk.

    The gradient with respect to the logits is softmax - onehot, known in the forward pass; from it
    come those of hidden and weight.
    """

    CHUNK_BYTES = 2**26  #: of logits at a time, but at least 256 tokens
    CACHED_LOGITS = 2**20  #: of one softmax on a CPU, so that they stay in its cache

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, with_grad: bool) -> Tensor:
        """hidden (N,D), weight (V,D), targets (N,) -> the mean loss, a scalar."""
        device = hidden.device.type
        low = hidden.dtype
        if torch.is_autocast_enabled(device):
            low = torch.get_autocast_dtype(device)
        wide = torch.promote_types(low, torch.float32)
        x, w = hidden.to(low), weight.to(low)
        total = torch.zeros((), device=hidden.device, dtype=wide)
        d_hidden, d_weight = torch.empty_like(x) if with_grad else None, None
        most = max(256, _ChunkedCrossEntropy.CHUNK_BYTES // (len(w) * w.element_size()))
        # As few chunks as fit: each adds a whole matrix to d_weight; in bf16 that costs a product.
        chunks = math.ceil(len(x) / most)
        for start, end in itertools.pairwise(i * len(x) // chunks for i in range(chunks + 1)):
            rows = slice(start, end)
            # (n,V), and after the loop the gradient with respect to them.
            logits = linear(x[rows], w)
            at_once = len(logits)
            if device == "cpu":
                at_once = max(1, _ChunkedCrossEntropy.CACHED_LOGITS // len(w))
            parts = logits.split(at_once), targets[rows, None].split(at_once)
            for part, target in zip(*parts, strict=True):
                log_p = F.log_softmax(part, dim=-1, dtype=wide)
                total -= log_p.gather(1, target).sum()
                if with_grad:
                    part.copy_(
                        log_p.exp_().scatter_add_(1, target, log_p.new_full(target.shape, -1.0))
                    )
            if with_grad:
                torch.mm(logits, w, out=d_hidden[rows])
                if d_weight is None:
                    d_weight = (logits.t() @ x[rows]).to(wide)
                elif low == wide:
                    d_weight.addmm_(logits.t(), x[rows])
                else:
                    d_weight += logits.t() @ x[rows]
        ctx.dtypes, ctx.tokens = (hidden.dtype, weight.dtype), len(x)
        ctx.save_for_backward(d_hidden, d_weight)
        return total / len(x)

    @staticmethod
    def backward(ctx, d_loss: Tensor):
        # Divide by the number of tokens only here: in fp16 the quotient would underflow without
        # d_loss's loss scale.
        d_hidden, d_weight = ctx.saved_tensors
        scale = d_loss / ctx.tokens
        d_hidden = (d_hidden * scale).to(ctx.dtypes[0])
        d_weight = (d_weight * scale).to(ctx.dtypes[1])
        return d_hidden, d_weight, None, None
