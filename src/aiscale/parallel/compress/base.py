"""The communication hook of DDP in its plainest form, method none, and what every other method is made of.

    aiscale train --recipe laptop --nproc 4 --set parallel.strategy=ddp --set compression.wire=bf16

DDP hands over each bucket of gradients as soon as the backward pass has filled it; the hook sends it and puts the mean
over ranks in its place when that arrives. With `compression.overlap=false` every bucket waits for the end of the
backward pass and one all-reduce carries them all, as Radius was published. A method changes what of a bucket is sent
(`pack`) and what is made of the mean (`unpack`), or the whole `hook`.

Shapes: N entries of a bucket, K of them that are sent.
"""

# No `from __future__ import annotations` here: DDP reads the annotations of its hook and wants the types themselves.
import math
import pkgutil
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from aiscale.config import Run
from aiscale.distributed import World, alike

#: method -> "module:class", imported when it is asked for
METHODS = {
    "none": "aiscale.parallel.compress.base:Compressor",
    "radius": "aiscale.parallel.radius:Radius",
    "top-k": "aiscale.parallel.compress.topk:TopK",
    "random-k": "aiscale.parallel.compress.topk:RandomK",
    "powersgd": "aiscale.parallel.compress.powersgd:PowerSGD",
}


class GradientError(RuntimeError):
    """Gradients that must not be averaged or kept; the message is one line."""


@dataclass
class Bucket:
    """What of DDP's bucket outlives the hook."""

    buffer: Tensor  #: (N,) the gradients of `parameters`, end to end
    parameters: list[nn.Parameter]
    gradients: list[Tensor]  #: views of the buffer, in the parameters' shapes

    def fill_gradients(self) -> None:
        """Give the parameters what the buffer holds, where their gradients are no views of it."""
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            if parameter.grad.data_ptr() != gradient.data_ptr():
                parameter.grad.copy_(gradient)


