"""Fully sharded data parallelism with torch's FSDP2: each rank holds a shard of every tensor and gathers the rest.

    aiscale train --recipe laptop --nproc 4 --set parallel.strategy=fsdp --set parallel.replicas=2

Shapes: a tensor (d0, ...) is cut along dim 0 into ceil(d0 / n) rows a rank, the last ones fewer or none.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from aiscale.config import Run
from aiscale.distributed import World
from aiscale.parallel.serial import AUTOCAST, Engine, MicroBatch, move


class FSDPEngine(Engine):
    """A shard of every tensor on every rank."""

    def __init__(self, run: Run, world: World) -> None:
        super().__init__(run, world)
        self.autocast_dtype = None  # the policy casts parameters before the all-gather, which autocast cannot

    def _place(self, model: nn.Module) -> nn.Module:
        layout, size = self.run.parallel, self.world.size
        if layout.replicas > 1:  # shard within each copy, average gradients over copies too
            mesh = self.world.mesh(replicate=layout.replicas, shard=size // layout.replicas)
        else:
            mesh = self.world.mesh(shard=size)
        low = AUTOCAST.get(self.run.loop.precision)
        # Inputs are not cast: the residual stream is narrow already, and rotary angles must stay in fp32.
        policy = MixedPrecisionPolicy(
            param_dtype=low, reduce_dtype=torch.float32 if low else None, cast_forward_inputs=False
        )
        # T5's blocks also return the position bias, a view. The next block reads it, and nothing adds
        # to it in place, which torch warns of: the losses are those of one process.
        what = r"FSDP2-wrapped module \(FSDPT5Block\) returned a view tensor"
        warnings.filterwarnings("ignore", what, UserWarning)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=layout.reshard_after_forward)
        fully_shard(model, mesh=mesh, mp_policy=policy)  # embeddings, the last norm and the head
        # GPUs gather in a second stream; a CPU has no streams, so gloo's own thread has to do it.
        model._set_unshard_async_op(self.world.device.type == "cpu")
        return move(model, self.world.device)

    def _accumulating(self, is_last: bool):
        self.model.set_requires_gradient_sync(is_last)
        self.model.set_is_last_backward(is_last)
        return nullcontext()

    def evaluate(self, micro_batches: Iterable[MicroBatch]) -> tuple[float, int]:
        result = super().evaluate(micro_batches)
        for module in self.model.modules():  # no backward pass follows, so free what would stay gathered for it
            if isinstance(module, FSDPModule):
                module.reshard()
        return result

    def _clip(self) -> float:
        with self.world.control():  # one number, the norm
            return super()._clip()

    def _take_step(self) -> None:
        # The norms of LAMB and LARS are no traffic of the strategy; what Muon gathers is.
        with nullcontext() if self.run.optimizer.name == "muon" else self.world.control():
            super()._take_step()

    def tensors(self) -> dict[str, list[Tensor]]:
        items = super().tensors().items()
        return {kind: [t.to_local() if isinstance(t, DTensor) else t for t in tensors] for kind, tensors in items}

    def state(self, full: bool = False) -> dict:
        if full:
            return get_model_state_dict(
                self.model, options=StateDictOptions(full_state_dict=True, cpu_offload=self.world.size > 1)
            )
        return super().state()
