"""Context parallelism: each rank has a part of every sequence, as torch's `context_parallel` cuts it.

    torchrun --nproc-per-node=2 12_context.py --steps 12

A part has two pieces, an early and a late one, so that all ranks have as much to do.
"""

import argparse

import torch
import torch.distributed as dist
from model import CONTEXT, read_windows
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.functional import cross_entropy, scaled_dot_product_attention


class Reader(nn.Module):
    """A layer of attention. Shapes: B sequences, T bytes of this rank, D width, H heads."""

    def __init__(self, width=32, heads=2):
        super().__init__()
        self.heads = heads
        self.token, self.place = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.head = nn.Linear(width, 256, bias=False)
        nn.init.normal_(self.out.weight, std=0.4)

    def forward(self, inputs, places):  # (B, T), (T,) -> (B, T, 256)
        h = self.token(inputs) + self.place(places)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(h).chunk(3, -1))
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, H, T, D / H)
        return self.head(h + self.out(mixed.transpose(1, 2).flatten(2)))


def average_gradients(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)


def main(args):
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    torch.manual_seed(args.seed)
    model = Reader()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)

    for step, windows in enumerate(read_windows(args.steps * 4).split(4)):
        inputs, targets, places = windows[:, :-1].clone(), windows[:, 1:].clone(), torch.arange(CONTEXT)
        optimizer.zero_grad()
        with context_parallel(mesh, buffers=[inputs, targets, places], buffer_seq_dims=[1, 1, 0]):
            logits = model(inputs, places)
            loss = cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
        average_gradients(model)
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        if rank == 0:
            print(f"step {step} loss {mean.item():.6f} bytes {logits.shape[:2].numel()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
