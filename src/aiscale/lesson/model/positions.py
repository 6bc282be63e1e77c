"""How a model knows where tokens stand: by the embeddings, queries and keys, or attention's scores.

    rotary          turns q and k, so that their product depends on the distance of the tokens only
                    (Su et al. 2021)
    alibi           scores minus slope times distance, another slope for each head (Press et al.
                    2022)
    t5              scores plus a learned number for each head and bucket of distances (Raffel et
                    al. 2020)
    shaw, huang     scores plus q a, or q a + k a, a learned vector a for each distance (Shaw et al.
                    2018, of keys only; Huang et al. 2020, method 4)

All but rotary count tokens, not positions. A later token's score is -inf.

Shapes: B batch, H heads, G key/value heads, T tokens, C width of a head, D width, K distances.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from aiscale.plan.config import ModelConfig


def place(
    positions: Tensor, config: ModelConfig, dtype: torch.dtype, table: Tensor | None = None
) -> Tensor | None:
    """What every block's attention takes.

    Rotary angles; with alibi and t5 (table: (buckets,H)) numbers to add to the scores, (1,H,T,T);
    with shaw and huang the distances (T,T), negative for later tokens; else None.
    """
    if config.position == "rotary":
        return rotary_angles(positions, config, dtype)
    if config.position in ("learned", "sinusoidal"):
        return None
    here = torch.arange(positions.shape[-1], device=positions.device)
    distance = here[:, None] - here  # (T,T)
    if config.position in ("shaw", "huang"):
        return distance.clamp(max=config.relative_distance)
    if config.position == "alibi":
        wide = torch.promote_types(dtype, torch.float32)
        slopes = alibi_slopes(config.n_head, distance.device, wide)
        bias = -slopes[:, None, None] * distance  # (H,T,T)
    else:
        bucket = t5_bucket(distance, config.relative_buckets, config.relative_distance)
        bias = table[bucket].permute(2, 0, 1)  # (H,T,T)
    return bias.masked_fill(distance < 0, -torch.inf)[None]


# Rotary: rotate channel pairs of q and k by an angle proportional to the position.
# Pairs are (c, c + C/2), as in GPT-NeoX.
def rotary_angles(positions: Tensor, config: ModelConfig, dtype: torch.dtype) -> Tensor:
    """positions (T,) -> cosines and sines stacked, (2,T,C).

    Computed in every forward pass, which takes microseconds: a buffer would be lost on the meta
    device and cast to bf16, which cannot tell position 257 from 256.
    """
    wide = torch.promote_types(dtype, torch.float32)
    channel = torch.arange(0, config.d_head, 2, device=positions.device, dtype=wide)  # (C/2,)
    frequency = config.rope_theta ** (-channel / config.d_head)
    angle = positions.to(wide)[..., None] * frequency  # (T,C/2)
    angle = torch.cat([angle, angle], dim=-1)
    return torch.stack([angle.cos(), angle.sin()])


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """x (B,H,T,C) rotated by rope (2,T,C)."""
    first, second = x.chunk(2, dim=-1)
    return (x * rope[0] + torch.cat([-second, first], dim=-1) * rope[1]).to(x.dtype)


def sinusoids(positions: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """positions (T,) or (B,T) -> (...,T,D): sines at even channels, cosines at odd ones.

    Of wave lengths 2 pi to 10000 x 2 pi (Vaswani et al. 2017, section 3.5).
    """
    wide = torch.promote_types(dtype, torch.float32)
    channel = torch.arange(0, width, 2, device=positions.device, dtype=wide)
    angle = positions.to(wide)[..., None] * 10_000.0 ** (-channel / width)
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2).to(dtype)


def alibi_slopes(
    n_head: int, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """(H,): 2^(-8/H), 2^(-16/H), ... down to 2^-8 if H is a power of two.

    Else those of the next smaller power, and every other one of twice that power.
    """
    near = 2 ** int(math.log2(n_head))
    powers = [8 * (h + 1) / near for h in range(near)]
    powers += [4 * (2 * h + 1) / near for h in range(n_head - near)]
    return torch.tensor([2**-power for power in powers], device=device, dtype=dtype)


def t5_bucket(distance: Tensor, buckets: int, most: int) -> Tensor:
    """The bucket of each distance to an earlier token.

    Its own up to buckets / 2, then logarithmically wider ones up to `most`, beyond which there is
    one.
    """
    exact, distance = buckets // 2, distance.clamp(min=0)
    logarithm = (distance.clamp(min=1).float() / exact).log()
    wider = logarithm / math.log(most / exact) * (buckets - exact)
    return torch.where(distance < exact, distance, (exact + wider.long()).clamp(max=buckets - 1))


def distance_scores(
    q: Tensor, k: Tensor, table: Tensor, distance: Tensor, *, of_keys: bool
) -> Tensor:
    """What is added to the scores, (B,H,T,T).

    q (B,H,T,C), k (B,G,T,C), table (K,C), distance (T,T).
    """
    B, H, T, C = q.shape
    at = distance.clamp(min=0)
    scores = (q @ table.mT).gather(-1, at.expand(B, H, T, T))
    if of_keys:
        by_key = (k @ table.mT).gather(-1, at.mT.expand(B, k.shape[1], T, T)).mT  # (B,G,T,T)
        scores = scores + by_key.repeat_interleave(H // k.shape[1], dim=1)
    return (scores * C**-0.5).masked_fill(distance < 0, -torch.inf)
