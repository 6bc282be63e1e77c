"""Data-parallel training without DDP: gradients are packed into one message, as one would with MPI.

torchrun --nproc-per-node=2 04_gradients.py --steps 12
"""

import argparse

import torch
import torch.distributed as dist
from model import LM, read_windows


def average_gradients(parameters):
    """Replace each rank's gradients by their mean over ranks, in one all-reduce."""
    buffer = torch.cat([parameter.grad.flatten() for parameter in parameters])
    dist.all_reduce(buffer)
    buffer /= dist.get_world_size()
    pieces = buffer.split([parameter.numel() for parameter in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.grad.copy_(piece.view_as(parameter))


def main(args):
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = LM()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=args.lr)
    batches = read_windows(args.steps * args.batch).split(args.batch)

    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        loss = model(batch.chunk(size)[rank]).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, args.max_norm)
        average_gradients(parameters)
        optimizer.step()
        seen = torch.stack([loss.detach(), norm])
        dist.all_reduce(seen, dist.ReduceOp.AVG)
        if rank == 0:
            print(f"step {step} loss {seen[0]:.6f} norm {seen[1]:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=4, help="sequences in one step, over all ranks")
    parser.add_argument("--lr", type=float, default=0.2)
    parser.add_argument("--max-norm", type=float, default=0.5, help="gradients are clipped to this norm")
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
