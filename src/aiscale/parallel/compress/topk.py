"""Random-k and ordinary top-k with error feedback: what Radius is compared with.

    aiscale train --recipe laptop --nproc 4 --set parallel.strategy=ddp --set compression.method=top-k

Both send k = max(floor(density x numel), 1) entries of every tensor (top-k: or of all tensors together) and keep what
they did not send for later (Stich et al. 2018, "Sparsified SGD with memory"; Lin et al. 2018). Biases go whole.

    random-k   all ranks draw the same places from a generator that parameter and step seed, so the values alone travel,
               in one all-reduce, and no index is ever sent
    top-k      each rank sends its own largest entries; nobody else knows which, so indices (int32) and values are
               gathered, n k of each, and every rank adds them up

The messages start in the backward pass, bucket by bucket; what comes back is put in place after it. With
`compression.overlap=false`, and where entries are chosen among all tensors, there is one message, after it.

Shapes: N entries of a tensor, K entries of a message that are sent, n ranks.
"""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from aiscale.config import ConfigError, Run
from aiscale.distributed import World
from aiscale.parallel.compress.base import Compressor, is_exempt, kept_entries

_LARGEST_INDEX = 2**31 - 1
#: torch 2.13 gave all_gather_into_tensor this name
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class Unsent:
    """What of one parameter's gradients this rank has not sent yet: the error that is fed back.

    sum: unsent gradients add up. mean: an entry is sent as the mean of its gradients since it was sent last. none: what
    is not sent is lost.
    """

    def __init__(self, policy: str, like: Tensor) -> None:
        size = like.numel()
        keeps = policy != "none"
        self.residual = torch.zeros(size, dtype=like.dtype, device=like.device) if keeps else None
        self.age = torch.zeros(size, dtype=torch.int32, device=like.device) if policy == "mean" else None

    def offer(self, gradient: Tensor) -> Tensor:
        """This step's gradient (N,) -> the entries to choose from (N,): with what was kept back."""
        if self.residual is None:
            return gradient
        self.residual.add_(gradient)
        if self.age is None:
            return self.residual
        self.age.add_(1)
        return self.residual / self.age

    def sent(self, indices: Tensor, values: Tensor) -> None:
        """Entries `indices` went out as `values`. What the wire's precision rounded away of a sum stays here."""
        if self.age is not None:
            self.residual[indices] = 0
            self.age[indices] = 0
        elif self.residual is not None:
            self.residual[indices] -= values.to(self.residual.dtype)

    def tensors(self) -> list[Tensor]:
        return [tensor for tensor in (self.residual, self.age) if tensor is not None]


@dataclass
class Entry:
    """One parameter: what is chosen of it, and what waits."""

    name: str
    place: int  #: among the model's parameters
    parameter: nn.Parameter
    k: int  #: entries sent of it in a sparse step, where they are chosen tensor by tensor
    unsent: Unsent | None  #: None: exempt, sent whole


@dataclass
class Message:
    """What was sent for some parameters; `fill` puts what came back into their gradients."""

    entries: list[Entry]
    exempt: list[Entry]
    works: list[dist.Work] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)  #: what the works write into
    indices: list[Tensor] = field(default_factory=list)  #: random-k: of each entry, in its own tensor


