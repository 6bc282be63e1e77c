"""Radius by its definition, on ranks simulated in one process: aiscale.train.radius must equal it.

    python -m aiscale.measure.radius_simulated --ranks 3 --density 0.3 --interval 4

Nothing is sent and no hook is used. Each rank's gradient is computed in turn, and Adam's moments
are computed here once more, from the gradients that the optimizer gets.
"""

import gc

import torch
import torch.distributed as dist

from aiscale.train.data import batches, read_windows
from aiscale.train.job import Job
from aiscale.train.model import build, draw, loss_of
from aiscale.train.optimizer import make_optimizer
from aiscale.train.options import options
from aiscale.train.ranks import device, start
from aiscale.train.sharded_checkpoint import load, save


class Simulated:
    """What the ranks have in common, the chosen entries; and what each has left to send."""

    def __init__(self, model, args):
        self.model, self.args = model, args
        parameters = list(model.parameters())
        self.chosen = [torch.ones_like(p, dtype=torch.bool) for p in parameters]
        self.unsent = [[torch.zeros_like(p) for p in parameters] for _ in range(args.ranks)]
        self.mean = [torch.zeros_like(p) for p in parameters]
        self.square = [torch.zeros_like(p) for p in parameters]

    def is_dense(self, step):
        return step < self.args.dense_until or step % self.args.interval == 0

    def send(self, step, rank, gradients):
        """What arrives of one rank's gradients."""
        sent = []
        for number, gradient in enumerate(gradients):
            total = gradient + self.unsent[rank][number]
            part = total if self.is_dense(step) else total * self.chosen[number]
            self.unsent[rank][number] = total - part
            sent.append(part)
        return sent

    def choose(self, step):
        """After a dense step: the entries of each matrix that Adam has just moved most."""
        for number, parameter in enumerate(self.model.parameters()):
            mean, square, beta2 = self.mean[number], self.square[number], self.args.beta2
            mean.mul_(0.9).add_(0.1 * parameter.grad)
            square.mul_(beta2).add_((1 - beta2) * parameter.grad**2)
            if parameter.dim() < 2 or not self.is_dense(step) or step + 1 < self.args.dense_until:
                continue
            moved = (mean / (square.sqrt() + 1e-8)).abs()
            most = max(int(self.args.density * parameter.numel()), 1)
            self.chosen[number] = moved >= moved.flatten().sort(descending=True).values[most - 1]


def main(args):
    start(args)
    model = draw(build(args), args, device)
    optimizer = make_optimizer(model, args)
    first = load(args.save, model, optimizer)
    windows, held_out, text = read_windows(args)
    job = Job(args, optimizer, first, text)
    simulated = Simulated(model, args)
    for step, batch in job.follow(batches(windows, first, args, 0, 1)):
        arrived = [torch.zeros_like(p) for p in model.parameters()]
        loss = torch.zeros((), device=device)
        for rank in range(args.ranks):
            part = loss_of(model(batch[rank :: args.ranks, :-1]), batch[rank :: args.ranks, 1:])
            gradients = torch.autograd.grad(part, list(model.parameters()))
            for total, sent in zip(arrived, simulated.send(step, rank, gradients), strict=True):
                total += sent / args.ranks
            loss += part.detach() / args.ranks
        for parameter, gradient in zip(model.parameters(), arrived, strict=True):
            parameter.grad = gradient
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        simulated.choose(step)
        optimizer.zero_grad()
        job.log(step, loss, norm)
        job.evaluate(step, model, held_out, loss_of)
        if job.must_save(step):
            save(args.save, model, optimizer, step + 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = options("radius", __doc__)
    parser.add_argument("--ranks", type=int, default=3, help="simulated ones")
    main(parser.parse_args())
    gc.freeze()  # or Python, when it ends, searches all objects of torch: a second a rank
