"""A model in two stages, on two ranks; the matrix that embeds bytes is also the one that predicts them.

    torchrun --nproc-per-node=2 10_stages.py --steps 12

All micro-batches go forward, then all go backward (GPipe).
"""

import argparse

import torch
import torch.distributed as dist
from model import CONTEXT, LM, read_windows

WIDTH = 32


def stage_of(model, rank):
    """The blocks and parameters of a rank's half: embeddings first, head last."""
    first, last = model.blocks
    if rank == 0:
        return [first], [model.token.weight, model.place.weight, *first.parameters()]
    return [last], [*last.parameters(), model.head.weight]


def first_stage(model, blocks, parts):
    held = [model.through(blocks, model.embed(part)) for part in parts]
    for h in held:
        dist.send(h.detach(), 1)
    for h in held:
        gradient = torch.empty_like(h)
        dist.recv(gradient, 1)
        h.backward(gradient)


def last_stage(model, blocks, parts):
    """Returns the loss of the whole batch."""
    held = [torch.empty(len(part), CONTEXT, WIDTH) for part in parts]
    for h in held:
        dist.recv(h, 0)
        h.requires_grad_()
    losses = [
        model.losses(model.through(blocks, h), part).mean() / len(parts) for h, part in zip(held, parts, strict=True)
    ]
    for h, loss in zip(held, losses, strict=True):
        loss.backward()
        dist.send(h.grad, 0)
    return sum(losses).item()


def main(args):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    model = LM(WIDTH, tied=True)
    blocks, parameters = stage_of(model, rank)
    optimizer = torch.optim.SGD(parameters, lr=0.1)

    for step, batch in enumerate(read_windows(args.steps * args.batch).split(args.batch)):
        optimizer.zero_grad()
        parts = batch.chunk(args.micro_batches)
        loss = last_stage(model, blocks, parts) if rank else first_stage(model, blocks, parts)
        optimizer.step()
        if rank == 1:
            print(f"step {step} loss {loss:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=8, help="sequences in one step")
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
