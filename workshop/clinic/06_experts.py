"""Two experts behind a shared trunk: each batch is of one kind, and the expert of that kind reads it.

    torchrun --nproc-per-node=2 06_experts.py --steps 12

DDP refuses a model of which a rank uses only a part, so gradients are averaged here, one tensor at a time.
"""

import argparse

import torch
import torch.distributed as dist
from model import LM, read_windows
from torch import nn


class Experts(nn.Module):
    def __init__(self, kinds=2, width=32):
        super().__init__()
        self.trunk = LM(width)
        expert = lambda: nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))  # noqa: E731
        self.experts = nn.ModuleList(expert() for _ in range(kinds))

    def forward(self, windows, kind):
        h = self.trunk.through(self.trunk.blocks, self.trunk.embed(windows))
        return self.trunk.losses(h + self.experts[kind](h), windows)


def average_gradients(model):
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def main(args):
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = Experts()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    batches = read_windows(args.steps * size * 4).split(4)  # kinds take turns: 0, 1, 0, 1, ...

    for step in range(args.steps):
        place = step * size + rank
        kind = (place + step // 2) % 2
        optimizer.zero_grad()
        loss = model(batches[place], kind).mean()
        loss.backward()
        average_gradients(model)
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        if rank == 0:
            print(f"step {step} loss {mean.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--lr", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
