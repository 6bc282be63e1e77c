"""Trains a model with DDP and Radius: most steps send a part of the gradient.

    torchrun --nproc-per-node=4 -m aiscale.train.radius --density 0.4 --steps 20

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
from aiscale.train.refusal import refuse
from aiscale.train.sharded_checkpoint import gather, load, save


class Radius:
    """A hook for DDP: every `interval`-th step sends all, others a few entries of each matrix."""

    def __init__(self, model, density, interval, dense_until):
        self.density, self.interval, self.step = density, interval, 0
        self.dense_until = dense_until
        self.names = {p: name for name, p in model.named_parameters()}
        self.residual = {p: torch.zeros(p.numel(), device=p.device) for p in model.parameters()}
        self.mask = {p: kept == 0 for p, kept in self.residual.items()}  # at first all are sent

    def is_dense(self):
        return self.step < self.dense_until or self.step % self.interval == 0

    def state(self):
        """For a checkpoint: the mask, which all ranks share, and this rank's residual."""
        mask = {name: self.mask[p] for p, name in self.names.items()}
        residual = {name: self.residual[p] for p, name in self.names.items()}
        return {"mask": mask, f"residual {rank} of {world_size}": residual}

    def check_masks(self):
        """Stops if ranks chose different entries: they would add up unlike ones from then on."""
        chosen = [int(mask.nonzero().sum()) for mask in self.mask.values()]
        if len({tuple(each) for each in gather(chosen)}) > 1:
            refuse("ranks chose different entries: go on from the last checkpoint")

    def hook(self, _, bucket):
        parameters, gradient = bucket.parameters(), bucket.buffer()
        total = gradient + torch.cat([self.residual[p] for p in parameters])
        mask = torch.cat([self.mask[p] for p in parameters])
        if self.is_dense():
            mask = torch.ones_like(mask)
        kept = total.masked_fill(mask, 0).split([p.numel() for p in parameters])
        self.residual.update(zip(parameters, kept))

        def unpack(mean):
            return torch.zeros_like(gradient).masked_scatter_(mask, mean.value()[0])

        return dist.all_reduce(total[mask] / world_size, async_op=True).get_future().then(unpack)

    def after_step(self, optimizer):
        if self.is_dense() and self.step + 1 >= self.dense_until:
            for p in self.mask:
                if p.dim() > 1:  # biases and norms are always sent
                    mean, square = optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]
                    size = (mean / (square.sqrt() + 1e-8)).abs().flatten()  # all scaled alike
                    chosen = size.topk(max(int(self.density * p.numel()), 1)).indices
                    self.mask[p] = torch.zeros_like(self.mask[p]).index_fill_(0, chosen, True)
            self.check_masks()
        self.step += 1


def main(args):
    start(args)
    model = draw(build(args), args, device)
    optimizer = make_optimizer(model, args)
    radius = Radius(model, args.density, args.interval, args.dense_until)
    # the tensors of its state are filled in place
    radius.step = first = load(args.save, model, optimizer, **radius.state())
    cast = torch.autocast(device.type, torch.bfloat16, enabled=args.bf16)
    model.forward = cast(model.forward)
    model = DistributedDataParallel(
        model, gradient_as_bucket_view=True, bucket_cap_mb=args.bucket_mb
    )
    model.register_comm_hook(None, radius.hook)
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
        radius.after_step(optimizer)
        optimizer.zero_grad()
        job.log(step, loss, norm)
        job.evaluate(step, model, held_out, loss_of)
        if job.must_save(step):
            save(args.save, model.module, optimizer, step + 1, **radius.state())
    del model
    gc.collect()  # DDP ends before its group: the other way round, gloo may hang at exit
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = options("radius", __doc__)
    main(parser.parse_args())
    gc.freeze()  # or Python, when it ends, searches all objects of torch: a second a rank
