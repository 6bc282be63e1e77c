"""Parts of Radius in one process: selection, packing, residual, predicted bytes, bad settings."""

import math

import pytest
import torch

from aiscale import cost
from aiscale.config import ConfigError, Run
from aiscale.parallel.radius.mask import give_back, largest, pack, positions

SETTINGS = ("model.n_layer=2", "model.d_model=32", "parallel.strategy=ddp", "compression.method=radius")


def test_exactly_k_largest_entries_are_selected_and_the_first_among_equals():
    assert largest(torch.tensor([0.0, 3, 0, 2, 0, 0]), 0.67).tolist() == [True, True, True, True, False, False]
    assert largest(torch.zeros(5), 0.4).tolist() == [True, True, False, False, False]
    assert largest(torch.tensor([1.0, 2.0]), 1).tolist() == [True, True]
    assert largest(torch.tensor([1.0, 2.0]), 0.01).tolist() == [False, True]  # at least one
    values = torch.randn(1001).abs()
    assert set(largest(values, 0.4).nonzero().view(-1).tolist()) == set(values.topk(400).indices.tolist())


def test_rounding_errors_of_bf16_are_sent_next_time():
    residual, at = torch.zeros(100), positions(torch.arange(100) < 40, 40)
    gradients = torch.rand(300, 100, generator=torch.Generator().manual_seed(0)) + 1
    arrived, rounded = torch.zeros(2, 40)
    for gradient in gradients:
        arrived += pack(gradient, at, residual, lambda packed: packed.bfloat16().float()).bfloat16()
        rounded += gradient[:40].bfloat16()
    exact = gradients[:, :40].sum(0)
    assert (arrived + residual[:40] - exact).abs().max() < 1e-3 < (rounded - exact).abs().mean()
    assert residual[:40].abs().max() <= 2**-8 * 2  # of one gradient, however many there were
    dense = torch.ones(100)
    expected = 1 + residual[:40]
    give_back(dense, residual, at, gathered=10)
    assert torch.equal(dense[:40], expected) and not residual.any()


def test_an_impossible_density_is_refused():
    with pytest.raises(ConfigError) as error:
        Run().override(*SETTINGS, "compression.density=0")
    message = "compression.density is 0.0: it is the share of entries that is sent, above 0 and at most 1"
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_the_payload_formula_counts_k_entries_of_each_tensor_and_whole_biases():
    run = Run().override(*SETTINGS, "compression.density=0.1", "compression.interval=5")
    shapes = {name: math.prod(shape) for name, shape in cost.parameter_shapes(run.model).items()}
    sparse = sum(size if name.endswith("bias") else max(int(0.1 * size), 1) for name, size in shapes.items())
    total = sum(shapes.values())
    assert cost.step_traffic(run, 4) == {("all_reduce", "world"): 4 * sparse}
    assert cost.gradient_traffic(run, 4, dense=True) == {("all_reduce", "world"): 4 * total}
    assert cost.mean_payload_bytes(run) == pytest.approx(4 * (total + 4 * sparse) / 5)
    assert cost.step_traffic(run.override("compression.interval=1"), 4) == {("all_reduce", "world"): 4 * total}
    with pytest.raises(ConfigError, match="compression.range 2: how many neighbours coincide is known only when"):
        cost.step_traffic(run.override("compression.range=2"), 4)
