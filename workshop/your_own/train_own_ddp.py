"""Trains the GPT of model.py with a DDP of its own: gradients leave in buckets, during the backward pass.

    torchrun --nproc-per-node=4 train_own_ddp.py --steps 20

Start it again with more steps: it goes on from its checkpoint.
"""

import argparse
import gc
import os

import torch
import torch.distributed as dist
from checkpoint import load, save
from llama import Llama
from model import GPT, TEXT, loss_of, read_windows

# torchrun tells each process who it is, in RANK and WORLD_SIZE; without RANK it is rank 0 of 1.
rank = int(os.environ.get("RANK", 0))
world_size = int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else 1
device = torch.device("cpu")
if torch.cuda.is_available():  # the n-th rank of a node has its n-th GPU, or the only one that it sees
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    torch.cuda.set_device(device)


class OwnDDP:
    def __init__(self, model, bucket_bytes=2**19):
        self.bucket_bytes = bucket_bytes
        self.sync = True  # False: gradients add up on this rank
        self.bucket, self.sent = [], []  # weights whose gradients are there; messages under way
        for weight in model.parameters():
            weight.register_post_accumulate_grad_hook(self.ready)  # in each backward pass

    def ready(self, weight):
        if self.sync:
            self.bucket.append(weight)
            if sum(each.grad.nbytes for each in self.bucket) >= self.bucket_bytes:
                self.send()

    def send(self):
        packed = torch.cat([each.grad.flatten() for each in self.bucket])
        message = dist.all_reduce(packed, dist.ReduceOp.AVG, async_op=True)
        self.sent.append((message, packed, self.bucket))
        self.bucket = []

    def finish(self):
        if self.bucket:
            self.send()
        for message, packed, weights in self.sent:
            message.wait()
            for weight, mean in zip(weights, packed.split([each.numel() for each in weights])):
                weight.grad.copy_(mean.view_as(weight))
        self.sent = []


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
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    first = load(args.save, model, optimizer)
    ddp = OwnDDP(model)
    windows = read_windows(args.text)
    for step, batch in batches(windows, range(first, args.steps), args.batch):
        loss = torch.zeros((), device=device)
        micro_batches = batch.to(device).split(args.micro_batch)
        for i, micro_batch in enumerate(micro_batches):
            ddp.sync = i + 1 == len(micro_batches)  # gradients are sent once a step
            part = loss_of(model(micro_batch[:, :-1]), micro_batch[:, 1:]) / len(micro_batches)
            part.backward()
            loss += part.detach()
        ddp.finish()
        dist.all_reduce(loss, dist.ReduceOp.AVG)  # each rank knows the loss of its own share
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
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
    parser.add_argument("--llama", action="store_true", help="train the model of llama.py")
    main(parser.parse_args())
    gc.freeze()  # or Python, when it ends, searches all objects of torch: a second a rank
