"""As in a tutorial: DataLoader, DistributedSampler, DDP. Its argument: samples of a rank."""

import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
accumulate = 2
n = 64
generator = torch.Generator().manual_seed(1)
x, y = torch.randn(n, 20, generator=generator), torch.randint(5, (n,), generator=generator)
torch.manual_seed(0)
norm = nn.LayerNorm(32)
layers = [nn.Linear(20, 32), norm, nn.ReLU(), nn.Dropout(0), nn.Linear(32, 5)]
model = DistributedDataParallel(nn.Sequential(*layers))
torch.manual_seed(100 + rank)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
data = TensorDataset(x, y)
sampler = DistributedSampler(data, shuffle=True, seed=3)
loader = DataLoader(data, batch_size=int(sys.argv[1]), sampler=sampler)
loss_fn = nn.CrossEntropyLoss()
for epoch in range(3):
    sampler.set_epoch(epoch)
    for i, (a, b) in enumerate(loader):
        last = i % accumulate == accumulate - 1
        with model.no_sync():
            loss = loss_fn(model(a), b) / accumulate
        with nullcontext() if last else model.no_sync():
            loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
dist.destroy_process_group()
