"""Trains the GPT of model.py on several ranks, by MPI.

    mpiexec -n 4 python train_mpi.py --steps 20

Start it again with more steps: it goes on from its checkpoint.
"""

import argparse
import gc

import torch
from checkpoint import load, save
from llama import Llama
from model import GPT, TEXT, loss_of, read_windows
from mpi4py import MPI

world = MPI.COMM_WORLD  # all processes that mpiexec started
rank, world_size = world.Get_rank(), world.Get_size()
device = torch.device("cpu")  # mpi4py sends numpy's arrays


def batches(windows, steps, size, rank=rank, world_size=world_size):
    """Each step and this rank's share of its batch. Each epoch has an order of its own."""
    for step in steps:
        epoch, place = divmod(step, len(windows) // size)
        order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(epoch))
        yield step, windows[order[place * size : (place + 1) * size][rank::world_size]]


def main(args):
    assert args.batch % (world_size * args.micro_batch) == 0, f"--batch is no multiple of {world_size} x --micro-batch"
    torch.manual_seed(0)
    model = (Llama() if args.llama else GPT()).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    first = load(args.save, model, optimizer, world.allgather)
    windows = world.bcast(read_windows(args.text) if rank == 0 else None)  # any object, pickled
    for weight in model.parameters():
        world.Bcast(weight.detach().numpy())  # a buffer of numbers; with equal seeds not needed
    for step, batch in batches(windows, range(first, args.steps), args.batch):
        loss = torch.zeros((), device=device)
        micro_batches = batch.to(device).split(args.micro_batch)
        for micro_batch in micro_batches:
            part = loss_of(model(micro_batch[:, :-1]), micro_batch[:, 1:]) / len(micro_batches)
            part.backward()
            loss += part.detach()
        for weight in model.parameters():
            world.Allreduce(MPI.IN_PLACE, weight.grad.numpy())  # the sum
            weight.grad /= world_size
        world.Allreduce(MPI.IN_PLACE, loss.numpy())  # each rank knows the loss of its own share
        loss /= world_size
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step} loss {loss.item():.6f}", flush=True)
        if rank == 0 and ((step + 1) % args.save_every == 0 or step + 1 == args.steps):
            save(args.save, model, optimizer, step + 1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", default=TEXT, help="a file to learn from")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=16, help="sequences in one step, over all ranks")
    parser.add_argument("--micro-batch", type=int, default=2, help="sequences that a rank computes at once")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--save", default="checkpoint", help="training goes on from it")
    parser.add_argument("--save-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--llama", action="store_true", help="train the model of llama.py")
    main(parser.parse_args())
    gc.freeze()  # or Python, when it ends, searches all objects of torch: a second a rank
