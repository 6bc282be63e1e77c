"""Data parallelism with torch's DistributedDataParallel: buckets are all-reduced while the backward pass goes on.

    aiscale train --recipe laptop --nproc 4 --set parallel.strategy=ddp --set parallel.distributed_optimizer=true

`aiscale.parallel.compress` decides what DDP's hooks send. `distributed_optimizer` is ZeRO-1 with torch's
ZeroRedundancyOptimizer: one rank, the owner, holds the optimizer states of a parameter, updates it and broadcasts it.
Checkpoints have the usual format, so a run can resume at another world size or with another strategy.
"""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext

from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from aiscale.checkpoint import CheckpointError
from aiscale.config import Run
from aiscale.distributed import World
from aiscale.parallel.compress import build_compressor
from aiscale.parallel.serial import Engine


class DDPEngine(Engine):
    """The whole model on every rank, gradients averaged by DDP."""

    def __init__(self, run: Run, world: World) -> None:
        super().__init__(run, world)
        self.compressor = build_compressor(run, world, self.model, self.optimizer)
        with world.control():  # DDP broadcasts rank 0's parameters when it is built
            self.module = DistributedDataParallel(
                self.model,
                bucket_cap_mb=self.compressor.bucket_mb,
                gradient_as_bucket_view=True,  # saves a copy of the gradients
            )
        self.compressor.register(self.module)

    def _build_optimizer(self) -> Optimizer:
        optimizer = super()._build_optimizer()
        return _divided(optimizer) if self.run.parallel.distributed_optimizer else optimizer

    def _optimizer_state(self) -> dict:
        """With sharded states: those of this rank's own parameters, under the names torch gives the full state."""
        if not self.run.parallel.distributed_optimizer:
            return super()._optimizer_state()
        part = get_optimizer_state_dict(self.model, self.optimizer.optim)
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        for group, whole in zip(part["param_groups"], self.optimizer.param_groups, strict=True):
            group["params"] = [names[parameter] for parameter in whole["params"]]
        return part

    def _load_optimizer(self, state: dict) -> None:
        if not self.run.parallel.distributed_optimizer:
            return super()._load_optimizer(state)
        for name, values in self._optimizer_state()["state"].items():
            for key, value in values.items():
                if isinstance(value, Tensor):
                    value.copy_(state["state"][name][key])

    def _loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.module(tokens, targets)

    def _accumulating(self, is_last: bool):
        return nullcontext() if is_last else self.module.no_sync()

    def _average_gradients(self) -> None:
        self.compressor.after_backward()

    def _after_update(self) -> None:
        self.compressor.after_update()

    def tensors(self) -> dict[str, list[Tensor]]:
        return super().tensors() | {what: tensors for what, tensors in self.compressor.tensors().items() if tensors}

    def state(self, full: bool = False) -> dict:
        state = super().state(full)
        if full:
            return state
        compression = self.compressor.state()  # raises after an interrupted step
        return {**state, "compression": compression} if self._compresses else state

    def note(self) -> dict:
        return {"compression": dataclasses.asdict(self.run.compression)} if self._compresses else {}

    def loadable(self, note: dict) -> dict:
        """From a checkpoint written without this compression method, only weights and moments are loaded and the
        method starts afresh, as in the published runs of Radius. One written with it must have the same options and
        world size."""
        state = self.state()
        if not self._compresses or "compression" not in note:
            state.pop("compression", None)
            return state
        before, now = note["compression"], self.note()["compression"]
        if changed := [key for key in now if before[key] != now[key] and key not in ("wire", "overlap")]:
            was = ", ".join(f"compression.{key}={before[key]}" for key in changed)
            raise CheckpointError(
                f"the checkpoint was written with {was}, not {', '.join(str(now[key]) for key in changed)}: set that "
                "again; to drop unsent gradients and choose anew, go on for a step with compression.method=none first"
            )
        if note["world_size"] != self.world.size:
            raise CheckpointError(
                f"the checkpoint holds the unsent gradients of {note['world_size']} ranks, but there are "
                f"{self.world.size}: start {note['world_size']}, or drop them with compression.method=none"
            )
        return state

    def load(self, state: dict) -> None:
        super().load(state)
        if "compression" in state:
            self.compressor.load(state["compression"])

    def close(self) -> None:
        del self.module  # it holds the process group

    @property
    def _compresses(self) -> bool:
        """Whether a checkpoint holds unsent gradients."""
        return self.run.compression.method != "none" and self.compressor.keeps_state


def _divided(optimizer: Optimizer) -> Optimizer:
    """The same optimizer, which has not stepped yet, with its states sharded over all ranks."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # here, because the import prints a torch warning

    # Every group has its own options already; fused is passed again because the optimizer checks it there.
    fused = {"fused": optimizer.defaults["fused"]} if "fused" in optimizer.defaults else {}
    divided = ZeroRedundancyOptimizer(optimizer.param_groups, type(optimizer), **fused)
    divided.state = divided.optim.state  # of this rank's own parameters
    return divided
