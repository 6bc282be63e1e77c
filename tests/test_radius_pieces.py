"""Parts of Radius in one process: selection, packing, residual, predicted bytes, bad settings."""

import math

import pytest
import torch

from aiscale import cost
from aiscale.config import ConfigError, Run
from aiscale.parallel.radius.mask import (
    give_back,
    in_turns,
    largest,
    pack,
    positions,
    sent_now,
    step_arrived,
    turn_sizes,
)

SETTINGS = ("model.n_layer=2", "model.d_model=32", "parallel.strategy=ddp", "compression.method=radius")


def test_exactly_k_largest_entries_are_selected_and_the_first_among_equals():
    assert largest(torch.tensor([0.0, 3, 0, 2, 0, 0]), 0.67).tolist() == [True, True, True, True, False, False]
    assert largest(torch.zeros(5), 0.4).tolist() == [True, True, False, False, False]
    assert largest(torch.tensor([1.0, 2.0]), 1).tolist() == [True, True]
    assert largest(torch.tensor([1.0, 2.0]), 0.01).tolist() == [False, True]  # at least one
    values = torch.randn(1001).abs()
    assert set(largest(values, 0.4).nonzero().view(-1).tolist()) == set(values.topk(400).indices.tolist())


def test_turns_rotate_through_unselected_entries_within_the_density():
    mask = torch.tensor([False, True, False, False, True, False, False])
    when = in_turns(mask, 3)
    each = [sent_now(when, turn) for turn in range(3)]
    assert [turn.nonzero().view(-1).tolist() for turn in each] == [[0, 1, 4, 5], [1, 2, 4, 6], [1, 3, 4]]
    for n in (1, 2, 7, 100, 4096):
        chosen = largest(torch.rand(n), 0.4, turns=3)
        sent = [int(sent_now(in_turns(chosen, 3), turn).sum()) for turn in range(3)]
        assert sum(sent) - 2 * int(chosen.sum()) == n  # each once in its turn, selected ones in all turns
        always, *more = turn_sizes(in_turns(chosen, 3), 3)
        assert [always + each for each in more] == sent
        assert max(sent) <= max(0.4 * n, 1) or n == 7  # of 7 entries at most 2 may be sent, but each turn needs 3


def test_a_step_of_delayed_entries_equals_adamw_if_none_was_delayed():
    torch.manual_seed(0)
    alike, whole = (torch.nn.Parameter(torch.linspace(-1, 1, 60).view(6, 10)) for _ in range(2))
    one, other = (torch.optim.AdamW([p], lr=0.1, weight_decay=0.1, fused=True) for p in (alike, whole))
    for step in range(5):
        alike.grad = torch.randn(6, 10)
        whole.grad = alike.grad.clone()
        other.step()
        if step:
            step_arrived(one, alike, torch.arange(60), torch.ones(60))
        else:
            one.step()
    assert torch.allclose(alike, whole, rtol=1e-6, atol=1e-7) and one.state[alike]["step"] == 5
    before = alike.detach().clone()
    step_arrived(one, alike, torch.tensor([7]), torch.tensor([3.0]))
    assert (alike != before).nonzero().tolist() == [[0, 7]]


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


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("density=0", "compression.density is 0.0: it is the share of entries that is sent, above 0 and at most 1"),
        ("turns=3 interval=3", "compression.turns is 3 with interval 3: a dense step would come before the last turn"),
    ],
)
def test_an_impossible_density_or_interval_is_refused(setting, message):
    with pytest.raises(ConfigError) as error:
        Run().override(
            *SETTINGS, *(word if "." in word.split("=")[0] else f"compression.{word}" for word in setting.split())
        )
    assert str(error.value).startswith(message) and "\n" not in str(error.value) and ": set " in str(error.value)


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
