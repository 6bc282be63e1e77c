"""A small GPT that reads bytes, and its data. It does not know how many processes there are.

Shapes: B sequences, T bytes of context, D width, H heads.
"""

import pydoc_data.topics
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

TEXT = pydoc_data.topics.__file__  # Python's own help texts, half a megabyte
T = 64


def read_windows(path):
    """(sequences, T + 1): the bytes of a file, cut into sequences; the last byte of each begins the next."""
    return torch.tensor(list(Path(path).read_bytes())).unfold(0, T + 1, T)


def loss_of(logits, targets):
    """Nats for each byte, from (B, T, 256) and (B, T)."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.head_width = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):  # (B, T, D)
        h = self.norm1(x)
        q, k, v = (  # (B, H, T, D / H)
            part(h).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norm2(x))))


class Embedding(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.token, self.place = nn.Embedding(256, width), nn.Embedding(T, width)

    def forward(self, text):  # (B, T) -> (B, T, D)
        return self.token(text) + self.place.weight


class GPT(nn.Module):
    def __init__(self, width=64, heads=4, layers=4):
        super().__init__()
        self.embed = Embedding(width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256, bias=False))

    def forward(self, x):  # (B, T) -> (B, T, 256)
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
