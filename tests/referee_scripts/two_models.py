"""Two models that are trained together, each under DDP and with an optimizer of its own."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
encoder = DistributedDataParallel(nn.Sequential(nn.Conv1d(3, 8, 3), nn.ReLU(), nn.Flatten()))
head = DistributedDataParallel(nn.Linear(64, 5))
slow = torch.optim.SGD(encoder.parameters(), lr=0.05, momentum=0.9)
fast = torch.optim.AdamW(head.parameters(), lr=1e-2)
generator = torch.Generator().manual_seed(1)
x, y = torch.randn(64, 3, 10, generator=generator), torch.randint(5, (64,), generator=generator)
for step in range(4):
    share = slice(step * 16 + rank, (step + 1) * 16, world)
    loss = nn.functional.cross_entropy(head(encoder(x[share])), y[share])
    loss.backward()
    slow.step()
    fast.step()
    slow.zero_grad()
    fast.zero_grad()
dist.destroy_process_group()
