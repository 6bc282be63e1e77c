"""Trains on documents of unequal length on four ranks; those of similar length share a batch, to fill up less.

torchrun --nproc-per-node=4 08_speed.py --steps 6
"""

import argparse
import gc
import time

import torch
import torch.distributed as dist
from model import LM, PAD, padded, read_documents
from torch.nn.parallel import DistributedDataParallel


def share(documents, rank, size, per_rank, seed):
    """This rank's batches: documents of similar length together, in an order that has nothing to do with length."""
    documents = sorted(documents, key=len)
    mine = documents[rank * len(documents) // size : (rank + 1) * len(documents) // size]
    batches = [mine[i : i + per_rank] for i in range(0, len(mine), per_rank)]
    order = torch.randperm(len(batches), generator=torch.Generator().manual_seed(seed))
    return [padded(batches[i]) for i in order]


def train(args):
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = DistributedDataParallel(LM())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    documents = read_documents(args.steps * args.batch)

    before = time.process_time()
    for step, batch in enumerate(share(documents, rank, size, args.batch // size, args.seed)):
        tokens = (batch[:, 1:] != PAD).sum()
        dist.all_reduce(tokens)
        optimizer.zero_grad()
        loss = model(batch).sum() * size / tokens  # DDP takes the mean over ranks
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        if rank == 0:
            print(f"step {step} loss {mean.item():.6f}", flush=True)
    print(f"rank {rank} computed for {time.process_time() - before:.2f} s of a core", flush=True)


def main(args):
    dist.init_process_group("gloo")
    train(args)
    gc.collect()  # DDP ends before its group: the other way round, gloo may hang at exit
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch", type=int, default=384, help="documents in one step, over all ranks")
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
