"""A mixture of experts: a router chooses a few experts for each token, and ranks share the experts.

Shapes: B sequences, T bytes, N = B x T tokens of this rank, D width, E experts, K of them a token, R ranks.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import gelu


def exchange(rows, sent, received):
    """Hands rows over: the first sent[0] of them to rank 0, and so on. received[r] come from rank r."""
    came = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(came, rows.contiguous(), received, sent)
    return came


class Exchange(torch.autograd.Function):
    """`exchange`, whose gradients travel back."""

    @staticmethod
    def forward(ctx, rows, sent, received):
        ctx.sent, ctx.received = sent, received
        return exchange(rows, sent, received)

    @staticmethod
    def backward(ctx, gradient):
        return exchange(gradient, ctx.received, ctx.sent), None, None


class Expert(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(gelu(self.up(x)))


class Experts(nn.Module):
    """A layer of experts, of which this rank has a share."""

    def __init__(self, width, rank, ranks, experts=8, each=2):
        super().__init__()
        assert experts % ranks == 0, f"{experts} experts on {ranks} ranks: start 1, 2, 4 or any divisor of {experts}"
        self.ranks, self.each = ranks, each
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Expert(width) for _ in range(experts))  # each rank draws all, as one would
        for i in range(experts):
            if i * ranks // experts != rank:
                self.experts[i] = nn.Identity()

    def forward(self, x):  # (B, T, D)
        tokens = self.norm(x).flatten(0, 1)  # (N, D)
        share = self.router(tokens).softmax(-1)  # (N, E)
        weight, chosen = share.topk(self.each)  # (N, K)
        weight = weight / weight.sum(-1, keepdim=True)
        load = chosen.flatten().bincount(minlength=share.shape[1])  # (E,), how often each expert is chosen
        self.load, self.balance = load, len(load) * (load / load.sum() * share.mean(0)).sum()
        order = chosen.flatten().argsort(stable=True)  # places of the N x K choices, by expert, so by rank
        came = torch.empty_like(load)
        dist.all_to_all_single(came, load)  # rows that come, by rank, and by expert of this rank
        sent, received = (counts.view(self.ranks, -1).sum(1).tolist() for counts in (load, came))
        rows = Exchange.apply(tokens[order // self.each], sent, received)
        mine = [expert for expert in self.experts if isinstance(expert, Expert)]
        whose = torch.arange(len(mine), device=x.device).repeat(self.ranks).repeat_interleave(came)
        answers = torch.zeros_like(rows)
        for i, expert in enumerate(mine):
            answers[whose == i] = expert(rows[whose == i])
        back = Exchange.apply(answers, received, sent)
        weighted = back * weight.flatten()[order, None]
        out = torch.zeros_like(tokens).index_add(0, order // self.each, weighted)
        return x + out.view_as(x)
