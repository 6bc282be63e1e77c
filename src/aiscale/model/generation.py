"""Generate text token by token; `GPT.generate` calls this.

    model.generate(torch.tensor([[1, 2, 3]]), 64, temperature=0.8, top_k=50)    # (1,67)

A KV cache keeps the keys and values of earlier tokens, so that a step computes one token instead of all. With
use_cache=False every step computes everything again; the result is the same.

When a text reaches the model's max_seq_len W, its oldest W/2 tokens are dropped. (Dropping one token at each step would
invalidate the cache, since every drop changes all positions.)

Shapes: B batch, T tokens, V vocabulary, G key/value heads, C width of a head, S slots of the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aiscale.config import ConfigError
from aiscale.model.kernels import linear


class LayerCache:
    """Keys and values of one layer, (B,G,S,C), allocated once for `capacity` tokens."""

    def __init__(self, capacity: int):
        self.capacity, self.length = capacity, 0
        self.keys = self.values = None

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k, v (B,G,T,C); return all keys and values, (B,G,S,C)."""
        if self.keys is None:
            B, G, _, C = k.shape
            self.keys, self.values = k.new_empty(B, G, self.capacity, C), v.new_empty(B, G, self.capacity, C)
        start, self.length = self.length, self.length + k.shape[2]
        self.keys[:, :, start : self.length] = k
        self.values[:, :, start : self.length] = v
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]


def generate(
    model,
    prompts: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    use_cache: bool = True,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Extend each prompt by max_new_tokens: (B,T) -> (B, T+new).

    temperature divides the logits (0: always the likeliest token); top_k keeps that many of the likeliest tokens
    (0: all); generator makes sampling reproducible.
    """
    _check(model, prompts, max_new_tokens, temperature, top_k)
    window, length = model.config.max_seq_len, prompts.shape[1] + max_new_tokens
    with torch.inference_mode():
        prompts = prompts.to(model.head_weight.device)
        text = torch.cat([prompts, prompts.new_empty(len(prompts), max_new_tokens)], dim=1)
        cache = None
        for end in range(prompts.shape[1], length):
            if cache is None or cache[0].length == cache[0].capacity:
                context = text[:, window_start(end, window) : end]
                capacity = min(window, context.shape[1] + length - end - 1)
                cache = [LayerCache(capacity) for _ in range(model.config.n_layer)] if use_cache else None
                x = model.hidden(context, cache=cache)
            else:
                x = model.hidden(text[:, end - 1 : end], cache=cache)
            text[:, end] = sample(linear(x[:, -1], model.head_weight), temperature, top_k, generator)
    return text.clone()  # outside inference mode, so that the caller can use it in training


def sample(logits: Tensor, temperature: float, top_k: int = 0, generator: torch.Generator | None = None) -> Tensor:
    """logits (B,V) -> one token for each row (B,)."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    logits = logits.float() / temperature
    if 0 < top_k < logits.shape[-1]:
        weakest = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < weakest, -torch.inf)
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)[:, 0]


def window_start(length: int, window: int) -> int:
    """The first visible token of a text of `length` tokens: the window moves by half its width when it is full."""
    hop = max(1, window // 2)
    return -(-max(0, length - window) // hop) * hop


def _check(model, prompts: Tensor, max_new_tokens: int, temperature: float, top_k: int) -> None:
    rules = [
        (max_new_tokens >= 0, f"max_new_tokens is {max_new_tokens}: it must not be negative"),
        (temperature >= 0, f"temperature is {temperature}: it must not be negative (0 takes the likeliest token)"),
        (top_k >= 0, f"top_k is {top_k}: it must not be negative (0 keeps every token)"),
        (prompts.dim() == 2, f"prompts have shape {tuple(prompts.shape)}: give (B,T)"),
        (prompts.numel() > 0, "a prompt is empty: give at least one token to continue from"),
    ]
    for fine, message in rules:
        if not fine:
            raise ConfigError(message)
    highest, V = int(prompts.max()), model.config.vocab_size
    if highest >= V:
        raise ConfigError(
            f"a prompt holds token {highest}, but model.vocab_size {V} ends at {V - 1}: "
            "use the tokenizer that the model was made for"
        )
