"""Trains the GPT of model.py with ZeRO-1 by hand: each rank updates a share of the weights.

    torchrun --nproc-per-node=4 train_zero1.py --steps 20

It saves no checkpoint.
"""

import argparse
import gc
import os

import torch
import torch.distributed as dist
from llama import Llama
from model import GPT, TEXT, loss_of, read_windows
from torch.nn.utils import clip_grads_with_norm_, parameters_to_vector, vector_to_parameters

# torchrun tells each process who it is, in RANK and WORLD_SIZE; without RANK it is rank 0 of 1.
rank = int(os.environ.get("RANK", 0))
world_size = int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else 1
device = torch.device("cpu")
if torch.cuda.is_available():  # the n-th rank of a node has its n-th GPU, or the only one that it sees
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    torch.cuda.set_device(device)


class Zero1:
    """AdamW, of whose states each rank has a share."""

    def __init__(self, model, lr):
        self.weights = list(model.parameters())
        self.flat = parameters_to_vector(self.weights).detach()  # all weights, one after the other
        vector_to_parameters(self.flat, self.weights)
        self.own = self.flat.chunk(world_size)[rank].requires_grad_()
        self.adam = torch.optim.AdamW([self.own], lr=lr)

    def step(self):
        gradient = parameters_to_vector([weight.grad for weight in self.weights])
        self.own.grad = torch.empty_like(self.own)
        dist.reduce_scatter(self.own.grad, list(gradient.chunk(world_size)), dist.ReduceOp.AVG)
        squares = self.own.grad.square().sum()
        dist.all_reduce(squares)  # of all shares
        clip_grads_with_norm_([self.own], 1.0, squares.sqrt())
        self.adam.step()
        dist.all_gather(list(self.flat.chunk(world_size)), self.own.detach())


def batches(windows, steps, size, rank=rank, world_size=world_size):
    """Each step and this rank's share of its batch. Each epoch has an order of its own."""
    for step in steps:
        epoch, place = divmod(step, len(windows) // size)
        order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(epoch))
        yield step, windows[order[place * size : (place + 1) * size][rank::world_size]]


def main(args):
    dist.init_process_group()  # waits for all ranks; NCCL between GPUs, gloo between CPUs
    assert args.batch % (world_size * args.micro_batch) == 0, f"--batch is no multiple of {world_size} x --micro-batch"
    torch.manual_seed(0)
    model = (Llama() if args.llama else GPT()).to(device)
    optimizer = Zero1(model, args.lr)
    windows = read_windows(args.text)
    for step, batch in batches(windows, range(args.steps), args.batch):
        loss = torch.zeros((), device=device)
        micro_batches = batch.to(device).split(args.micro_batch)
        for micro_batch in micro_batches:
            part = loss_of(model(micro_batch[:, :-1]), micro_batch[:, 1:]) / len(micro_batches)
            part.backward()
            loss += part.detach()
        dist.all_reduce(loss, dist.ReduceOp.AVG)  # each rank knows the loss of its own share
        optimizer.step()
        model.zero_grad()
        if rank == 0:
            print(f"step {step} loss {loss.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", default=TEXT, help="a file to learn from")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=16, help="sequences in one step, over all ranks")
    parser.add_argument("--micro-batch", type=int, default=2, help="sequences that a rank computes at once")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--llama", action="store_true", help="train the model of llama.py")
    main(parser.parse_args())
    gc.freeze()  # or Python, when it ends, searches all objects of torch: a second a rank
