"""Trains a model with FSDP: each rank has a slice of every tensor.

    torchrun --nproc-per-node=4 -m aiscale.train.fsdp --steps 20

Start it again with more steps: it goes on from its checkpoint.
"""

import gc

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from aiscale.train.data import batches, read_windows
from aiscale.train.job import Job
from aiscale.train.model import build, draw, loss_of
from aiscale.train.optimizer import make_optimizer
from aiscale.train.options import options
from aiscale.train.ranks import device, rank, start, world_size
from aiscale.train.sharded_checkpoint import load, save


def main(args):
    start(args)
    model = build(args)
    dtype = torch.bfloat16 if args.bf16 else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.get_default_dtype())
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)  # gathered, used and freed one at a time
    fully_shard(model, mp_policy=policy)  # the root: embeddings and head
    for block, following in zip(model.blocks, model.blocks[1:]):
        block.set_modules_to_forward_prefetch([following])  # gathered one ahead
    draw(model, args, device)
    optimizer = make_optimizer(model, args)
    first = load(args.save, model, optimizer)
    windows, held_out, text = read_windows(args)
    job = Job(args, optimizer, first, text)
    for step, batch in job.follow(batches(windows, first, args, rank, world_size)):
        loss = torch.zeros((), device=device)
        micro_batches = batch.to(device).split(args.micro_batch)
        for i, micro_batch in enumerate(micro_batches):
            model.set_requires_gradient_sync(i + 1 == len(micro_batches))  # once a step
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
            save(args.save, model, optimizer, step + 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = options("fsdp", __doc__)
    main(parser.parse_args())
    gc.freeze()  # or Python, when it ends, searches all objects of torch: a second a rank
