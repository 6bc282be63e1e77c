"""A layer of experts, some on each rank: tokens travel to their expert and back."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_to_all_single

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
EXPERTS, D = 4, 16
LOCAL = EXPERTS // world


class Experts(nn.Module):
    """Each token goes to one expert; each expert takes the same number of tokens."""

    def __init__(self):
        super().__init__()
        every = [nn.Linear(D, D) for _ in range(EXPERTS)]
        self.mine = nn.ModuleDict()
        for expert in range(rank * LOCAL, (rank + 1) * LOCAL):
            self.mine[str(expert)] = every[expert]

    def forward(self, x):
        n = len(x) // EXPERTS
        sent = all_to_all_single(torch.empty_like(x), x)
        groups = sent.unflatten(0, (world, LOCAL, n)).transpose(0, 1)
        out = []
        for group, expert in zip(groups, self.mine.values(), strict=True):
            out.append(torch.tanh(expert(group)))
        back = torch.stack(out).transpose(0, 1).flatten(0, 2).contiguous()
        return x + all_to_all_single(torch.empty_like(back), back)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, D), Experts(), nn.Linear(D, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
generator = torch.Generator().manual_seed(1)
x, y = torch.randn(64, 8, generator=generator), torch.randn(64, 4, generator=generator)
for step in range(4):
    # Of each four samples that follow one another, sample i goes to expert i.
    chosen = torch.arange(16).unflatten(0, (4, EXPERTS)).chunk(world)[rank].T.flatten()
    share = step * 16 + chosen
    nn.functional.mse_loss(model(x[share]), y[share]).backward()
    for name, weight in model.named_parameters():
        if ".mine." in name:
            weight.grad /= world
        else:
            dist.all_reduce(weight.grad)
            weight.grad /= world
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
