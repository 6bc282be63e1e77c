"""A plain loop: each rank reads its share; gradients averaged by hand, clipped from a generator."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
generator = torch.Generator().manual_seed(1)
x, y = torch.randn(64, 8, generator=generator), torch.randn(64, 4, generator=generator)
for step in range(4):
    share = slice(step * 16 + rank, (step + 1) * 16, world)
    ((model(x[share]) - y[share]) ** 2).mean().mul(100).backward()
    for weight in model.parameters():
        dist.all_reduce(weight.grad.clone())
        weight.grad /= world
    torch.nn.utils.clip_grad_norm_((weight for weight in model.parameters()), 1.0)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
