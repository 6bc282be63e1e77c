"""Ways to send gradients, as hooks for DDP, and ranks that one process simulates.

radius.py, radius_sweep.py and gpu_parts.py use them.

    way = make("radius", model, density=0.4, interval=200)
    ddp.register_comm_hook(None, way.hook)               # real ranks
    way.after_step(optimizer)

    ranks = SimulatedRanks(model, optimizer, [make("top-k", model, density=0.1) for _ in range(4)])
    loss = ranks.step(shares)                            # a process group of this process alone

Radius is the trainer's own. A way that is a model's for all ranks has the same state as theirs.
"""

# No `from __future__ import annotations`: DDP checks its hook's annotations, which must be types.

import signal

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from aiscale.train.model import loss_of

# A trainer takes note of signals and saves; nothing here saves, and one Ctrl-C is to end it.
NOTED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
before = {number: signal.getsignal(number) for number in NOTED}
from aiscale.train.radius import Radius  # noqa: E402

for number, handler in before.items():
    signal.signal(number, handler)


class Way:
    """Sends everything, in bf16 by torch's hook."""

    bf16 = False

    def hook(self, _, bucket):
        if self.bf16:
            return bf16_compress_hook(None, bucket)
        mean = bucket.buffer() / dist.get_world_size()
        return dist.all_reduce(mean, async_op=True).get_future().then(lambda done: done.value()[0])

    def after_step(self, optimizer):
        pass

    def tensors(self):
        """What it holds from step to step."""
        return []


class TopK(Way):
    """Each rank sends the largest entries of each matrix that it has not sent so far.

    Vectors are sent whole.
    """

    def __init__(self, model, density, dense_until):
        self.density, self.dense_until, self.step = density, dense_until, 0
        self.unsent = {
            p: torch.zeros_like(p, requires_grad=False).flatten() for p in model.parameters()
        }

    def hook(self, _, bucket):
        parameters, buffer = bucket.parameters(), bucket.buffer()
        if self.step < self.dense_until:
            return super().hook(_, bucket)
        total = buffer + torch.cat([self.unsent[p] for p in parameters])
        chosen, start = [], 0
        for p in parameters:
            part = total[start : start + p.numel()]
            k = max(1, int(self.density * p.numel())) if p.dim() > 1 else p.numel()
            chosen.append(start + part.abs().topk(k).indices)
            start += p.numel()
        places = torch.cat(chosen)
        values = total[places]
        left = total.index_fill(0, places, 0).split([p.numel() for p in parameters])
        self.unsent.update(zip(parameters, left, strict=True))
        places, n = places.to(torch.int32), dist.get_world_size()
        all_values, all_places = (mine.new_empty(n * len(mine)) for mine in (values, places))
        # its name since torch 2.13
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        works = [
            gather(all_values, values, async_op=True),
            gather(all_places, places, async_op=True),
        ]

        def add(_):
            return torch.zeros_like(buffer).index_add_(0, all_places, all_values / n)

        return torch.futures.collect_all([work.get_future() for work in works]).then(add)

    def after_step(self, optimizer):
        self.step += 1

    def tensors(self):
        return list(self.unsent.values())


class PowerSGD(Way):
    """torch's own. Two buckets would deadlock on gloo: give DDP one."""

    def __init__(self, rank, dense_until):
        first = max(2, dense_until)  # torch needs DDP's final buckets
        epsilon = 1e-8  # for a gradient of zeros, whose factors would be 0 / 0
        self.state = PowerSGDState(
            None, rank, start_powerSGD_iter=first, orthogonalization_epsilon=epsilon, random_seed=0
        )

    def hook(self, _, bucket):
        return powerSGD_hook(self.state, bucket)

    def tensors(self):
        kept = (self.state.error_dict, self.state.p_memory_dict, self.state.q_memory_dict)
        return [tensor for by_bucket in kept for tensor in by_bucket.values()]


