"""A model in two stages, on two ranks: each works on one micro-batch while the other works on the next (1F1B).

    torchrun --nproc-per-node=2 02_schedule.py --steps 6

A stage keeps what the backward pass needs of two micro-batches at most, however many there are.
"""

import argparse

import torch
import torch.distributed as dist
from model import CONTEXT, LM, read_windows

WIDTH = 64


class Stage:
    """Half of the model, and its link to the other half."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        self.model, self.rank = LM(WIDTH), dist.get_rank()
        self.other = 1 - self.rank
        first, last = self.model.blocks
        self.blocks = [last if self.rank else first]
        used = [self.model.head, last] if self.rank else [self.model.token, self.model.place, first]
        self.parameters = [parameter for module in used for parameter in module.parameters()]

    def receive(self, like):
        tensor = torch.empty_like(like)
        dist.recv(tensor, self.other)
        return tensor

    def send(self, tensor):
        dist.send(tensor.detach().contiguous(), self.other)


def first_stage(stage, parts):
    """Forward passes run one micro-batch ahead of backward passes."""
    held = []
    for i in range(len(parts) + 1):
        if i < len(parts):
            held.append(stage.model.through(stage.blocks, stage.model.embed(parts[i])))
            stage.send(held[-1])
        if i > 0:
            h = held.pop(0)
            torch.autograd.backward(h, stage.receive(h))


def last_stage(stage, parts):
    total = 0
    like = torch.empty(len(parts[0]), CONTEXT, WIDTH)
    h = stage.receive(like)
    for i, part in enumerate(parts):
        h.requires_grad_()
        loss = stage.model.losses(stage.model.through(stage.blocks, h), part).mean() / len(parts)
        torch.autograd.backward(loss)
        total += loss.item()
        stage.send(h.grad)
        if i + 1 < len(parts):
            h = stage.receive(like)
    return total


def main(args):
    dist.init_process_group("gloo")
    stage = Stage(args.seed)
    optimizer = torch.optim.AdamW(stage.parameters, lr=1e-2)
    batches = read_windows(args.steps * args.batch).split(args.batch)
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        parts = batch.chunk(args.micro_batches)
        loss = last_stage(stage, parts) if stage.rank else first_stage(stage, parts)
        optimizer.step()
        if stage.rank == 1:
            print(f"step {step} loss {loss:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch", type=int, default=8, help="sequences in one step")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
