"""Trains a model with DeepSpeed, as its JSON says.

    torchrun --nproc-per-node=4 -m aiscale.train.zero --steps 20

Start it again with more steps: it goes on from its checkpoint.
"""

import gc
import json
from functools import partial

import torch
import torch.distributed as dist

from aiscale.train.data import batches, read_windows
from aiscale.train.job import Job
from aiscale.train.model import build, draw, loss_of
from aiscale.train.optimizer import make_optimizer
from aiscale.train.options import options
from aiscale.train.ranks import device, rank, start, world_size
from aiscale.train.sharded_checkpoint import newest, write

if not torch.cuda.is_available():
    from aiscale import without_gpu

    without_gpu.prepare_deepspeed()
import deepspeed


def main(args):
    start(args)
    # Stage 3: one GPU may not hold all weights in fp32. DeepSpeed moves them there in bf16.
    model = draw(build(args), args, torch.device("cpu") if args.stage == 3 else device)
    optimizer = make_optimizer(model, args)
    settings = json.load(args.config)
    settings["zero_optimization"]["stage"] = args.stage
    settings |= {"bf16": {"enabled": args.bf16}, "gradient_clipping": args.clip}
    settings |= {"train_batch_size": args.batch, "train_micro_batch_size_per_gpu": args.micro_batch}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    folder, first = newest(args.save)
    if folder:
        engine.load_checkpoint(folder, tag="deepspeed")
    windows, held_out, text = read_windows(args)
    job = Job(args, optimizer, first, text)
    for step, batch in job.follow(batches(windows, first, args, rank, world_size)):
        loss = torch.zeros((), device=device)
        micro_batches = batch.to(device).split(args.micro_batch)
        for micro_batch in micro_batches:
            part = loss_of(engine(micro_batch[:, :-1]), micro_batch[:, 1:])
            engine.backward(part)  # divides by the number of micro-batches
            engine.step()  # acts after the last micro-batch only
            loss += part.detach() / len(micro_batches)
        dist.all_reduce(loss, dist.ReduceOp.AVG)  # each rank knows the loss of its own share
        norm = engine.get_global_grad_norm() or None  # stage 0 does not tell it
        job.log(step, loss, norm)
        job.evaluate(step, engine, held_out, loss_of)
        if job.must_save(step):
            write(args.save, step + 1, partial(engine.save_checkpoint, tag="deepspeed"))
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = options("zero", __doc__)
    main(parser.parse_args())
    gc.freeze()  # or Python, when it ends, searches all objects of torch: a second a rank
