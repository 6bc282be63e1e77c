"""Tensor parallelism: each rank has half of the hidden units of every layer, and the whole of everything else.

    torchrun --nproc-per-node=2 09_halves.py --steps 12

Shapes: B sequences, T bytes, D width, H hidden units of a layer, of which a rank has H/2.
"""

import argparse

import torch
import torch.distributed as dist
from model import LM, read_windows
from torch import nn
from torch.nn import functional as F

D, H = 32, 128


class Enter(torch.autograd.Function):
    """Before what is divided: the same activations go to all ranks, their gradients are summed."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Leave(torch.autograd.Function):
    """After what is divided: the ranks' parts are summed, the gradient is the same for all."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


def dropout(x, p):
    return x * (torch.rand(x.shape) >= p) / (1 - p) if p else x


class Layer(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.p, self.norm = p, nn.LayerNorm(D)
        up, down = nn.Linear(D, H, bias=False), nn.Linear(H, D, bias=False)
        rank, size = dist.get_rank(), dist.get_world_size()
        self.up = nn.Parameter(up.weight.detach().chunk(size, dim=0)[rank].clone())  # (H/2, D)
        self.down = nn.Parameter(down.weight.detach().chunk(size, dim=1)[rank].clone())  # (D, H/2)

    def forward(self, x):
        """(B, T, D) -> (B, T, D)"""
        hidden = F.gelu(Enter.apply(self.norm(x)) @ self.up.T)
        out = Leave.apply(dropout(hidden, self.p) @ self.down.T)
        return x + dropout(out, self.p)


def main(args):
    dist.init_process_group("gloo")
    torch.manual_seed(args.seed)  # the same weights, of which each rank takes its half
    model = LM(D, layers=0)
    layers = nn.ModuleList(Layer(args.dropout) for _ in range(2))
    torch.manual_seed(args.seed + 1 + dist.get_rank())  # each rank has random numbers of its own
    optimizer = torch.optim.SGD([*model.parameters(), *layers.parameters()], lr=0.2)

    for step, batch in enumerate(read_windows(args.steps * args.batch).split(args.batch)):
        optimizer.zero_grad()
        h = model.embed(batch)
        for layer in layers:
            h = layer(h)
        loss = model.losses(h, batch).mean()
        loss.backward()
        optimizer.step()
        print(f"step {step} rank {dist.get_rank()} loss {loss.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