class Sparse(Compressor):
    """What random-k and top-k have in common."""

    def __init__(self, run: Run, world: World, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(run, world, model, optimizer)
        self.at_once = not self.config.overlap or self.config.scope == "global"
        self.entries: dict[nn.Parameter, Entry] = {}
        for place, (name, parameter) in enumerate(model.named_parameters()):
            if parameter.requires_grad:
                k = kept_entries(self.config.density, parameter.numel())
                unsent = None if is_exempt(name) else Unsent(self.config.residual, parameter)
                self.entries[parameter] = Entry(name, place, parameter, k, unsent)
        self.sent: list[Message] = []

    def hook(self, bucket: dist.GradBucket) -> Future[Tensor]:
        if not self.sparse:
            return super().hook(bucket)
        if not self.at_once:
            entries = [self.entries[parameter] for parameter in bucket.parameters()]
            self.sent.append(self._send(entries, [gradient.reshape(-1) for gradient in bucket.gradients()]))
        return self.finished(bucket.buffer())  # after_backward replaces these gradients, which are still this rank's

    def after_backward(self) -> None:
        if self.sparse and self.at_once:
            entries = list(self.entries.values())
            self.sent.append(self._send(entries, [entry.parameter.grad.reshape(-1) for entry in entries]))
        for message in self.sent:
            for work in message.works:
                work.wait()
            self._fill(message)
        self.sent = []
        super().after_backward()

    @property
    def sparse(self) -> bool:
        """Whether this step sends a part only."""
        return self.step >= self.config.warmup_steps

    def _send(self, entries: list[Entry], gradients: list[Tensor]) -> Message:
        self.check_finite([entry.parameter for entry in entries], gradients)
        pairs = list(zip(entries, gradients, strict=True))
        message = Message([e for e, _ in pairs if e.unsent], [e for e, _ in pairs if not e.unsent])
        offered = [entry.unsent.offer(gradient) for entry, gradient in pairs if entry.unsent]
        whole = [gradient for entry, gradient in pairs if not entry.unsent]
        self._launch(message, offered, whole)
        return message

    def _launch(self, message: Message, offered: list[Tensor], whole: list[Tensor]) -> None:
        """Choose among `offered` (each of one entry), tell `unsent` what goes out, and send it and `whole`."""
        raise NotImplementedError

    def _fill(self, message: Message) -> None:
        """Put the means over ranks into the gradients."""
        raise NotImplementedError

    def held(self) -> dict[str, list[Tensor]]:
        unsent = (entry.unsent.tensors() for entry in self.entries.values() if entry.unsent)
        return {"compression": list(itertools.chain.from_iterable(unsent))}

    def state(self) -> dict:
        kept = {
            f"rank{self.world.rank}.{entry.name}.{i}": tensor
            for entry in self.entries.values()
            if entry.unsent
            for i, tensor in enumerate(entry.unsent.tensors())
        }
        return {**super().state(), "unsent": kept}

    def load(self, state: dict) -> None:
        super().load(state)
        for name, tensor in self.state()["unsent"].items():
            tensor.copy_(state["unsent"][name])


class RandomK(Sparse):
    """Every step other entries, the same on all ranks."""

    def __init__(self, run: Run, world: World, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(run, world, model, optimizer)
        self.generator = torch.Generator(world.device)

    def indices(self, entry: Entry) -> Tensor:
        """The k places of this step, (k,): a function of seed, step and parameter, and of no rank."""
        self.generator.manual_seed((self.run.loop.seed * 1_000_003 + self.step) * 100_003 + entry.place)
        return torch.randperm(entry.parameter.numel(), generator=self.generator, device=self.world.device)[: entry.k]

    def _launch(self, message: Message, offered: list[Tensor], whole: list[Tensor]) -> None:
        message.indices = [self.indices(entry) for entry in message.entries]
        chosen = [values[indices] for values, indices in zip(offered, message.indices, strict=True)]
        mean = message.buffers["mean"] = self.share(torch.cat(chosen + whole))
        if chosen and mean.dtype != chosen[0].dtype:  # what is kept back is measured against what goes out
            sizes = [len(values) for values in chosen]
            chosen = (mean[: sum(sizes)].to(chosen[0].dtype) * self.world.size).split(sizes)
        for entry, indices, values in zip(message.entries, message.indices, chosen, strict=True):
            entry.unsent.sent(indices, values)
        message.works.append(dist.all_reduce(mean, async_op=True))

    def _fill(self, message: Message) -> None:
        mean, at = message.buffers["mean"], 0
        for entry, indices in zip(message.entries, message.indices, strict=True):
            gradient = entry.parameter.grad
            flat = torch.zeros(gradient.numel(), dtype=gradient.dtype, device=gradient.device)
            flat[indices] = mean[at : at + len(indices)].to(gradient.dtype)
            gradient.copy_(flat.view_as(gradient))
            at += len(indices)
        _fill_whole(message.exempt, mean[at:])


class TopK(Sparse):
    """Every step each rank's own largest entries."""

    def __init__(self, run: Run, world: World, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(run, world, model, optimizer)
        sizes = [entry.parameter.numel() for entry in self.entries.values() if entry.unsent]
        if self.at_once and sum(sizes) > _LARGEST_INDEX:
            raise ConfigError(
                f"{sum(sizes):,} entries in one message have no 32-bit indices: set compression.overlap=true and "
                "compression.scope=tensor, so that each bucket is a message"
            )
        self.k_of_all = kept_entries(self.config.density, sum(sizes))

    def _launch(self, message: Message, offered: list[Tensor], whole: list[Tensor]) -> None:
        if message.entries:
            chosen = self._choose(message.entries, offered)
            starts = itertools.accumulate((len(values) for values in offered), initial=0)
            values = self.to_wire(torch.cat([v[i] for v, i in zip(offered, chosen, strict=True)]))
            places = torch.cat([i + start for i, start in zip(chosen, starts, strict=False)]).to(torch.int32)
            for entry, indices, out in zip(message.entries, chosen, values.split(list(map(len, chosen))), strict=True):
                entry.unsent.sent(indices, out)
            message.buffers["sent"], message.buffers["places"] = values, places
            for name, mine in (("values", values), ("indices", places)):
                everyone = mine.new_empty(self.world.size * len(mine))
                message.buffers[name] = everyone
                message.works.append(_all_gather(everyone, mine, async_op=True))
        if whole:
            mean = message.buffers["mean"] = self.share(torch.cat(whole))
            message.works.append(dist.all_reduce(mean, async_op=True))

    def _choose(self, entries: list[Entry], offered: list[Tensor]) -> list[Tensor]:
        """The largest entries of each tensor, or of all together: places in each tensor."""
        if self.config.scope == "tensor":
            return [_largest(values, entry.k) for entry, values in zip(entries, offered, strict=True)]
        places = _largest(torch.cat(offered), self.k_of_all).sort().values
        ends = torch.tensor(list(itertools.accumulate(map(len, offered))), device=places.device)
        counts = torch.diff(torch.searchsorted(places, ends), prepend=ends.new_zeros(1)).tolist()
        starts = [end - len(values) for end, values in zip(ends.tolist(), offered, strict=True)]
        return [part - start for part, start in zip(places.split(counts), starts, strict=True)]

    def _fill(self, message: Message) -> None:
        if message.entries:
            gradients = [entry.parameter.grad for entry in message.entries]
            sizes = [gradient.numel() for gradient in gradients]
            total = torch.zeros(sum(sizes), dtype=gradients[0].dtype, device=gradients[0].device)
            # Rank by rank, so that every rank adds in the same order: none may drift from the others.
            indices, values = (message.buffers[name].chunk(self.world.size) for name in ("indices", "values"))
            for at, value in zip(indices, values, strict=True):
                total.index_add_(0, at, value.to(total.dtype))
            for gradient, mean in zip(gradients, (total / self.world.size).split(sizes), strict=True):
                gradient.copy_(mean.view_as(gradient))
        if message.exempt:
            _fill_whole(message.exempt, message.buffers["mean"])


def _largest(values: Tensor, k: int) -> Tensor:
    return values.abs().topk(k, sorted=False).indices


def _fill_whole(entries: Iterable[Entry], mean: Tensor) -> None:
    at = 0
    for entry in entries:
        gradient = entry.parameter.grad
        size = math.prod(gradient.shape)
        gradient.copy_(mean[at : at + size].view_as(gradient))
        at += size
