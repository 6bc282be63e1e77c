"""Forward passes of a trainer's model: no gradients, no optimizer. A study's phase inference.

    python src/aiscale/measure/study/inference.py --model 4x128 --steps 20 --save FOLDER

On several ranks each has the whole model and a share of the batch.
"""

from types import SimpleNamespace

import torch
import torch.distributed as dist

from aiscale.train.data import batches, read_windows
from aiscale.train.job import Job
from aiscale.train.model import build, draw, loss_of
from aiscale.train.options import options
from aiscale.train.ranks import device, rank, start, world_size


@torch.no_grad()
def main(args):
    start(args)
    model = draw(build(args), args, device)
    cast = torch.autocast(device.type, torch.bfloat16, enabled=args.bf16)
    model.forward = cast(model.forward)
    windows, _, text = read_windows(args)
    nothing_to_update = SimpleNamespace(param_groups=[])
    job = Job(args, nothing_to_update, 0, text)
    for step, batch in job.follow(batches(windows, 0, args, rank, world_size)):
        loss = torch.zeros((), device=device)
        micro_batches = batch.to(device).split(args.micro_batch)
        for micro_batch in micro_batches:
            loss += loss_of(model(micro_batch[:, :-1]), micro_batch[:, 1:]) / len(micro_batches)
        dist.all_reduce(loss, dist.ReduceOp.AVG)  # each rank knows the loss of its own share
        job.log(step, loss, torch.zeros(()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(options("serial", __doc__).parse_args())
