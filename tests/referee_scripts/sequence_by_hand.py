"""Sequence parallelism by hand: between two matrix products, each rank has some of the tokens."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_gather

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


class Scatter(torch.autograd.Function):
    """Sums parts of (B, T, D) over ranks; each keeps its tokens."""

    @staticmethod
    def forward(context, x):
        x = x.clone()
        dist.all_reduce(x)
        return x.chunk(world, 1)[rank].contiguous()

    @staticmethod
    def backward(context, gradient):
        parts = [torch.empty_like(gradient) for _ in range(world)]
        dist.all_gather(parts, gradient.contiguous())
        return torch.cat(parts, 1)


class Block(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width, bias=False)
        self.norm = nn.LayerNorm(width)
        hidden = 4 * width // world
        self.up = nn.utils.skip_init(nn.Linear, width, hidden)
        self.down = nn.utils.skip_init(nn.Linear, hidden, width, bias=False)
        with torch.no_grad():
            self.up.weight.copy_(up.weight.chunk(world)[rank])
            self.up.bias.copy_(up.bias.chunk(world)[rank])
            self.down.weight.copy_(down.weight.chunk(world, 1)[rank])

    def forward(self, x):
        whole = torch.cat(all_gather(self.norm(x)), 1)
        return x + Scatter.apply(self.down(torch.relu(self.up(whole))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 32)

    def forward(self, tokens):
        h = self.embed(tokens).chunk(world, 1)[rank].contiguous()
        for block in self.blocks:
            h = block(h)
        return self.head(h)


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.randint(32, (64, 9), generator=torch.Generator().manual_seed(1))
for step in range(4):
    batch = data[step * 16 : (step + 1) * 16]
    logits = model(batch[:, :-1])
    targets = batch[:, 1:].chunk(world, 1)[rank]
    total = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    (total / batch[:, 1:].numel()).backward()
    for name, weight in model.named_parameters():
        if ".up." not in name and ".down." not in name:
            dist.all_reduce(weight.grad)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
