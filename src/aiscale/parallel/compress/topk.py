"""Top-k with error feedback (Stich et al. 2018; Lin et al. 2018), for comparison with Radius.

    aiscale train --recipe laptop --nproc 4 --set parallel.strategy=ddp --set compression.method=top-k

Each rank sends the k = max(floor(density x numel), 1) largest entries of every tensor and keeps the rest for later.
Ranks choose different entries, so indices (int32) and values are all-gathered, n k of each. Biases are sent whole.

Shapes: N entries of a tensor, n ranks.
"""

# No `from __future__ import annotations` here: DDP checks its hook's annotations, which must be types, not strings.

import itertools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from aiscale.config import Run
from aiscale.cost.compression import is_exempt, kept_entries
from aiscale.distributed import World
from aiscale.parallel.compress.base import Compressor

#: torch 2.13 gave all_gather_into_tensor this name
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class TopK(Compressor):
    def __init__(self, run: Run, world: World, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(run, world, model, optimizer)
        #: (N,) the sum of this rank's gradients that it has not sent; not for exempt parameters, which are sent whole
        self.unsent = {
            p: torch.zeros_like(p, requires_grad=False).view(-1)
            for p, name in self.names.items()
            if not is_exempt(name)
        }
        self._arriving: list[Callable[[], None]] = []  #: each waits for a message and puts its means into gradients

    def hook(self, bucket: dist.GradBucket) -> Future[Tensor]:
        if self.step < self.config.warmup_steps:
            return super().hook(bucket)
        parameters, gradients = bucket.parameters(), bucket.gradients()
        self.check_finite(parameters, gradients)
        flat = {p: gradient.reshape(-1) for p, gradient in zip(parameters, gradients, strict=True)}
        if chosen_from := [p for p in flat if p in self.unsent]:
            for p in chosen_from:
                self.unsent[p].add_(flat[p])
            self._send_chosen(chosen_from)
        if whole := {p: gradient for p, gradient in flat.items() if p not in self.unsent}:
            self._send_whole(whole)
        return self.finished(bucket.buffer())  # still this rank's gradients; after_backward replaces them

    def after_backward(self) -> None:
        for arrive in self._arriving:
            arrive()
        self._arriving = []
        super().after_backward()

    def _send_whole(self, gradients: dict[nn.Parameter, Tensor]) -> None:
        parameters, mean = list(gradients), self.share(torch.cat(list(gradients.values())))
        work = dist.all_reduce(mean, async_op=True)

        def arrive() -> None:
            work.wait()
            _fill_gradients(parameters, mean)

        self._arriving.append(arrive)

    def _send_chosen(self, parameters: list[nn.Parameter]) -> None:
        """All-gather values and indices of the largest entries, and take them out of `unsent`."""
        unsent = [self.unsent[p] for p in parameters]
        indices = [u.abs().topk(kept_entries(self.config.density, len(u)), sorted=False).indices for u in unsent]
        starts = itertools.accumulate(map(len, unsent), initial=0)
        values = self.to_wire(torch.cat([u[i] for u, i in zip(unsent, indices, strict=True)]))
        places = torch.cat([i + start for i, start in zip(indices, starts, strict=False)]).to(torch.int32)
        for u, i, out in zip(unsent, indices, values.split(list(map(len, indices))), strict=True):
            u[i] -= out.to(u.dtype)  # keeps the rounding error
        sent = [values, places]  # which must live until the works are done
        everyone = [mine.new_empty(self.world.size * len(mine)) for mine in sent]
        works = [_all_gather(out, mine, async_op=True) for out, mine in zip(everyone, sent, strict=True)]

        def arrive() -> None:
            for work in works:
                work.wait()
            sent.clear()
            total = parameters[0].grad.new_zeros(sum(map(len, unsent)))
            # Rank by rank, so that all ranks add in the same order and stay identical.
            for value, at in zip(*(part.chunk(self.world.size) for part in everyone), strict=True):
                total.index_add_(0, at, value.to(total.dtype))
            _fill_gradients(parameters, total / self.world.size)

        self._arriving.append(arrive)

    def tensors(self) -> dict[str, list[Tensor]]:
        return {"compression": list(self.unsent.values())}

    def state(self) -> dict:
        rank = self.world.rank
        return {**super().state(), "unsent": {f"rank{rank}.{self.names[p]}": u for p, u in self.unsent.items()}}

    def load(self, state: dict) -> None:
        super().load(state)
        for p, unsent in self.unsent.items():
            unsent.copy_(state["unsent"][f"rank{self.world.rank}.{self.names[p]}"])


def _fill_gradients(parameters: list[nn.Parameter], flat: Tensor) -> None:
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad.copy_(part.view_as(parameter))
