"""ZeRO-1 by hand: each rank updates some of the weights, and sends them to the others."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 24), nn.LayerNorm(24), nn.SiLU(), nn.Linear(24, 4))
weights = list(model.parameters())
mine = weights[rank::world]
optimizer = torch.optim.AdamW(mine, lr=1e-2, weight_decay=0.1)
generator = torch.Generator().manual_seed(1)
x, y = torch.randn(64, 8, generator=generator), torch.randn(64, 4, generator=generator)
for step in range(4):
    share = slice(step * 16 + rank, (step + 1) * 16, world)
    nn.functional.smooth_l1_loss(model(x[share]), y[share]).backward()
    for i, weight in enumerate(weights):
        dist.reduce(weight.grad, i % world)
        weight.grad /= world
    optimizer.step()
    model.zero_grad()
    for i, weight in enumerate(weights):
        dist.broadcast(weight.detach(), i % world)
dist.destroy_process_group()
