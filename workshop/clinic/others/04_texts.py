"""A recurrent model of unequal texts under DDP: (T, B) inputs, tied embeddings, accumulation.

The loss is a mean over the tokens of a step: of all ranks and micro-batches. Options: --half
(autocast), --double, --dropout, --scheduler, --average (EMA), --scaler, --checkpointed.
"""

import argparse
import copy
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

parser = argparse.ArgumentParser()
for option in ("half", "double", "dropout", "scheduler", "average", "scaler", "checkpointed"):
    parser.add_argument(f"--{option}", action="store_true")
parser.add_argument("--micro-batch", type=int, default=4)
parser.add_argument("--optimizer", default="AdamW")
args = parser.parse_args()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 24)
        self.mix = nn.GRU(24, 24)
        self.norm = nn.LayerNorm(24)
        self.up, self.down = nn.Linear(24, 48), nn.Linear(48, 24)
        self.dropout = nn.Dropout(0.1 if args.dropout else 0)
        self.head = nn.Linear(24, 40, bias=False)
        self.head.weight = self.embed.weight

    def feed(self, h):
        return h + self.dropout(self.down(torch.relu(self.up(self.norm(h)))))

    def forward(self, tokens):
        h = self.embed(tokens)
        h = h + self.mix(h)[0]
        h = checkpoint(self.feed, h, use_reentrant=False) if args.checkpointed else self.feed(h)
        return self.head(h)


def make(n):
    generator = torch.Generator().manual_seed(1)
    texts = torch.randint(1, 40, (n, 13), generator=generator)
    lengths = torch.randint(3, 13, (n,), generator=generator)
    return torch.where(torch.arange(13) <= lengths[:, None], texts, 0)


model = Model()
if args.double:
    model = model.double()
model = DistributedDataParallel(model)
torch.manual_seed(1000 + rank)
optimizer = getattr(torch.optim, args.optimizer)(model.parameters(), lr=1e-2)
steps = 4
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
scaler = torch.amp.GradScaler("cpu", enabled=args.scaler)
averaged = copy.deepcopy(model.module)
texts = make(64)
for step in range(steps):
    share = texts[step * 16 : (step + 1) * 16][rank::world]
    tokens = (share[:, 1:] != 0).sum()
    dist.all_reduce(tokens)
    parts = share.split(args.micro_batch)
    for i, part in enumerate(parts):
        last = i + 1 == len(parts)
        with nullcontext() if last else model.no_sync():
            with torch.autocast("cpu", torch.bfloat16, enabled=args.half):
                logits = model(part[:, :-1].T)
                total = nn.functional.cross_entropy(
                    logits.flatten(0, 1),
                    part[:, 1:].T.flatten(),
                    ignore_index=0,
                    reduction="sum",
                )
                loss = total / (part[:, 1:] != 0).sum() / len(parts)
            scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    if args.scheduler:
        scheduler.step()
    if args.average:
        with torch.no_grad():
            for mean, weight in zip(averaged.parameters(), model.parameters(), strict=True):
                mean.lerp_(weight, 0.1)
dist.destroy_process_group()
