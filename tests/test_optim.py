"""The optimizer's groups and the learning-rate schedule, against values computed by hand."""

import pytest
import torch

from aiscale.lesson.model import GPT
from aiscale.lesson.optim import build_optimizer, clip_
from aiscale.plan.config import ModelConfig, OptimizerConfig


def small_gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(ModelConfig(n_layer=1, n_head=2, d_model=8, vocab_size=11, max_seq_len=8))


def test_matrices_and_embeddings_decay_biases_and_norms_do_not():
    model = small_gpt()
    groups = build_optimizer(model, OptimizerConfig(weight_decay=0.3)).param_groups
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        wanted = 0.0 if "norm" in name or name.endswith("bias") else 0.3
        assert decay.pop(id(parameter)) == wanted, name
    assert not decay


def test_one_step_is_adamw_by_hand_in_both_groups():
    """Compares weights after a step, so that decay in the wrong group shows there too."""
    config = OptimizerConfig(lr=0.1, beta1=0.8, beta2=0.9, eps=1e-8, weight_decay=0.5)
    model = small_gpt().double()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.25)
    build_optimizer(model, config).step()
    for name, p in model.named_parameters():
        # At step 1 the bias-corrected moments are g and g^2: the step is lr g/|g| = lr, after the
        # decay.
        keep = 1 - 0.1 * 0.5 if before[name].dim() >= 2 else 1.0
        torch.testing.assert_close(
            p.detach(), before[name] * keep - 0.1, atol=1e-7, rtol=0, msg=name
        )


def test_sgd_uses_momentum():
    model = small_gpt()
    optimizer = build_optimizer(
        model, OptimizerConfig(name="sgd", lr=0.1, momentum=0.5, weight_decay=0)
    )
    bias = model.norm.bias
    for _ in range(2):
        optimizer.zero_grad()
        bias.grad = torch.ones_like(bias)
        optimizer.step()
    torch.testing.assert_close(bias.detach(), torch.full_like(bias, -0.1 - 0.15))


@pytest.mark.parametrize("max_norm, scale", [(1.0, 0.2), (10.0, 1.0), (0, 1.0)])
def test_clipping_returns_the_global_norm_and_scales_down_only(max_norm, scale):
    a, b, unused = (torch.nn.Parameter(torch.zeros(n)) for n in (1, 2, 3))
    a.grad, b.grad = torch.tensor([3.0]), torch.tensor([0.0, 4.0])
    assert clip_([a, b, unused], max_norm).item() == pytest.approx(5.0)
    torch.testing.assert_close(torch.cat([a.grad, b.grad]), scale * torch.tensor([3.0, 0.0, 4.0]))
