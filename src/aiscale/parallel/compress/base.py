"""The plain DDP communication hook (method none), and the base class of all compression methods.

DDP calls the hook for each bucket as soon as the backward pass has filled it; the hook sends the bucket and replaces it
by the mean over ranks. With `compression.overlap=false` one all-reduce after the backward pass sends all buckets, as in
published Radius. A method overrides `pack` and `unpack`, or the whole `hook`.

Shapes: N entries of a bucket, K of them sent.
"""

# No `from __future__ import annotations` here: DDP checks its hook's annotations, which must be types, not strings.
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

#: method -> "module:class", imported on demand
METHODS = {
    "none": "aiscale.parallel.compress.base:Compressor",
    "radius": "aiscale.parallel.radius:Radius",
    "top-k": "aiscale.parallel.compress.topk:TopK",
    "powersgd": "aiscale.parallel.compress.powersgd:PowerSGD",
}


class GradientError(RuntimeError):
    """Gradients that must not be averaged or kept; the message is one line."""


@dataclass
class Bucket:
    """The parts of DDP's bucket that are needed after the hook returns."""

    buffer: Tensor  #: (N,) the concatenated gradients of `parameters`
    parameters: list[nn.Parameter]
    gradients: list[Tensor]  #: views of the buffer, in the parameters' shapes

    def fill_gradients(self) -> None:
        """Copy the buffer into the parameters' gradients, unless they are views of it."""
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            if parameter.grad.data_ptr() != gradient.data_ptr():
                parameter.grad.copy_(gradient)


class Compressor:
    """Method none: sends dense gradients, in their own precision or bf16, during the backward pass or after it."""

    keeps_state = True  #: a checkpoint has the unsent gradients of every rank

    def __init__(self, run: Run, world: World, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.run, self.world, self.model, self.optimizer = run, world, model, optimizer
        self.config = run.compression
        #: DDP rebuilds its buckets after the first step, so state belongs to parameters, never to buckets.
        self.names = {p: name for name, p in model.named_parameters() if p.requires_grad}
        self.step = 0  #: optimizer steps taken with this method
        self._waiting: list[tuple[Bucket, Tensor]] = []  #: with overlap=false: (bucket, packed)
        self._norms: list[tuple[list[nn.Parameter], Tensor]] = []  #: of this rank's gradients in this step
        self._fault = ""  #: this rank's error in this step
        self._broken = ""  #: the error that aborted a step

    # Overridden by methods -----------------------------------------------------------------------------------------

    @property
    def bucket_mb(self) -> float:
        """Size of DDP's buckets, MiB."""
        return self.run.parallel.bucket_mb

    def pack(self, bucket: Bucket) -> Tensor:
        """What this rank sends of a bucket, (K,); the caller may overwrite it."""
        return bucket.buffer

    def unpack(self, bucket: Bucket, mean: Tensor) -> None:
        """Fill the bucket from `mean` (K,), the mean over ranks of pack()'s result, in the wire's precision."""
        bucket.buffer.copy_(mean)

    def after_update(self) -> None:
        self.step += 1

    def tensors(self) -> dict[str, list[Tensor]]:
        return {"compression": []}

    def state(self) -> dict:
        """What a checkpoint saves. Keys of what differs between ranks contain the rank: `rank0.NAME`."""
        if self._broken:
            raise GradientError(f"nothing is saved after a step that was interrupted: {self._broken}")
        return {"step": self.step}

    def load(self, state: dict) -> None:
        """Load a `state()` of the same rank and world size."""
        self.step = state["step"]

    # Shared by all -------------------------------------------------------------------------------------------------

    def register(self, module: DistributedDataParallel) -> None:
        """Register the hook with DDP, unless DDP without a hook does the same."""
        if not self.config.is_default:
            module.register_comm_hook(self, type(self).hook)

    def hook(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Send a full bucket; the future holds its buffer with the means."""
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
        """Before clipping: send waiting buckets, and raise GradientError on all ranks if one of them had an error."""
        if self._broken:
            raise GradientError(f"no step can follow one that was interrupted: {self._broken}")
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
        """This rank's share of the mean, in the wire's precision; overwrites `packed`. Dividing first keeps the sum
        inside bf16's range; multiplying by 1 / n is what DDP does."""
        return self.to_wire(packed.mul_(1 / self.world.size))

    def arriving(self, packed: Tensor) -> Tensor:
        """`packed` as it arrives, in its own precision: rounded when it is sent as this rank's share of the mean."""
        if self.config.wire != "bf16":
            return packed
        return self.share(packed.clone()).to(packed.dtype).mul_(self.world.size)

    def to_wire(self, tensor: Tensor) -> Tensor:
        return tensor.to(torch.bfloat16) if self.config.wire == "bf16" else tensor

    def finished(self, buffer: Tensor) -> Future[Tensor]:
        done = Future(devices=[buffer.device] if buffer.is_cuda else [])
        done.set_result(buffer)
        return done

    def check_finite(self, parameters: list[nn.Parameter], gradients: list[Tensor]) -> None:
        """Record the norm of this rank's gradients before a mean or a residual includes them; after_backward checks
        once whether they are finite. Method none has no residual that a NaN could stay in."""
        if self.config.method != "none":
            self._norms.append((parameters, torch.stack(torch._foreach_norm(gradients))))

    def _raise_faults(self) -> None:
        norms, self._norms = self._norms, []
        if self.config.method == "none":
            return
        if norms and not math.isfinite(torch.stack([norm.sum() for _, norm in norms]).sum().item()):
            flat = [(p, value) for ps, norm in norms for p, value in zip(ps, norm.tolist(), strict=True)]
            # The norm of large finite numbers may overflow.
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
        """All steps of the optimizer, including those before this method was used."""
        steps = [state["step"] for state in self.optimizer.state.values() if "step" in state]
        return int(steps[0]) if steps else self.step


def build_compressor(run: Run, world: World, model: nn.Module, optimizer: torch.optim.Optimizer) -> Compressor:
    """The compressor for `run.compression`; raises ConfigError if it does not fit the run."""
    return pkgutil.resolve_name(METHODS[run.compression.method])(run, world, model, optimizer)
