"""Accelerate, with its gradient accumulation. Its argument: samples of a rank."""

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
generator = torch.Generator().manual_seed(1)
x, y = torch.randn(64, 20, generator=generator), torch.randint(5, (64,), generator=generator)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 5))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(x, y), batch_size=int(sys.argv[1]), shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _ in range(4):
    for a, b in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(a), b))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
accelerator.end_training()
