"""Pairs under DDP: each rank compares its part with the pairs of all ranks, and keeps a centre."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 8))
        self.right = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 8))
        self.register_buffer("centre", torch.zeros(8))

    def forward(self, pairs):
        left, right = self.left(pairs[:, 0]), self.right(pairs[:, 1])
        return left - self.centre, right - self.centre


model = DistributedDataParallel(Encoder(), broadcast_buffers=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.98))
data = torch.randn(64, 2, 12, generator=torch.Generator().manual_seed(1))
for step in range(4):
    batch = data[step * 16 : (step + 1) * 16].chunk(world)[rank]
    left, right = model(batch)
    all_right = torch.cat(all_gather(right))
    labels = torch.arange(len(left)) + rank * len(left)
    loss = nn.functional.cross_entropy(left @ all_right.T, labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    centre = left.detach().mean(0)
    dist.all_reduce(centre)
    model.module.centre.mul_(0.9).add_(centre / world, alpha=0.1)
dist.destroy_process_group()
