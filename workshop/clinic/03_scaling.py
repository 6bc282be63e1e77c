"""Data-parallel training: a batch is divided among all ranks, so that more ranks read more of the text in a step.

torchrun --nproc-per-node=4 03_scaling.py --epochs 2
"""

import argparse
import gc

import torch
import torch.distributed as dist
from model import LM, read_windows
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader


def train(args):
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)  # the same weights everywhere
    model = DistributedDataParallel(LM())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    windows = read_windows(args.windows)
    steps_per_epoch = len(windows) // args.batch

    for epoch in range(args.epochs):
        order = torch.Generator().manual_seed(args.seed + epoch)  # a new order in each epoch
        loader = DataLoader(windows, args.batch // size, shuffle=True, generator=order)
        for step, batch in zip(range(steps_per_epoch), loader, strict=False):
            optimizer.zero_grad()
            loss = model(batch).mean()
            loss.backward()
            optimizer.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean, dist.ReduceOp.AVG)
            if rank == 0:
                print(f"step {epoch * steps_per_epoch + step} loss {mean.item():.6f}", flush=True)


def main(args):
    dist.init_process_group("gloo")
    train(args)
    gc.collect()  # DDP ends before its group: the other way round, gloo may hang at exit
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--windows", type=int, default=96, help="sequences of the text")
    parser.add_argument("--batch", type=int, default=16, help="sequences in one step, over all ranks")
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
