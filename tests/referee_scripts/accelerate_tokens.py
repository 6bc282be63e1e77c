"""Accelerate: a mean over the tokens of all ranks, a schedule of one's own. Samples of a rank."""

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
generator = torch.Generator().manual_seed(1)
texts = torch.randint(1, 32, (96, 9), generator=generator)
lengths = torch.randint(2, 9, (96,), generator=generator)
texts = torch.where(torch.arange(9) <= lengths[:, None], texts, 0)
model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 32))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(texts, batch_size=int(sys.argv[1]), shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=6)
for batch in loader:
    targets = batch[:, 1:].flatten()
    tokens = accelerator.reduce((targets != 0).sum())
    logits = model(batch[:, :-1]).flatten(0, 1)
    total = nn.functional.cross_entropy(logits, targets, ignore_index=0, reduction="sum")
    accelerator.backward(total * accelerator.num_processes / tokens)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
accelerator.end_training()
