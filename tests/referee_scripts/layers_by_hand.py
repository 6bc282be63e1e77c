"""A pipeline of two slices of one nn.Sequential: each stage counts its layers from 0."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
layers = [nn.Linear(16, 16), nn.LayerNorm(16), nn.Tanh()]
layers += [nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4)]
each = len(layers) // world
model = nn.Sequential(*layers[rank * each : (rank + 1) * each])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
generator = torch.Generator().manual_seed(1)
x, y = torch.randn(64, 16, generator=generator), torch.randn(64, 4, generator=generator)
for step in range(4):
    h = x[step * 16 : (step + 1) * 16]
    if rank > 0:
        h = torch.empty(16, 16)
        dist.recv(h, rank - 1)
        h.requires_grad_()
    out = model(h)
    if rank == world - 1:
        nn.functional.mse_loss(out, y[step * 16 : (step + 1) * 16]).backward()
    else:
        dist.send(out.detach(), rank + 1)
        gradient = torch.empty_like(out)
        dist.recv(gradient, rank + 1)
        out.backward(gradient)
    if rank > 0:
        dist.send(h.grad, rank - 1)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
