"""The model: equal to Hugging Face's, causal, lean, and correct under every switch."""

import dataclasses

import pytest
import torch
import transformers

import as_transformers
from aiscale.errors import ConfigError
from aiscale.lesson.model import GPT
from aiscale.plan.config import ModelConfig

SMALL = ModelConfig(n_layer=2, n_head=4, d_model=32, vocab_size=61, max_seq_len=16)
LLAMA = dataclasses.replace(
    SMALL,
    n_kv_head=2,
    d_ff=48,
    norm="rmsnorm",
    position="rotary",
    activation="swiglu",
    tied=False,
    bias=False,
)
NEOX = dataclasses.replace(
    SMALL, position="rotary", activation="gelu", parallel_residual=True, tied=False
)
EVERY_SWITCH = [SMALL, LLAMA, NEOX, dataclasses.replace(SMALL, activation="relu", bias=False)]


def make(config: ModelConfig, seed: int = 0, spread: float = 1.0) -> GPT:
    """A model whose weights, biases and norms included, are far from symmetric.
    Swapping two of them would show."""
    torch.manual_seed(seed)
    model = GPT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * spread * torch.randn_like(parameter))
    return model


def tokens_for(config: ModelConfig, batch: int = 3, length: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, config.vocab_size, (batch, length), generator=generator)


# Equal to Hugging Face's -------------------------------------------------------------------------

GPT2_SHAPES = [
    SMALL,
    ModelConfig(n_layer=1, n_head=1, d_model=20, vocab_size=101, max_seq_len=7, activation="relu"),
    ModelConfig(
        n_layer=3, n_head=3, d_model=48, d_ff=50, vocab_size=257, max_seq_len=33, activation="gelu"
    ),
    ModelConfig(n_layer=2, n_head=2, d_model=64, vocab_size=50257, max_seq_len=24, norm_eps=1e-3),
    dataclasses.replace(SMALL, tied=False),
]


ROTARY = [  # written as GPT-NeoX or Llama
    NEOX,
    dataclasses.replace(
        NEOX, activation="gelu_tanh", parallel_residual=False, tied=True, rope_theta=500.0
    ),
    dataclasses.replace(NEOX, activation="relu", d_ff=40, norm_eps=1e-3),
    LLAMA,
    dataclasses.replace(LLAMA, n_kv_head=0, tied=True, rope_theta=500.0, norm_eps=1e-3),
]


@pytest.mark.parametrize("config", GPT2_SHAPES + ROTARY, ids=range(len(GPT2_SHAPES + ROTARY)))
def test_a_folder_we_write_gives_transformers_our_logits(config, tmp_path):
    model = make(config)
    as_transformers.write(tmp_path, model.config, model.state_dict())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    tokens = tokens_for(config, length=config.max_seq_len)
    torch.testing.assert_close(theirs(tokens).logits, model(tokens), atol=1e-5, rtol=0)


# Properties --------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", EVERY_SWITCH, ids=range(len(EVERY_SWITCH)))
def test_no_token_sees_what_comes_after_it(config):
    model, tokens = make(config), tokens_for(config)
    changed = tokens.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % config.vocab_size
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10], atol=0, rtol=0)
    assert (before[:, 10] - after[:, 10]).abs().max() > 1e-3


@pytest.mark.parametrize("config", EVERY_SWITCH, ids=range(len(EVERY_SWITCH)))
def test_activation_checkpointing_keeps_the_gradients_and_not_the_activations(config):
    tokens, held, grads = tokens_for(config), [], []
    for recompute in (False, True):
        model = make(dataclasses.replace(config, activation_checkpointing=recompute, n_layer=4))
        kept_bytes = 0

        def keep(x):
            nonlocal kept_bytes
            kept_bytes += x.nbytes
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            loss = model(tokens, tokens)
        held.append(kept_bytes)
        loss.backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert held[1] < 0.35 * held[0]


@pytest.mark.parametrize("config", EVERY_SWITCH, ids=range(len(EVERY_SWITCH)))
def test_every_switch_trains_in_fp64_fp32_bf16_and_under_autocast(config):
    tokens, exact = tokens_for(config), None
    for dtype, tolerance in ((torch.float64, 0), (torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        model = make(config).to(dtype)
        loss = model(tokens, tokens)
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        exact = loss.item() if exact is None else exact
        assert loss.item() == pytest.approx(exact, rel=tolerance)
    with torch.autocast("cpu", torch.bfloat16):
        assert make(config)(tokens, tokens).item() == pytest.approx(exact, rel=0.05)


def test_weights_start_as_gpt2s_do():
    torch.manual_seed(0)
    model = GPT(ModelConfig(n_layer=8, d_model=256, vocab_size=512))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert torch.all(parameter == (1 if name.endswith("norm.weight") else 0)), name
        else:
            adds_to_stream = name.endswith(("attn.out.weight", "mlp.down.weight"))
            assert parameter.std().item() == pytest.approx(
                0.02 / 4 if adds_to_stream else 0.02, rel=0.03
            ), name


def test_the_same_seed_gives_the_same_weights_even_through_the_meta_device():
    torch.manual_seed(3)
    direct = GPT(SMALL)
    with torch.device("meta"):
        model = GPT(SMALL)
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    model.init_weights()
    for (name, a), (_, b) in zip(
        direct.state_dict().items(), model.state_dict().items(), strict=True
    ):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("choices", [{}, {"norm": "deepnorm"}], ids=["gpt2", "deepnorm"])
def test_weights_drawn_one_by_one_are_those_of_the_whole_model(choices):
    config, found = dataclasses.replace(SMALL, **choices), {}
    torch.manual_seed(3)
    direct = GPT(config)
    with torch.device("meta"):
        outline = GPT(config)
    torch.manual_seed(3)
    outline.draw(found.__setitem__)
    assert all(torch.equal(found.pop(name), weight) for name, weight in direct.named_parameters())
    assert not found


def test_tied_weights_are_one_tensor_and_one_gradient():
    model, tokens = make(SMALL), tokens_for(SMALL)
    model(tokens, tokens).backward()
    untied = make(dataclasses.replace(SMALL, tied=False))
    untied.load_state_dict(model.state_dict() | {"head.weight": model.token_embedding.weight})
    untied(tokens, tokens).backward()
    both = untied.token_embedding.weight.grad + untied.head.weight.grad
    torch.testing.assert_close(model.token_embedding.weight.grad, both)


def test_a_token_beyond_the_vocabulary_is_refused():
    with pytest.raises(
        ConfigError, match="tokens run from 0 to 61, but model.vocab_size 61 ends at 60: raise it"
    ):
        GPT(SMALL)(torch.tensor([[0, 61]]))
