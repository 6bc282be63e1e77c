"""Trains a mixture of experts on several ranks, which share the batch and the experts.

    torchrun --nproc-per-node=4 train_experts.py --steps 20

Start it again with more steps: it goes on from its checkpoint.
"""

import argparse
import gc
import os

import torch
import torch.distributed as dist
from experts import Experts
from model import GPT, TEXT, loss_of, read_windows
from sharded_checkpoint import load, save
from torch import nn

# torchrun tells each process who it is, in RANK and WORLD_SIZE; without RANK it is rank 0 of 1.
rank = int(os.environ.get("RANK", 0))
world_size = int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else 1
device = torch.device("cpu")
if torch.cuda.is_available():  # the n-th rank of a node has its n-th GPU, or the only one that it sees
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    torch.cuda.set_device(device)


def build():
    """A GPT of two blocks, with a layer of experts behind each."""
    model = GPT(layers=2)
    layers = [layer for block in model.blocks for layer in (block, Experts(64, rank, world_size))]
    model.blocks = nn.ModuleList(layers)
    return model.to(device)


def balance(model):
    """1 for each layer whose experts all have as many tokens, more where a few have most."""
    return sum(layer.balance for layer in model.blocks if isinstance(layer, Experts))


def average(model):
    """Leaves in each gradient that of the whole batch's mean loss."""
    for name, weight in model.named_parameters():
        if ".experts." in name:
            weight.grad /= world_size  # rows of all ranks came here: the sum is there already
        else:
            dist.all_reduce(weight.grad, dist.ReduceOp.AVG)


def clip(model, most):
    """Clips by the norm of the whole model's gradient, of which each rank has its experts' part."""
    common, experts = torch.zeros(2, device=device)
    for name, weight in model.named_parameters():
        squares = experts if ".experts." in name else common
        squares += weight.grad.square().sum()
    dist.all_reduce(experts)
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), most, (common + experts).sqrt())


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
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    first = load(args.save, model, optimizer)
    windows = read_windows(args.text)
    for step, batch in batches(windows, range(first, args.steps), args.batch):
        loss = torch.zeros((), device=device)
        micro_batches = batch.to(device).split(args.micro_batch)
        for micro_batch in micro_batches:
            part = loss_of(model(micro_batch[:, :-1]), micro_batch[:, 1:]) / len(micro_batches)
            (part + args.balance * balance(model) / len(micro_batches)).backward()
            loss += part.detach()
        average(model)
        dist.all_reduce(loss, dist.ReduceOp.AVG)  # each rank knows the loss of its own share
        clip(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step} loss {loss.item():.6f}", flush=True)
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            save(args.save, model, optimizer, step + 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", default=TEXT, help="a file to learn from")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=16, help="sequences in one step, over all ranks")
    parser.add_argument("--micro-batch", type=int, default=2, help="sequences that a rank computes at once")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--save", default="checkpoint", help="training goes on from it")
    parser.add_argument("--save-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--balance", type=float, default=0.0, help="weight of the loss that evens out the load")
    main(parser.parse_args())
    gc.freeze()  # or Python, when it ends, searches all objects of torch: a second a rank