class Compressor:
    """Method none: whole gradients, in their own precision or bf16, during the backward pass or after it."""

    def __init__(self, run: Run, world: World, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.run, self.world, self.model, self.optimizer = run, world, model, optimizer
        self.config = run.compression
        #: DDP refills its buckets after the first step, so that state belongs to parameters, never to buckets.
        self.names = {p: name for name, p in model.named_parameters() if p.requires_grad}
        self.step = 0  #: optimizer steps taken with this method
        self._waiting: list[tuple[Bucket, Tensor]] = []  #: with overlap=false: (bucket, what is sent of it)
        self._norms: list[tuple[list[nn.Parameter], Tensor]] = []  #: of this rank's gradients in this step
        self._fault = ""  #: what this rank found wrong in this step
        self._broken = ""  #: by which error a step was broken off

    # What a method changes -----------------------------------------------------------------------------------------

    @property
    def bucket_mb(self) -> float:
        """Size of DDP's buckets, MiB."""
        return self.run.parallel.bucket_mb

    def pack(self, bucket: Bucket) -> Tensor:
        """What this rank sends of a bucket, (K,); it may be overwritten."""
        return bucket.buffer

    def unpack(self, bucket: Bucket, mean: Tensor) -> None:
        """Fill the bucket with what arrived: the mean over ranks of what pack() gave, (K,), in the wire's precision."""
        bucket.buffer.copy_(mean)

    def take_step(self) -> bool:
        """Take the optimizer's step, with clipped gradients; False, where the optimizer itself is to take it."""
        return False

    def after_update(self) -> None:
        """After the optimizer's step: count it."""
        self.step += 1

    def held(self) -> dict[str, list[Tensor]]:
        """The tensors that live between steps."""
        return {"compression": []}

    def state(self) -> dict:
        """What a checkpoint keeps. What differs between ranks has the rank in its key: `rank0.NAME`."""
        if self._broken:
            raise GradientError(f"nothing is saved after a step that was broken off: {self._broken}")
        return {"step": self.step}

    def load(self, state: dict) -> None:
        """Take over a state that `state` gave on the same rank of as many."""
        self.step = state["step"]

    # What all share ------------------------------------------------------------------------------------------------

    def register(self, module: DistributedDataParallel) -> None:
        """Put the hook into DDP, unless DDP's own path does the same."""
        if not self.config.is_default:
            module.register_comm_hook(self, _hook)

    def hook(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Send a full bucket; the future holds its buffer, with means in place of gradients."""
        full = Bucket(bucket.buffer(), bucket.parameters(), bucket.gradients())
        self.check_finite(full.parameters, full.gradients)
        packed = self.pack(full)
        if not self.config.overlap:
            self._waiting.append((full, packed))
            return self.finished(full.buffer)

        def arrive(done: Future) -> Tensor:
            self.unpack(full, done.value()[0])
            return full.buffer

        return dist.all_reduce(self.share(packed), async_op=True).get_future().then(arrive)

    def after_backward(self) -> None:
        """Before clipping: send what waited, and raise GradientError on all ranks if one found a fault in this step."""
        if self._broken:
            raise GradientError(f"no step can follow one that was broken off: {self._broken}")
        if self._waiting:
            sizes = [len(packed) for _, packed in self._waiting]
            mean = self.share(torch.cat([packed for _, packed in self._waiting]))
            dist.all_reduce(mean)
            for (bucket, _), part in zip(self._waiting, mean.split(sizes), strict=True):
                self.unpack(bucket, part)
                bucket.fill_gradients()
            self._waiting = []
        self._raise_faults()

    def share(self, packed: Tensor) -> Tensor:
        """This rank's share of the mean, in the wire's precision; overwrites `packed`.

        Dividing before the sum keeps it inside bf16's range. DDP multiplies by 1 / n, which for 3 ranks differs from a
        division in the last bit, so this does too.
        """
        return self.to_wire(packed.mul_(1 / self.world.size))

    def arriving(self, packed: Tensor) -> Tensor:
        """`packed` as the others get it, in its own precision: it travels as this rank's share of the mean."""
        if self.config.wire != "bf16":
            return packed
        return self.share(packed.clone()).to(packed.dtype).mul_(self.world.size)

    def to_wire(self, tensor: Tensor) -> Tensor:
        """`tensor` in the precision in which it is sent."""
        return tensor.to(torch.bfloat16) if self.config.wire == "bf16" else tensor

    def finished(self, buffer: Tensor) -> Future[Tensor]:
        """The future of a hook that has nothing left to wait for."""
        done = Future(devices=[buffer.device] if buffer.is_cuda else [])
        done.set_result(buffer)
        return done

    def check_finite(self, parameters: list[nn.Parameter], gradients: list[Tensor]) -> None:
        """Note how large this rank's own gradients are, before a mean or a residual takes them up.

        Whether they are finite is asked once, by after_backward: on a GPU the answer would make the backward pass wait.
        Method none has no memory that a NaN could stay in; there the engine's own look at the mean is enough.
        """
        if self.config.method != "none":
            self._norms.append((parameters, torch.stack(torch._foreach_norm(gradients))))

    def _raise_faults(self) -> None:
        norms, self._norms = self._norms, []
        if self.config.method == "none":
            return
        if norms and not math.isfinite(torch.stack([norm.sum() for _, norm in norms]).sum().item()):
            flat = [(p, value) for ps, norm in norms for p, value in zip(ps, norm.tolist(), strict=True)]
            # Of large numbers the sum may overflow where each is finite.
            if name := next((self.names[p] for p, value in flat if not math.isfinite(value)), ""):
                self._fault = (
                    f"the gradient of {name} on rank {self.world.rank} is not finite at step "
                    f"{self._optimizer_steps() + 1}; compression.method {self.config.method} would keep it: lower "
                    f"optimizer.lr (now {self.run.optimizer.lr}) or lengthen optimizer.warmup_steps, and resume from "
                    "the last checkpoint, which is untouched"
                )
        if self.world.any(bool(self._fault)):
            self._broken = next(fault for fault in self.world.gather(self._fault) if fault)
            raise alike(GradientError(self._broken))

    def _optimizer_steps(self) -> int:
        """Steps that the optimizer has taken, also before this method came into use."""
        taken = [state["step"] for state in self.optimizer.state.values() if "step" in state]
        return int(taken[0]) if taken else self.step


def _hook(compressor: Compressor, bucket: dist.GradBucket) -> Future[Tensor]:
    return compressor.hook(bucket)


def build_compressor(run: Run, world: World, model: nn.Module, optimizer: torch.optim.Optimizer) -> Compressor:
    """The compressor that `run.compression` asks for; raises ConfigError where it does not fit."""
    return pkgutil.resolve_name(METHODS[run.compression.method])(run, world, model, optimizer)
