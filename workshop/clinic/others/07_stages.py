"""Two stages that send and receive by hand; the first one's embedding is the last one's head."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
first, last = rank == 0, rank == world - 1


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        embed, a, b = nn.Embedding(64, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        if first:
            self.embed, self.a = embed, a
        if last:
            self.b, self.head = b, nn.Linear(32, 64, bias=False)
            self.head.weight = embed.weight

    def forward(self, x):
        if first:
            x = torch.tanh(self.a(self.embed(x)))
        return self.head(torch.tanh(self.b(x))) if last else x


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
data = torch.randint(64, (64, 9), generator=torch.Generator().manual_seed(1))
for step in range(4):
    batch = data[step * 16 : (step + 1) * 16]
    h = batch[:, :-1]
    if not first:
        h = torch.empty(16, 8, 32)
        dist.recv(h, rank - 1)
        h.requires_grad_()
    out = model(h)
    if last:
        nn.functional.cross_entropy(out.flatten(0, 1), batch[:, 1:].flatten()).backward()
    else:
        dist.send(out.detach(), rank + 1)
        gradient = torch.empty_like(out)
        dist.recv(gradient, rank + 1)
        out.backward(gradient)
    if not first:
        dist.send(h.grad, rank - 1)
    if world > 1:
        dist.all_reduce((model.embed if first else model.head).weight.grad, dist.ReduceOp.AVG)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
