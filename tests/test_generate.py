"""Generation: neither cache nor batch changes the text, and sampling follows its settings."""

import dataclasses

import pytest
import torch

from aiscale.config import ModelConfig
from aiscale.model import GPT
from aiscale.model.generation import sample, window_start

SMALL = ModelConfig(n_layer=2, n_head=4, d_model=32, vocab_size=61, max_seq_len=24)
MODERN = dataclasses.replace(
    SMALL, n_kv_head=2, norm="rmsnorm", position="rotary", activation="swiglu", tied=False, bias=False
)
PROMPTS = torch.stack([torch.arange(5), torch.arange(5) + 20, torch.tensor([7, 3, 60, 3, 7])])


def make(config: ModelConfig) -> GPT:
    torch.manual_seed(0)
    model = GPT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))  # logits far apart: no token depends on the last bit
    return model


@pytest.mark.parametrize("config", [SMALL, MODERN], ids=["gpt2", "modern"])
@pytest.mark.parametrize("new", [12, 60], ids=["within the window", "beyond the window"])
@pytest.mark.parametrize("how", [{"temperature": 0}, {"temperature": 0.9, "top_k": 20}])
def test_the_cache_changes_no_token(config, new, how):
    model, texts = make(config), []
    for use_cache in (True, False):
        generator = torch.Generator().manual_seed(5)
        texts.append(model.generate(PROMPTS, new, use_cache=use_cache, generator=generator, **how).tolist())
    assert texts[0] == texts[1]
    assert [len(text) for text in texts[0]] == [5 + new] * 3
    assert len(set(texts[0][0][5:])) > 2  # a text that repeats one token would prove little


@pytest.mark.parametrize("config", [SMALL, MODERN], ids=["gpt2", "modern"])
def test_a_prompt_gives_the_same_text_alone_and_in_a_batch(config):
    model = make(config)
    together = model.generate(PROMPTS, 60, temperature=0).tolist()
    alone = [model.generate(prompt[None], 60, temperature=0)[0].tolist() for prompt in PROMPTS]
    assert together == alone


def test_greedy_text_is_the_argmax_of_the_logits_step_by_step():
    model, text = make(SMALL), PROMPTS[0].tolist()
    for _ in range(15):
        text.append(int(model(torch.tensor([text]))[0, -1].argmax()))
    assert model.generate(PROMPTS[0][None], 15, temperature=0).tolist() == [text]


def test_beyond_the_window_the_oldest_half_drops_out():
    assert [window_start(n, 24) for n in (1, 24, 25, 36, 37, 48, 49)] == [0, 0, 12, 12, 24, 24, 36]
    assert [window_start(n, 1) for n in (1, 2, 3)] == [0, 1, 2]
    model = make(SMALL)
    long = torch.arange(60) % 61
    seen = long[window_start(60, 24) :]
    expected = int(model(seen[None])[0, -1].argmax())
    assert int(model.generate(long[None], 1, temperature=0)[0, -1]) == expected


def test_the_cache_computes_one_token_a_step(monkeypatch):
    model, lengths, hidden = make(SMALL), [], GPT.hidden

    def watched(self, tokens, *rest, **kinds):
        lengths.append(tokens.shape[1])
        return hidden(self, tokens, *rest, **kinds)

    monkeypatch.setattr(GPT, "hidden", watched)
    model.generate(PROMPTS[0][None], 30, temperature=0)
    # 5 tokens of prompt, then one by one until 24 are visible; then 13 again (the newest of 25, half dropped).
    assert lengths == [5] + [1] * 19 + [13] + [1] * 9


def test_sampling_follows_the_probabilities_and_its_generator():
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log().expand(20_000, 4)
    draw = sample(logits, 1.0, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(draw.bincount() / len(draw), torch.tensor([0.5, 0.25, 0.125, 0.125]), atol=0.015, rtol=0)
    assert torch.equal(draw, sample(logits, 1.0, generator=torch.Generator().manual_seed(0)))
    # Temperature 1/2 squares the probabilities: 16 : 4 : 1 : 1.
    cold = sample(logits, 0.5, generator=torch.Generator().manual_seed(0)).bincount() / len(draw)
    torch.testing.assert_close(cold, torch.tensor([16, 4, 1, 1]) / 22, atol=0.015, rtol=0)


@pytest.mark.parametrize("top_k, kept", [(1, {0}), (2, {0, 1}), (9, {0, 1, 2, 3})])
def test_top_k_keeps_the_likeliest_tokens(top_k, kept):
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().expand(4000, 4)
    assert set(sample(logits, 1.0, top_k, generator=torch.Generator().manual_seed(0)).tolist()) == kept
