"""Trains a model in tensor, pipeline and data parallelism, with torch's own tools.

    torchrun --nproc-per-node=4 -m aiscale.train.tp_pp --steps 20

Start it again with more steps: it goes on from its checkpoint.
"""

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from aiscale.train.data import batches, read_windows
from aiscale.train.job import Job
from aiscale.train.model import build, draw, loss_of
from aiscale.train.optimizer import make_optimizer
from aiscale.train.options import options
from aiscale.train.ranks import device, start, world_size
from aiscale.train.sharded_checkpoint import load, save

#: Into a block by columns, out of it by rows. (torch's backward sums q, k and v one by one.)
PLAN = {name: ColwiseParallel() for name in ("query", "key", "value", "up")}
PLAN |= {name: RowwiseParallel() for name in ("out", "down")}


def cut(model, stage, stages):
    """Leaves in the model what one pipeline stage computes."""
    if stage > 0:
        model.embed = nn.Identity()
    if stage < stages - 1:
        model.head = nn.Identity()
    for i in range(len(model.blocks)):
        if i * stages // len(model.blocks) != stage:
            model.blocks[i] = nn.Identity()


def clip(model, most, pipeline):
    """Clips by the norm of the whole model's gradient, of which each rank has a part."""
    # Gathering is simplest; Megatron-Core sums the squares of the parts
    gradients = [weight.grad for weight in model.parameters()]
    whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients]
    squares = sum(gradient.square().sum() for gradient in whole)
    dist.all_reduce(squares, group=pipeline)
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), most, squares.sqrt(), foreach=False)
    return squares.sqrt()


def main(args):
    start(args)
    dp = world_size // (args.pp * args.tp)
    mesh = init_device_mesh(device.type, (dp, args.pp, args.tp), mesh_dim_names=("dp", "pp", "tp"))
    data, pipeline, my_stage = mesh.get_group("dp"), mesh.get_group("pp"), mesh.get_local_rank("pp")
    model = build(args)
    cut(model, my_stage, args.pp)
    for block in model.blocks:
        if not isinstance(block, nn.Identity):
            parallelize_module(block, mesh["tp"], PLAN)
    draw(model, args, device)
    stage = PipelineStage(model, my_stage, args.pp, device, group=pipeline)
    schedule = Schedule1F1B(stage, args.batch // dp // args.micro_batch, loss_fn=loss_of)
    # with DTensors
    optimizer = make_optimizer(model, args, foreach=False)
    first = load(args.save, model, optimizer)
    windows, _, text = read_windows(args)
    job = Job(args, optimizer, first, text)
    copy = mesh.get_local_rank("dp")
    for step, batch in job.follow(batches(windows, first, args, copy, dp)):
        batch, losses = batch.to(device), []
        inputs = [batch[:, :-1]] if stage.is_first else []
        given = {"target": batch[:, 1:], "losses": losses} if stage.is_last else {}
        schedule.step(*inputs, **given)
        loss = torch.stack(losses).mean() if stage.is_last else torch.zeros((), device=device)
        dist.all_reduce(loss, group=pipeline)  # only the last stage knows it
        dist.all_reduce(loss, dist.ReduceOp.AVG, group=data)
        for weight in model.parameters():
            mine = weight.grad.to_local() if isinstance(weight.grad, DTensor) else weight.grad
            dist.all_reduce(mine, dist.ReduceOp.AVG, group=data)
        norm = clip(model, args.clip, pipeline)
        optimizer.step()
        optimizer.zero_grad()
        job.log(step, loss, norm)
        if job.must_save(step):
            save(args.save, model, optimizer, step + 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = options("tp_pp", __doc__)
    main(parser.parse_args())
    gc.freeze()  # or Python, when it ends, searches all objects of torch: a second a rank
