"""A small model that goes on from its checkpoint. Arguments: the checkpoint, the last step."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
checkpoint, last = sys.argv[1], int(sys.argv[-1])
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
generator = torch.Generator().manual_seed(1)
x, y = torch.randn(96, 8, generator=generator), torch.randn(96, 4, generator=generator)
first = 0
if os.path.exists(checkpoint):
    saved = torch.load(checkpoint)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["steps"]
for step in range(first, last):
    share = slice(step * 16 + rank, (step + 1) * 16, world)
    nn.functional.mse_loss(model(x[share]), y[share]).backward()
    optimizer.step()
    optimizer.zero_grad()
if rank == 0:
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "steps": last}
    torch.save(saved, checkpoint)
dist.destroy_process_group()
