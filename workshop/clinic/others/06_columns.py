"""A feed-forward block in Megatron's way, by hand: columns, then rows, and a sum over the ranks."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        out = x.clone()
        dist.all_reduce(out)
        return out

    @staticmethod
    def backward(context, gradient):
        return gradient


class Block(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width)
        hidden = 4 * width // world
        self.up = nn.utils.skip_init(nn.Linear, width, hidden)
        self.down = nn.utils.skip_init(nn.Linear, hidden, width)
        with torch.no_grad():
            self.up.weight.copy_(up.weight.chunk(world)[rank])
            self.up.bias.copy_(up.bias.chunk(world)[rank])
            self.down.bias.copy_(down.bias)
            self.down.weight.copy_(down.weight.chunk(world, 1)[rank])

    def forward(self, x):
        return x + Sum.apply(self.down(torch.relu(self.up(Copy.apply(self.norm(x))))))


torch.manual_seed(0)
model = nn.Sequential(Block(), Block(), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
generator = torch.Generator().manual_seed(1)
x, y = torch.randn(64, 16, generator=generator), torch.randn(64, 4, generator=generator)
for step in range(4):
    share = slice(step * 16, (step + 1) * 16)
    nn.functional.mse_loss(model(x[share]), y[share]).backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
