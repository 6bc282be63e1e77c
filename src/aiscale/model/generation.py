"""Generate text token by token; `GPT.generate` calls this.

    model.generate(torch.tensor([[1, 2, 3]]), 64, temperature=0.8, top_p=0.95)    # (1,67)
    model.generate([prompt_a, prompt_b], 64, temperature=0)                        # a list, prompts of any lengths

A KV cache keeps the keys and values of earlier tokens, so that a step computes one token instead of all. With
use_cache=False every step computes everything again; the result is the same.

Prompts of different lengths are padded on the left, so that all rows write to the same slot of the cache.

When a text reaches the model's max_seq_len W, its oldest W/2 tokens are dropped. (Dropping one token at each step would
invalidate the cache, since every drop changes all positions.) A row's window depends only on its own length, not on the
other rows.

Shapes: B batch, T tokens, V vocabulary, G key/value heads, C width of a head, S slots of the cache.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from aiscale.config import ConfigError
from aiscale.model.kernels import lie_by_columns, stream_by_columns


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


class KVCache:
    """A LayerCache for every layer."""

    def __init__(self, n_layer: int, capacity: int):
        self.layers = [LayerCache(capacity) for _ in range(n_layer)]
        self.capacity = capacity

    @property
    def length(self) -> int:
        """The number of filled slots."""
        return self.layers[0].length


def generate(
    model,
    prompts: Tensor | list[Tensor],
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    use_cache: bool = True,
    generator: torch.Generator | None = None,
) -> Tensor | list[Tensor]:
    """Extend each prompt by max_new_tokens: prompts (B,T) -> (B, T+new), a list of (T_i,) -> a list of (T_i+new,).

    temperature divides the logits (0: always the likeliest token); top_k keeps that many of the likeliest tokens
    (0: all), top_p the fewest whose probabilities add up to it; generator makes sampling reproducible.
    """
    rows = _check(model, prompts, max_new_tokens, temperature, top_k, top_p)
    # The copy takes as long as a few steps, so it does not pay for a short text.
    stepper = stream_by_columns(model) if use_cache and max_new_tokens >= 16 else model
    with torch.inference_mode():
        texts = _extend(
            model, stepper, rows, max_new_tokens, use_cache, lambda z: sample(z, temperature, top_k, top_p, generator)
        )
    # Clone outside inference mode, so that the caller can use these tensors in training.
    texts = [text.clone() for text in texts]
    return torch.stack(texts) if isinstance(prompts, Tensor) else texts


def sample(
    logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, generator: torch.Generator | None = None
) -> Tensor:
    """logits (B,V) -> one token for each row (B,)."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    logits = logits.float() / temperature
    if 0 < top_k < logits.shape[-1]:
        weakest = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < weakest, -torch.inf)
    p = logits.softmax(dim=-1)
    if top_p < 1:
        ordered, index = p.sort(dim=-1, descending=True)
        # Keep a token while those before it do not reach top_p; the likeliest is always kept.
        ordered[ordered.cumsum(dim=-1) - ordered >= top_p] = 0
        p = torch.zeros_like(p).scatter_(-1, index, ordered)
    return torch.multinomial(p, 1, generator=generator)[:, 0]


def _extend(model, stepper, rows: list[Tensor], new: int, use_cache: bool, choose) -> list[Tensor]:
    """The generation loop; without a cache, every step is a prefill. `stepper` is the model or its copy for one-token
    steps; `choose` picks a token from logits."""
    window, lengths = model.config.max_seq_len, [len(row) for row in rows]
    texts = [torch.cat([row, row.new_empty(new)]) for row in rows]
    head = lie_by_columns(model.head_weight) if stepper is not model else model.head_weight
    cache = pad = None
    for done in range(new):
        if cache is None or cache.length == cache.capacity:
            seen = [text[window_start(n + done, window) : n + done] for text, n in zip(texts, lengths, strict=True)]
            pad = _padding(seen)
            longest = max(len(part) for part in seen)
            cache = KVCache(model.config.n_layer, min(window, longest + new - done - 1)) if use_cache else None
            x = _prefill(model, seen, pad, cache)
        else:
            x = _decode(stepper, token, pad, cache)  # noqa: F821  (the first round prefills)
        token = choose(F.linear(x, head))  # (B,)
        for text, n, t in zip(texts, lengths, token, strict=True):
            text[n + done] = t
    return texts


def window_start(length: int, window: int) -> int:
    """The first visible token of a text of `length` tokens: the window moves by half its width when it is full."""
    hop = max(1, window // 2)
    return -(-max(0, length - window) // hop) * hop


def _padding(parts: list[Tensor]) -> Tensor | None:
    """The padding of each row, (B,); None if all rows are equally long."""
    short = [max(len(part) for part in parts) - len(part) for part in parts]
    return torch.tensor(short, device=parts[0].device) if any(short) else None


def _prefill(model, parts: list[Tensor], pad: Tensor | None, cache: KVCache | None) -> Tensor:
    """The hidden state of each text's last token (B,D), from the visible parts; fills the cache."""
    if pad is None:
        return model.hidden(torch.stack(parts), cache=cache)[:, -1]
    T = max(len(part) for part in parts)
    tokens = torch.stack([F.pad(part, (T - len(part), 0)) for part in parts])
    place = torch.arange(T, device=tokens.device)
    causal = place <= place[:, None]  # (T,S)
    # Padding attends to itself: a fully masked row would be 0/0, and its NaN would spread.
    mask = (causal & (place >= pad[:, None, None])) | torch.eye(T, dtype=torch.bool, device=tokens.device)  # (B,T,S)
    return model.hidden(tokens, (place - pad[:, None]).clamp(min=0), mask[:, None], cache)[:, -1]


def _decode(model, token: Tensor, pad: Tensor | None, cache: KVCache) -> Tensor:
    """The hidden state (B,D) of one more token for each row; token (B,)."""
    tokens = token[:, None]  # (B,1)
    if pad is None:
        return model.hidden(tokens, cache=cache)[:, -1]
    mask = torch.arange(cache.length + 1, device=pad.device) >= pad[:, None]  # (B,S)
    return model.hidden(tokens, (cache.length - pad)[:, None], mask[:, None, None], cache)[:, -1]


def _check(model, prompts, max_new_tokens: int, temperature: float, top_k: int, top_p: float) -> list[Tensor]:
    """The prompts as a list of (T_i,); raises ConfigError for invalid arguments."""
    rules = [
        (max_new_tokens >= 0, f"max_new_tokens is {max_new_tokens}: it must not be negative"),
        (temperature >= 0, f"temperature is {temperature}: it must not be negative (0 takes the likeliest token)"),
        (top_k >= 0, f"top_k is {top_k}: it must not be negative (0 keeps every token)"),
        (0 < top_p <= 1, f"top_p is {top_p}: it must lie in (0, 1] (1 keeps every token)"),
        (len(prompts) > 0, "there are no prompts: give at least one"),
    ]
    rows = [torch.as_tensor(prompt, device=model.head_weight.device) for prompt in prompts]
    for row in rows:
        rules += [(row.dim() == 1, f"a prompt has shape {tuple(row.shape)}: give (B,T), or a list of (T_i,)")]
        rules += [(row.numel() > 0, "a prompt is empty: give at least one token to continue from")]
    for fine, message in rules:
        if not fine:
            raise ConfigError(message)
    highest, V = max(int(row.max()) for row in rows), model.config.vocab_size
    if highest >= V:
        raise ConfigError(
            f"a prompt holds token {highest}, but model.vocab_size {V} ends at {V - 1}: "
            "use the tokenizer that the model was made for"
        )
    return rows
