"""Random-k and top-k with error feedback, for comparison with Radius.

    aiscale train --recipe laptop --nproc 4 --set parallel.strategy=ddp --set compression.method=top-k

Both send k = max(floor(density x numel), 1) entries of every tensor and keep the rest for later (Stich et al. 2018,
"Sparsified SGD with memory"; Lin et al. 2018). Biases are always sent whole.

    random-k   all ranks draw the same indices from a generator seeded by parameter and step, so they all-reduce only
               values and never send indices
    top-k      each rank sends its own largest entries, so indices (int32) and values are all-gathered, n k of each, and
               every rank adds them up

The messages start in the backward pass, bucket by bucket; top-k fills in the means after it.

Shapes: N entries of a tensor, K entries of a message that are sent, n ranks.
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
from aiscale.parallel.compress.base import Bucket, Compressor

#: torch 2.13 gave all_gather_into_tensor this name
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class Unsent:
    """The gradients of one parameter that this rank has not sent yet, for error feedback.

    sum: they add up. mean: an entry is sent as the mean of its gradients since it was last sent. none: they are lost.
    """

    def __init__(self, policy: str, like: Tensor) -> None:
        size = like.numel()
        keeps = policy != "none"
        self.residual = torch.zeros(size, dtype=like.dtype, device=like.device) if keeps else None
        self.age = torch.zeros(size, dtype=torch.int32, device=like.device) if policy == "mean" else None

    def offer(self, gradient: Tensor) -> Tensor:
        """This step's gradient (N,) -> gradient with the unsent ones (N,), to choose from."""
        if self.residual is None:
            return gradient
        self.residual.add_(gradient)
        if self.age is None:
            return self.residual
        self.age.add_(1)
        return self.residual / self.age

    def sent(self, indices: Tensor, values: Tensor) -> None:
        """Entries `indices` were sent as `values`; a sum keeps their rounding error."""
        if self.age is not None:
            self.residual[indices] = 0
            self.age[indices] = 0
        elif self.residual is not None:
            self.residual[indices] -= values.to(self.residual.dtype)

    def tensors(self) -> list[Tensor]:
        return [tensor for tensor in (self.residual, self.age) if tensor is not None]


class Sparse(Compressor):
    """The base of random-k and top-k: unsent gradients by parameter."""

    def __init__(self, run: Run, world: World, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(run, world, model, optimizer)
        #: not for exempt parameters, which are sent whole
        self.unsent = {p: Unsent(self.config.residual, p) for p, name in self.names.items() if not is_exempt(name)}

    @property
    def sparse(self) -> bool:
        return self.step >= self.config.warmup_steps

    def k(self, parameter: nn.Parameter) -> int:
        return kept_entries(self.config.density, parameter.numel()) if parameter in self.unsent else parameter.numel()

    def tensors(self) -> dict[str, list[Tensor]]:
        return {"compression": [tensor for unsent in self.unsent.values() for tensor in unsent.tensors()]}

    def state(self) -> dict:
        kept = {
            f"rank{self.world.rank}.{self.names[parameter]}.{i}": tensor
            for parameter, unsent in self.unsent.items()
            for i, tensor in enumerate(unsent.tensors())
        }
        return {**super().state(), "unsent": kept}

    def load(self, state: dict) -> None:
        super().load(state)
        for name, tensor in self.state()["unsent"].items():
            tensor.copy_(state["unsent"][name])


class RandomK(Sparse):
    """New random entries in every step, the same on all ranks."""

    def __init__(self, run: Run, world: World, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(run, world, model, optimizer)
        self._numbers = {parameter: number for number, parameter in enumerate(model.parameters())}
        self._drawn: dict[nn.Parameter, Tensor] = {}  #: indices in flight

    def indices(self, parameter: nn.Parameter) -> Tensor:
        """The indices of this step, (k,): they depend on seed, step and parameter, but not on the rank."""
        seed = (self.run.loop.seed * 1_000_003 + self.step) * 100_003 + self._numbers[parameter]
        generator = torch.Generator(self.world.device).manual_seed(seed)
        drawn = torch.randperm(parameter.numel(), generator=generator, device=self.world.device)
        return drawn[: self.k(parameter)]

    def pack(self, bucket: Bucket) -> Tensor:
        if not self.sparse:
            return bucket.buffer
        pairs = zip(bucket.parameters, bucket.gradients, strict=True)
        return torch.cat([self._choose(parameter, gradient.reshape(-1)) for parameter, gradient in pairs])

    def _choose(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        if parameter not in self.unsent:
            return gradient
        unsent, indices = self.unsent[parameter], self.indices(parameter)
        values = unsent.offer(gradient)[indices]
        unsent.sent(indices, self.arriving(values))
        self._drawn[parameter] = indices
        return values

    def unpack(self, bucket: Bucket, mean: Tensor) -> None:
        if not self.sparse:
            return super().unpack(bucket, mean)
        parts = mean.split([self.k(parameter) for parameter in bucket.parameters])
        places = bucket.buffer.split([parameter.numel() for parameter in bucket.parameters])
        for parameter, place, part in zip(bucket.parameters, places, parts, strict=True):
            if parameter in self.unsent:
                place.zero_()[self._drawn.pop(parameter)] = part.to(place.dtype)
            else:
                place.copy_(part)


class TopK(Sparse):
    def __init__(self, run: Run, world: World, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(run, world, model, optimizer)
        self._arriving: list[Callable[[], None]] = []  #: each waits for a message and puts its means into gradients

    def hook(self, bucket: dist.GradBucket) -> Future[Tensor]:
        if not self.sparse:
            return super().hook(bucket)
        parameters, gradients = bucket.parameters(), bucket.gradients()
        self.check_finite(parameters, gradients)
        flat = {p: gradient.reshape(-1) for p, gradient in zip(parameters, gradients, strict=True)}
        if offered := {p: self.unsent[p].offer(gradient) for p, gradient in flat.items() if p in self.unsent}:
            self._send_chosen(offered)
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

    def _send_chosen(self, offered: dict[nn.Parameter, Tensor]) -> None:
        """Choose entries, update `unsent`, and all-gather values and indices."""
        parameters = list(offered)
        chosen = [values.abs().topk(self.k(p), sorted=False).indices for p, values in offered.items()]
        starts = itertools.accumulate(map(len, offered.values()), initial=0)
        values = self.to_wire(torch.cat([v[i] for v, i in zip(offered.values(), chosen, strict=True)]))
        places = torch.cat([i + start for i, start in zip(chosen, starts, strict=False)]).to(torch.int32)
        for parameter, i, out in zip(parameters, chosen, values.split(list(map(len, chosen))), strict=True):
            self.unsent[parameter].sent(i, out)
        sent = [values, places]  # which must live until the works are done
        everyone = [mine.new_empty(self.world.size * len(mine)) for mine in sent]
        works = [_all_gather(out, mine, async_op=True) for out, mine in zip(everyone, sent, strict=True)]

        def arrive() -> None:
            for work in works:
                work.wait()
            sent.clear()
            total = parameters[0].grad.new_zeros(sum(p.numel() for p in parameters))
            # Rank by rank, so that all ranks add in the same order and stay identical.
            for value, at in zip(*(part.chunk(self.world.size) for part in everyone), strict=True):
                total.index_add_(0, at, value.to(total.dtype))
            _fill_gradients(parameters, total / self.world.size)

        self._arriving.append(arrive)


def _fill_gradients(parameters: list[nn.Parameter], flat: Tensor) -> None:
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad.copy_(part.view_as(parameter))
