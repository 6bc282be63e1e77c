"""A model of transformers under DDP: unequal texts, a mean over the tokens of all ranks."""

import sys

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from transformers import GPT2Config, GPT2LMHeadModel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
config = GPT2Config(vocab_size=256, n_positions=32, n_embd=32, n_layer=2, n_head=4, **off)
model = DistributedDataParallel(GPT2LMHeadModel(config))
generator = torch.Generator().manual_seed(1)
data = []
for _ in range(64):
    text = torch.randint(256, (32,), generator=generator)
    length = int(torch.randint(4, 33, (1,), generator=generator))
    data.append({"input_ids": text, "labels": torch.where(torch.arange(32) < length, text, -100)})
loader = DataLoader(data, batch_size=int(sys.argv[1]), sampler=DistributedSampler(data))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def mean_over_all(out, batch):
    targets = batch["labels"][:, 1:]
    tokens = (targets != -100).sum()
    dist.all_reduce(tokens)
    total = cross_entropy(out.logits[:, :-1].flatten(0, 1), targets.flatten(), reduction="sum")
    return total * world / tokens


for batch in loader:
    out = model(**batch)
    loss = mean_over_all(out, batch)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
