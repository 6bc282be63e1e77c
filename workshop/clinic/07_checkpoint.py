"""Trains a model that FSDP has cut among ranks, saves it, and goes on from what was saved.

torchrun --nproc-per-node=2 07_checkpoint.py --steps 6
torchrun --nproc-per-node=2 07_checkpoint.py --steps 12      # goes on at step 6
"""

import argparse
import os

import torch
import torch.distributed as dist
from model import LM, read_windows
from torch.distributed.fsdp import fully_shard


def save(path, model, optimizer, steps):
    if dist.get_rank() == 0:
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "steps": steps}
        torch.save(saved, f"{path}.part")
        os.replace(f"{path}.part", path)  # a job that is killed here leaves the old file or the new one, whole
    dist.barrier()


def load(path, model, optimizer):
    """Returns the number of steps that were taken before."""
    if not os.path.exists(path):
        return 0
    saved = torch.load(path, weights_only=False)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return saved["steps"]


def main(args):
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = LM()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = load(args.save, model, optimizer)
    batches = read_windows(args.steps * args.batch).split(args.batch)

    for step in range(first, args.steps):
        optimizer.zero_grad()
        loss = model(batches[step].chunk(size)[rank]).mean()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        if rank == 0:
            print(f"step {step} loss {mean.item():.6f}", flush=True)
    save(args.save, model, optimizer, args.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch", type=int, default=8, help="sequences in one step, over all ranks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", default="model.pt", help="the checkpoint; if it is there, training goes on from it")
    main(parser.parse_args())