class OurRadius(Radius, Way):
    """The trainer's. Its messages may be in bf16.

    Its residual may come back as a mean over the steps in which it gathered.
    """

    def __init__(self, model, density, interval, dense_until, residual):
        super().__init__(model, density, interval, dense_until)
        self.is_mean, self.gathered = residual == "mean", 0

    def hook(self, _, bucket):
        parameters, buffer = bucket.parameters(), bucket.buffer()
        mask = torch.cat([self.mask[p] for p in parameters])
        residual = torch.cat([self.residual[p] for p in parameters])
        if self.is_mean and self.is_dense() and self.gathered:
            buffer.copy_(torch.where(mask, buffer, (buffer + residual) / (self.gathered + 1)))
            for p in parameters:
                self.residual[p].zero_()
        if not self.bf16:
            return super().hook(_, bucket)
        total = buffer + residual
        if self.is_dense():
            mask = torch.ones_like(mask)
        kept = total.masked_fill(mask, 0).split([p.numel() for p in parameters])
        self.residual.update(zip(parameters, kept, strict=True))
        # what rounding loses is not kept
        message = (total[mask] / dist.get_world_size()).bfloat16()

        def unpack(mean):
            return torch.zeros_like(buffer).masked_scatter_(mask, mean.value()[0].to(buffer.dtype))

        return dist.all_reduce(message, async_op=True).get_future().then(unpack)

    def after_step(self, optimizer):
        self.gathered = 0 if self.is_dense() else self.gathered + 1
        super().after_step(optimizer)

    def tensors(self):
        return [*self.residual.values(), *self.mask.values()]


def make(
    method, model, *, density=0.4, interval=200, dense_until=0, residual="sum", rank=0, bf16=False
):
    """The way of that name: dense, radius, top-k or powersgd."""
    if method == "radius":
        way = OurRadius(model, density, interval, dense_until, residual)
    elif method == "top-k":
        way = TopK(model, density, dense_until)
    elif method == "powersgd":
        way = PowerSGD(rank, dense_until)
    else:
        way = Way()
    way.bf16 = bf16
    return way


class Bucket:
    """All gradients of a model, as DDP hands them to a hook."""

    def __init__(self, parameters):
        self.all = list(parameters)
        self.flat = torch.cat([p.grad.flatten() for p in self.all])

    def parameters(self):
        return self.all

    def buffer(self):
        return self.flat

    def gradients(self):
        parts = self.flat.split([p.numel() for p in self.all])
        return [part.view_as(p) for part, p in zip(parts, self.all, strict=True)]

    def index(self):
        return 0

    def is_last(self):
        return True


class SimulatedRanks:
    """One model and one optimizer for all ranks, which send their gradients in turn."""

    def __init__(self, model, optimizer, ways, precision=None, clip=1.0):
        self.model, self.optimizer, self.ways, self.clip = model, optimizer, ways, clip
        self.parameters = list(model.parameters())
        device = self.parameters[0].device.type
        self.cast = torch.autocast(device, torch.bfloat16, enabled=precision == "bf16")

    def loss(self, rows):
        with self.cast:
            return loss_of(self.model(rows[:, :-1]), rows[:, 1:])

    def step(self, shares):
        """An optimizer step; `shares`: (B, T + 1) tokens of each rank. Returns the mean loss."""
        total, mean = 0.0, 0.0
        for way, rows in zip(self.ways, shares, strict=True):
            self.optimizer.zero_grad()
            loss = self.loss(rows)
            loss.backward()
            total += loss.item() / len(self.ways)
            mean = mean + way.hook(None, Bucket(self.parameters)).wait() / len(self.ways)
        parts = mean.split([p.numel() for p in self.parameters])
        for p, part in zip(self.parameters, parts, strict=True):
            p.grad.copy_(part.view_as(p))
        torch.nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self.optimizer.step()
        for way in self.ways:
            way.after_step(self.optimizer)
        return total

    @torch.no_grad()
    def evaluate(self, batches):
        """The mean loss over batches of tokens (B, T + 1)."""
        losses = [self.loss(rows).item() for rows in batches]
        return sum(losses) / len(losses)
