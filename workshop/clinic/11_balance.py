"""A layer of experts under data parallelism: each rank has all experts, and a share of each batch.

    torchrun --nproc-per-node=4 11_balance.py --steps 12

A balance in the loss keeps the router from sending all bytes to a few experts.
"""

import argparse

import torch
import torch.distributed as dist
from model import LM, read_windows
from torch import nn


class Mixture(nn.Module):
    def __init__(self, experts=8, width=32):
        super().__init__()
        self.trunk, self.router = LM(width), nn.Linear(width, experts, bias=False)
        nn.init.normal_(self.router.weight)
        expert = lambda: nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))  # noqa: E731
        self.experts = nn.ModuleList(expert() for _ in range(experts))

    def forward(self, windows):
        """The mean loss of the bytes, and the balance: 1 if each expert has as many bytes."""
        h = self.trunk.through(self.trunk.blocks, self.trunk.embed(windows))
        share = self.router(h).softmax(-1)  # (B, T, experts)
        most, chosen = share.max(-1)
        for i, expert in enumerate(self.experts):
            h = h + torch.where(chosen == i, most, 0)[..., None] * expert(h)
        load = torch.bincount(chosen.flatten(), minlength=len(self.experts)) / chosen.numel()
        balance = len(load) * (load * share.mean((0, 1))).sum()
        return self.trunk.losses(h, windows).mean(), balance


def average_gradients(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)


def main(args):
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = Mixture()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    batches = read_windows(args.steps * size).split(1)

    for step in range(args.steps):
        optimizer.zero_grad()
        loss, balance = model(batches[step * size + rank])
        (loss + args.weight * balance).backward()
        average_gradients(model)
        optimizer.step()
        means = torch.stack([loss.detach(), balance.detach()])
        dist.all_reduce(means, dist.ReduceOp.AVG)
        if rank == 0:
            print(f"step {step} loss {means[0].item():.6f} balance {means[1].item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--weight", type=float, default=2.0, help="of the balance in the loss")
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
