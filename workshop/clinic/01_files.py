"""Trains on a text that is divided among ranks, and saves the model after each epoch.

torchrun --nproc-per-node=2 01_files.py --epochs 2
"""

import argparse
import gc

import torch
import torch.distributed as dist
from model import LM, read_windows
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader


def load(windows, batch, seed):
    """Batches of this rank's share, in an order of the epoch's own."""
    mine = windows[dist.get_rank() :: dist.get_world_size()]
    order = torch.Generator().manual_seed(seed)
    return DataLoader(mine, batch // dist.get_world_size(), shuffle=True, generator=order)


def train(args):
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    model = DistributedDataParallel(LM())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    windows = read_windows(args.windows)

    step = 0
    for epoch in range(args.epochs):
        for batch in load(windows, args.batch, args.seed + epoch):
            optimizer.zero_grad()
            loss = model(batch).mean()
            loss.backward()
            optimizer.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean, dist.ReduceOp.AVG)
            if rank == 0:
                print(f"epoch {epoch} step {step} loss {mean.item():.6f}", flush=True)
            step += 1
        if rank == 0:
            torch.save(model.module.state_dict(), args.save)
        dist.barrier()  # whoever goes on may read the file


def main(args):
    dist.init_process_group("gloo")
    train(args)
    gc.collect()  # DDP ends before its group: the other way round, gloo may hang at exit
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--windows", type=int, default=73, help="sequences of the text")
    parser.add_argument("--batch", type=int, default=8, help="sequences in one step, over all ranks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", default="model.pt")
    main(parser.parse_args())
