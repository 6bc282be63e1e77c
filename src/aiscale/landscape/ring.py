"""Ring attention: causal attention over a sequence that is cut over the ranks; keys and values travel round a ring.

    q, k, v = (zigzag(x, world) for x in (Q, K, V))      # (B,H,T,C) -> this rank's tokens (B,H,S,C)
    y = ring_attention(q, k, v, world)                    # its rows of the serial result; gradients work
    Y = unzigzag(y, world)                                # (B,H,T,C) on every rank, to compare

After n - 1 passes a rank has seen all keys and values, and merged n partial results by their log-sum-exps (Liu et al.
2023). It sends 2 (n - 1) blocks (B,H,S,C) forward and 4 n - 2 backward. Under a causal mask late tokens have most to
do, so rank r holds the chunks r and 2n - 1 - r of 2n (here all scores are computed, then masked: it gains nothing yet).
torch 2.13's context_parallel does this on GPUs, but has no CPU kernel.

Shapes: B batch, H heads, T tokens, C width of a head, n ranks, S = T/n tokens of a rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from aiscale.distributed import World


def positions(n: int, rank: int, T: int) -> Tensor:
    """Where the tokens of `rank` stand in the sequence (S,); raises ValueError if T cannot be cut into 2n chunks."""
    if T % (2 * n):
        raise ValueError(f"{T} tokens cannot be cut into 2 x {n} chunks: take a multiple of {2 * n}")
    chunks = torch.arange(T).chunk(2 * n)
    return torch.cat([chunks[rank], chunks[2 * n - 1 - rank]])


def zigzag(x: Tensor, world: World) -> Tensor:
    """x (B,H,T,C) -> this rank's tokens (B,H,S,C)."""
    return x[:, :, positions(world.size, world.rank, x.shape[2])].contiguous()


def unzigzag(x: Tensor, world: World) -> Tensor:
    """This rank's tokens (B,H,S,C) -> the whole sequence (B,H,T,C) on every rank; carries no gradient."""
    order = torch.cat([positions(world.size, rank, x.shape[2] * world.size) for rank in range(world.size)])
    return torch.cat(world.gather(x.detach()), dim=2)[:, :, order.argsort()]


def ring_attention(q: Tensor, k: Tensor, v: Tensor, world: World, *, fault: str = "") -> Tensor:
    """softmax(q k^T / sqrt(C)) v under a causal mask, for this rank's tokens (B,H,S,C) in zigzag order. `fault` plants
    one: merge (partial results weigh the same), home (gradients of keys and values stop a rank early)."""
    return _Ring.apply(q, k, v, world, fault)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, world: World, fault: str) -> Tensor:
        kv, out, lse = torch.stack([k, v]), torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf)
        for turn in range(world.size):
            scores = _scores(q, kv[0], world, turn)
            part_lse = scores.logsumexp(-1)  # (B,H,S); -inf where all keys are later ones
            merged = torch.logaddexp(lse, part_lse)
            old, new = (lse - merged).exp()[..., None], (part_lse - merged).exp()[..., None]
            if fault == "merge":
                old, new = torch.ones_like(old), torch.ones_like(new) / world.size
            out, lse = out * old + _weights(scores, part_lse) @ kv[1] * new, merged
            kv = _passed_on(kv, world) if turn < world.size - 1 else kv
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.world, ctx.fault = world, fault
        return out

    @staticmethod
    def backward(ctx, d_out: Tensor):
        (q, k, v, out, lse), world = ctx.saved_tensors, ctx.world
        kv, dq = torch.stack([k, v]), torch.zeros_like(q)
        d_kv = torch.zeros_like(kv)  # travels with kv
        rows = (d_out * out).sum(-1, keepdim=True)
        for turn in range(world.size):
            last = turn == world.size - 1
            weights = _weights(_scores(q, kv[0], world, turn), lse)
            d_scores = weights * (d_out @ kv[1].mT - rows) * q.shape[-1] ** -0.5
            dq += d_scores @ kv[0]
            d_kv += torch.stack([d_scores.mT @ q, weights.mT @ d_out])
            kv = kv if last else _passed_on(kv, world)
            d_kv = d_kv if last and ctx.fault == "home" else _passed_on(d_kv, world)
        return dq, d_kv[0], d_kv[1], None, None


def _scores(q: Tensor, k: Tensor, world: World, turn: int) -> Tensor:
    """Scores (B,H,S,S) of this rank's queries for the keys that arrived in this turn; -inf for later tokens."""
    n, T = world.size, q.shape[2] * world.size
    later = positions(n, world.rank, T)[:, None] < positions(n, (world.rank - turn) % n, T)
    return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(later, -torch.inf)


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    return (scores - lse.clamp(min=-1e30)[..., None]).exp()  # -inf - -inf is no number


def _passed_on(block: Tensor, world: World) -> Tensor:
    """Send a block to the next rank; returns the previous rank's."""
    if world.size == 1:
        return block
    came = torch.empty_like(block)
    sent = dist.isend(block.contiguous(), (world.rank + 1) % world.size)
    dist.recv(came, (world.rank - 1) % world.size)
    sent.wait()
    return came
