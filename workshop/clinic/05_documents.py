"""Trains on documents of unequal length, with DDP and gradient accumulation.

    torchrun --nproc-per-node=2 05_documents.py --steps 10

Short documents are filled up; what fills them is not counted in the loss.
"""

import argparse
import contextlib
import gc

import torch
import torch.distributed as dist
from model import LM, PAD, padded, read_documents
from torch.nn.parallel import DistributedDataParallel


def train(args):
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = DistributedDataParallel(LM())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    documents = read_documents(args.steps * args.batch)
    per_rank = args.batch // size

    for step in range(args.steps):
        first = step * args.batch + rank * per_rank
        mine = documents[first : first + per_rank]
        parts = [padded(mine[i :: args.micro_batches]) for i in range(args.micro_batches)]
        optimizer.zero_grad()
        total = torch.zeros(())
        for i, part in enumerate(parts):
            with model.no_sync() if i + 1 < len(parts) else contextlib.nullcontext():
                tokens = (part[:, 1:] != PAD).sum()
                loss = model(part).sum() / tokens / len(parts)
                loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
        optimizer.step()
        dist.all_reduce(total, dist.ReduceOp.AVG)
        if rank == 0:
            print(f"step {step} loss {total:.6f} norm {norm:.6f}", flush=True)


def main(args):
    dist.init_process_group("gloo")
    train(args)
    gc.collect()  # DDP ends before its group: the other way round, gloo may hang at exit
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=8, help="documents in one step, over all ranks")
    parser.add_argument("--micro-batches", type=int, default=2, help="parts that a rank computes one after the other")
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
