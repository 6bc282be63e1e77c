"""FSDP with weights built on meta, a buffer that no checkpoint has, and tied embeddings."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.register_buffer("freq", torch.linspace(0, 1, 32), persistent=False)
        self.middle = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        h = self.embed(x) + self.freq
        return self.head(h + self.middle(h))


torch.manual_seed(0)
model = Model()
if world > 1:
    whole = model.state_dict()
    with torch.device("meta"):
        model = Model()
    model.to_empty(device="cpu")
    model.head.weight = model.embed.weight
    model.load_state_dict(whole)
    with torch.no_grad():
        model.freq.copy_(torch.linspace(0, 1, 32))
fully_shard(model.middle)
fully_shard(model, ignored_params={model.embed.weight})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.randint(64, (64, 9), generator=torch.Generator().manual_seed(1))
for step in range(4):
    batch = data[step * 16 : (step + 1) * 16][rank::world]
    loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
