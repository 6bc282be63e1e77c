"""The choices of model and optimizer: each agrees with its reference and trains, or is refused."""

import dataclasses
import itertools
import typing

import pytest
import torch
import torch.nn.functional as F
from transformers import T5Config
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

from aiscale.lesson.model import GPT
from aiscale.lesson.model.gpt import MLP
from aiscale.lesson.model.positions import alibi_slopes, place, sinusoids, t5_bucket
from aiscale.lesson.optim import build_optimizer
from aiscale.plan import cost
from aiscale.plan.config import ModelConfig, OptimizerConfig
from aiscale.plan.config.choices import ACTIVATIONS

SMALL = ModelConfig(
    n_layer=2,
    n_head=4,
    d_model=32,
    vocab_size=61,
    max_seq_len=16,
    relative_distance=6,
    relative_buckets=8,
)


def names(section: type, field: str) -> tuple[str, ...]:
    return typing.get_args(typing.get_type_hints(section)[field])


POSITIONS, NORMS = names(ModelConfig, "position"), names(ModelConfig, "norm")
TRAINABLE = [name for name in names(OptimizerConfig, "name") if name != "adamw8bit"]


def model_with(seed: int = 0, **choices) -> GPT:
    torch.manual_seed(seed)
    model = GPT(dataclasses.replace(SMALL, **choices)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def windows(batch: int = 3, length: int = 16) -> torch.Tensor:
    return torch.randint(0, 61, (batch, length), generator=torch.Generator().manual_seed(1))


# Positions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 4, 6, 8, 12])
def test_alibis_slopes_are_those_of_transformers(heads):
    # -slope times the distance to the last token, (1,H,1,5)
    theirs = build_mpt_alibi_tensor(heads, 5)
    torch.testing.assert_close(-alibi_slopes(heads), theirs.view(heads, 5)[:, 3], rtol=1e-5, atol=0)


def test_t5s_biases_are_those_of_transformers():
    config = T5Config(
        num_heads=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=6,
        is_decoder=True,
    )
    theirs = T5Attention(config, has_relative_attention_bias=True)
    where = place(
        torch.arange(16),
        dataclasses.replace(SMALL, position="t5"),
        torch.float32,
        table=theirs.relative_attention_bias.weight,
    )
    seen = torch.ones(16, 16, dtype=torch.bool).tril()
    torch.testing.assert_close(where[..., seen], theirs.compute_bias(16, 16)[..., seen])
    assert where[..., ~seen].eq(-torch.inf).all()
    far = t5_bucket(torch.tensor([0, 15, 16, 127, 128, 9999]), 32, 128)
    assert far.tolist() == [0, 15, 16, 31, 31, 31]


def test_sinusoids_are_vaswanis_equation():
    table = sinusoids(torch.arange(9), 6, torch.float64)
    for p, i in itertools.product(range(9), range(3)):
        angle = torch.tensor(p / 10_000 ** (2 * i / 6), dtype=torch.float64)
        torch.testing.assert_close(
            table[p, 2 * i : 2 * i + 2], torch.stack([angle.sin(), angle.cos()])
        )


@pytest.mark.parametrize(
    ("position", "heads"), [(p, g) for p in ("alibi", "shaw", "huang") for g in (4, 2)]
)
def test_scores_follow_the_papers_equation(position, heads):
    """Attention written out: softmax of each score by itself, over the tokens so far."""
    model = model_with(position=position, n_kv_head=heads)
    attention, x = model.blocks[0].attn, torch.randn(1, 9, 32, dtype=torch.float64)
    q, k, v = attention.qkv(x)[0].split([32, 8 * heads, 8 * heads], dim=-1)
    slopes, mixed = alibi_slopes(4, dtype=torch.float64), torch.zeros(9, 32, dtype=torch.float64)
    for h, t in itertools.product(range(4), range(9)):
        mine = slice(8 * h, 8 * h + 8)
        shared = slice(8 * (h * heads // 4), 8 * (h * heads // 4) + 8)
        scores = []
        for s in range(t + 1):
            score = q[t, mine] @ k[s, shared]
            if position != "alibi":  # Shaw: q (k + a); Huang's method 4: q k + q a + k a
                a = attention.distance_embedding.weight[min(t - s, 6)]
                score = score + q[t, mine] @ a + (k[s, shared] @ a if position == "huang" else 0)
            scores.append(score / 8**0.5 - (slopes[h] * (t - s) if position == "alibi" else 0))
        mixed[t, mine] = torch.stack(scores).softmax(0) @ v[: t + 1, shared]
    where = place(torch.arange(9), model.config, torch.float64)
    torch.testing.assert_close(attention(x, where)[0], attention.out(mixed))


# Norms and activations ---------------------------------------------------------------------------


def test_deepnorm_is_the_papers_equation_and_has_no_last_norm():
    model = model_with(norm="deepnorm")
    block, x = model.blocks[1], torch.randn(2, 16, 32, dtype=torch.float64)
    alpha = (2 * 2) ** 0.25
    middle = F.layer_norm(
        alpha * x + block.attn(x), (32,), block.attn_norm.weight, block.attn_norm.bias
    )
    expected = F.layer_norm(
        alpha * middle + block.mlp(middle), (32,), block.mlp_norm.weight, block.mlp_norm.bias
    )
    torch.testing.assert_close(block(x), expected)
    assert not list(model.norm.parameters())


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_activation_is_torchs_and_a_gate_multiplies(activation):
    torch.manual_seed(0)
    mlp, x = MLP(dataclasses.replace(SMALL, activation=activation)), torch.randn(5, 32)
    plain = {"gelu": F.gelu, "gelu_tanh": torch.nn.GELU("tanh"), "relu": F.relu, "silu": F.silu}
    plain |= {"reglu": F.relu, "geglu": F.gelu, "swiglu": F.silu}
    weight, bias = mlp.up.weight, mlp.up.bias
    if activation.endswith("glu"):  # Shazeer 2020, equation 6: f(x W) * (x V), W the first rows
        hidden = plain[activation](F.linear(x, weight[:128], bias[:128])) * F.linear(
            x, weight[128:], bias[128:]
        )
    else:
        hidden = plain[activation](F.linear(x, weight, bias))
    torch.testing.assert_close(mlp(x), F.linear(hidden, mlp.down.weight, mlp.down.bias))


# Each trains, and is as large as the formulas say ------------------------------------------------

PAIRS = [
    {"norm": NORMS[i % 3], "position": p, "activation": a}
    for i, (p, a) in enumerate(zip(POSITIONS, ACTIVATIONS, strict=True))
]
PAIRS += [{"norm": NORMS[i % 3], "position": p, "bias": False} for i, p in enumerate(POSITIONS, 1)]


@pytest.mark.parametrize("choices", PAIRS, ids=lambda c: "-".join(map(str, c.values())))
def test_a_model_of_any_choices_has_the_counted_tensors_and_trains(choices):
    torch.manual_seed(0)
    model = GPT(dataclasses.replace(SMALL, n_kv_head=2, tied=False, **choices))
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert list(shapes.items()) == list(cost.parameter_shapes(model.config).items())
    assert cost.parameter_count(model.config) == model.num_parameters()
    optimizer, losses = build_optimizer(model, OptimizerConfig(lr=3e-3)), []
    for _ in range(8):
        optimizer.zero_grad()
        losses.append(model(windows(), windows().roll(1, 1)))
        losses[-1].backward()
        optimizer.step()
    assert all(p.grad is not None for p in model.parameters()) and losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize("name", TRAINABLE)
def test_an_optimizer_trains_and_keeps_the_counted_bytes(name):
    torch.manual_seed(0)
    model = GPT(dataclasses.replace(SMALL, tied=False))
    config = OptimizerConfig(
        name=name, lr=3e-2 if name in ("lamb", "adafactor", "sgd") else 1e-2, trust=1.0
    )
    optimizer, losses = build_optimizer(model, config), []
    for _ in range(15):
        optimizer.zero_grad()
        losses.append(model(windows(), windows().roll(1, 1)))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 0.2
    states = [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if torch.is_tensor(value)
    ]
    held = sum(value.nbytes for value in states)
    assert cost.model_state_bytes(model.config, name)["optimizer states"] == held


# Optimizers and schedules against their references -----------------------------------------------


def stepped(
    config: OptimizerConfig, steps: int = 3, dtype=torch.float64
) -> tuple[dict, dict, list[dict]]:
    """(weights before, after, each step's gradients) of a model with steps of random gradients."""
    torch.manual_seed(0)
    model = GPT(dataclasses.replace(SMALL, n_layer=1)).to(dtype)
    optimizer = build_optimizer(model, config)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    gradients = []
    for _ in range(steps):
        gradients.append({n: torch.randn_like(p) for n, p in model.named_parameters()})
        for n, p in model.named_parameters():
            p.grad = gradients[-1][n].clone()
        optimizer.step()
    return before, {n: p.detach() for n, p in model.named_parameters()}, gradients


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_lars_and_lamb_are_the_papers_equations(name):
    config = OptimizerConfig(
        name=name, lr=0.3, weight_decay=0.2, momentum=0.8, trust=0.05, beta1=0.7, beta2=0.9
    )
    before, after, gradients = stepped(config)
    for n, w in before.items():
        m = v = torch.zeros_like(w)
        decay = 0.2 if w.dim() > 1 else 0.0
        for t, g in enumerate((step[n] for step in gradients), 1):
            if name == "lars":
                local = 0.05 * w.norm() / (g.norm() + decay * w.norm()) if w.dim() > 1 else 1.0
                m = 0.8 * m + 0.3 * local * (g + decay * w)
                w = w - m
                continue
            m, v = 0.7 * m + 0.3 * g, 0.9 * v + 0.1 * g**2
            r = (m / (1 - 0.7**t)) / ((v / (1 - 0.9**t)).sqrt() + 1e-8) + decay * w
            w = w - 0.3 * (w.norm() / r.norm() if w.norm() > 0 else 1.0) * r
        torch.testing.assert_close(after[n], w, msg=n)


def test_muon_is_torchs_on_hidden_matrices_and_adamw_elsewhere():
    config = OptimizerConfig(name="muon", lr=0.02, weight_decay=0.1, momentum=0.9)
    before, after, gradients = stepped(config, dtype=torch.float32)
    for n, w in before.items():
        w = torch.nn.Parameter(w.clone())
        if w.dim() == 2 and "embedding" not in n:
            theirs = torch.optim.Muon([w], 0.02, 0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
        else:
            decay = 0.1 if w.dim() > 1 else 0.0
            theirs = torch.optim.AdamW([w], 0.02, (config.beta1, config.beta2), weight_decay=decay)
        for step in gradients:
            w.grad = step[n].clone()
            theirs.step()
        torch.testing.assert_close(after[n], w.detach(), msg=n)
