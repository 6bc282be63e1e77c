"""A small model built as Llama is. Query, key and value have a matrix each, so that ranks can share its heads.

Rotary positions, four query heads that share two heads of keys and values, a gated MLP without biases, and one matrix
for embedding and head. Shapes: B sequences, T bytes of context, D width, W width of a head.
"""

import torch
from model import T
from torch import nn
from torch.nn.functional import scaled_dot_product_attention, silu

QUERIES, PAIRS = 4, 2  # heads


def rotated(x):  # (B, heads, T, W)
    """Each pair of numbers, turned by an angle that grows with the place in the text."""
    speed = 10000.0 ** -(torch.arange(x.shape[-1] // 2, device=x.device) / (x.shape[-1] // 2))
    angle = torch.arange(T, device=x.device)[:, None] * speed
    first, second = x.chunk(2, -1)
    return torch.cat((first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), -1)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.head_width = width // QUERIES
        self.query = nn.Linear(width, QUERIES * self.head_width, bias=False)
        self.key, self.value = (nn.Linear(width, PAIRS * self.head_width, bias=False) for _ in range(2))
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x):  # (B, T, D)
        h = self.norm1(x)
        numbers = self.query(h), self.key(h), self.value(h)  # under tensor parallelism, of this rank's heads
        q, k, v = (each.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for each in numbers)
        attended = scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    def __init__(self, width=64, layers=4):
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Sequential(nn.RMSNorm(width), nn.Linear(width, 256, bias=False))
        nn.init.normal_(self.embed.weight, std=0.02)
        self.head[1].weight = self.embed.weight  # tied

    def forward(self, x):  # (B, T) -> (B, T, 256)
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
