"""The fast kernels give the values of the plain ones, and they are the ones that run."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from aiscale.lesson.model import GPT, kernels
from aiscale.lesson.model.kernels import (
    Linear,
    _ChunkedCrossEntropy,
    cross_entropy,
    cross_entropy_plain,
)
from aiscale.plan.config import ModelConfig

SMALL = ModelConfig(n_layer=2, n_head=4, d_model=32, vocab_size=61, max_seq_len=16)


@pytest.fixture
def by_onednn(monkeypatch):
    """Use oneDNN for products of any size, on any processor whose torch has it."""
    if not kernels.HAS_ONEDNN:
        pytest.skip("this torch has no products by oneDNN")
    monkeypatch.setattr(kernels, "ONEDNN_IS_FASTER", True)
    monkeypatch.setattr(kernels, "MIN_WEIGHTS", 1)


# Linear layers -----------------------------------------------------------------------------------


def gradients(layer: torch.nn.Linear, x: torch.Tensor) -> list[torch.Tensor]:
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y = layer(x)
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    return [y, x.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(40, 24), (3, 17, 24), (0, 24)])
def test_products_by_onednn_give_the_plain_layers_values_and_gradients(
    shape, bias, by_onednn, monkeypatch
):
    torch.manual_seed(0)
    fast = Linear(24, 36, bias=bias)
    plain = torch.nn.Linear(24, 36, bias=bias)
    plain.load_state_dict(fast.state_dict())
    x = torch.randn(shape)
    expected = gradients(plain, x)
    with monkeypatch.context() as m:
        m.setattr(kernels.F, "linear", None)  # it must not fall back
        found = gradients(fast, x)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_torchs_flop_counter_sees_the_products_by_onednn(by_onednn, monkeypatch):
    counts = []
    for min_weights in (1, 10**9):
        monkeypatch.setattr(kernels, "MIN_WEIGHTS", min_weights)
        model, tokens = GPT(SMALL), torch.zeros(2, 16, dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            model(tokens, tokens).backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


# Attention ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 7, 130])
def test_attention_by_heads_gives_the_fused_kernels_value_and_gradients(tokens, monkeypatch):
    # 4 and 2 heads at a time
    monkeypatch.setattr(kernels._AttentionByHeads, "CHUNK", 4 * tokens**2)
    torch.manual_seed(0)
    qkv, d_y = torch.randn(3, 2, 3, tokens, 16).bfloat16(), torch.randn(2, 3, tokens, 16).bfloat16()

    def relative_errors(dtype, attention) -> torch.Tensor:
        inputs = [x.to(dtype).requires_grad_() for x in qkv]
        y = attention(*inputs)
        results = [y.detach(), *torch.autograd.grad(y, inputs, d_y.to(dtype))]
        return [
            (r.double() - e).norm() / e.norm().clamp(min=1.0)
            for r, e in zip(results, exact, strict=True)
        ]

    def fused(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    inputs = [x.double().requires_grad_() for x in qkv]
    y = fused(*inputs)
    exact = [y.detach(), *torch.autograd.grad(y, inputs, d_y.double())]
    ours = relative_errors(torch.bfloat16, kernels.causal_attention)
    torchs = relative_errors(torch.bfloat16, fused)
    assert all(a < 2**-7 and a < 2 * b + 1e-3 for a, b in zip(ours, torchs, strict=True))


# The loss ----------------------------------------------------------------------------------------


def test_chunked_cross_entropy_equals_the_plain_one_in_value_and_gradient(monkeypatch):
    # chunks of at most 256 tokens: 3 of 640
    monkeypatch.setattr(_ChunkedCrossEntropy, "CHUNK_BYTES", 0)
    torch.manual_seed(0)
    hidden = torch.randn(5, 128, 16, dtype=torch.float64)
    weight = torch.randn(301, 16, dtype=torch.float64)
    targets = torch.randint(0, 301, (5, 128))
    results = []
    for loss_of in (cross_entropy, cross_entropy_plain):
        inputs = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        loss = loss_of(*inputs, targets)
        (3 * loss).backward()
        results.append([loss.double(), *(x.grad for x in inputs)])
    # The plain loss rounds to fp32, hence 1e-7 and not 1e-15.
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-6, rtol=1e-6)
    with torch.no_grad():
        assert torch.equal(cross_entropy(hidden, weight, targets).double(), results[0][0])


def test_chunked_cross_entropy_equals_the_plain_one_under_bf16_autocast():
    model, tokens = GPT(SMALL), torch.arange(48).view(3, 16)
    grads = []
    for loss_of in (cross_entropy, cross_entropy_plain):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss_of(model.hidden(tokens), model.head_weight, tokens).backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert grads[0].dtype == torch.float32
    assert (grads[0] - grads[1]).norm() < 0.02 * grads[1].norm()
