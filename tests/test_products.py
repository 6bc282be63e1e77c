"""Products by oneDNN give the plain ones' values, and they are the ones that run."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from aiscale.train import products
from aiscale.train.model import GPT, loss_of
from aiscale.train.presets import shape_of
from aiscale.train.products import Linear


@pytest.fixture
def by_onednn(monkeypatch):
    """Use oneDNN for products of any size, on any processor whose torch has it."""
    if not products.HAS_ONEDNN:
        pytest.skip("this torch has no products by oneDNN")
    monkeypatch.setattr(products, "IS_FASTER", True)
    monkeypatch.setattr(products, "MIN_WEIGHTS", 1)


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
        m.setattr(products, "linear", None)  # it must not fall back
        found = gradients(fast, x)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_torchs_flop_counter_sees_the_products_by_onednn(by_onednn, monkeypatch):
    counts = []
    for min_weights in (1, 10**9):
        monkeypatch.setattr(products, "MIN_WEIGHTS", min_weights)
        model, tokens = GPT(shape_of("2x32")), torch.zeros(2, 16, dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            loss_of(model(tokens), tokens).backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0
