"""Trains a model with DistributedDataParallel.

    torchrun --nproc-per-node=4 -m aiscale.train.ddp --steps 20

Start it again with more steps: it goes on from its checkpoint.
"""

import gc
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from aiscale.train.data import batches, read_windows
from aiscale.train.job import Job
from aiscale.train.model import build, draw, loss_of
from aiscale.train.optimizer import make_optimizer
from aiscale.train.options import options
from aiscale.train.ranks import device, rank, start, world_size
from aiscale.train.sharded_checkpoint import load, save


def main(args):
    start(args)
    model = draw(build(args), args, device)
    optimizer = make_optimizer(model, args)
    first = load(args.save, model, optimizer)
    cast = torch.autocast(device.type, torch.bfloat16, enabled=args.bf16)
    model.forward = cast(model.forward)
    model = DistributedDataParallel(
        model, gradient_as_bucket_view=True, bucket_cap_mb=args.bucket_mb
    )
    windows, held_out, text = read_windows(args)
    job = Job(args, optimizer, first, text)
    for step, batch in job.follow(batches(windows, first, args, rank, world_size)):
        loss = torch.zeros((), device=device)
        micro_batches = batch.to(device).split(args.micro_batch)
        for i, micro_batch in enumerate(micro_batches):
            last = i + 1 == len(micro_batches)
            with nullcontext() if last else model.no_sync():  # gradients are sent once a step
                part = loss_of(model(micro_batch[:, :-1]), micro_batch[:, 1:]) / len(micro_batches)
                part.backward()
            loss += part.detach()
        dist.all_reduce(loss, dist.ReduceOp.AVG)  # each rank knows the loss of its own share
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        optimizer.zero_grad()
        job.log(step, loss, norm)
        job.evaluate(step, model, held_out, loss_of)
        if job.must_save(step):
            save(args.save, model.module, optimizer, step + 1)
    del model
    gc.collect()  # DDP ends before its group: the other way round, gloo may hang at exit
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = options("ddp", __doc__)
    main(parser.parse_args())
    gc.freeze()  # or Python, when it ends, searches all objects of torch: a second a rank
