"""Radius as a DDP communication hook: sparse gradients that need only an all-reduce.

    aiscale train --recipe laptop --nproc 4 --set parallel.strategy=ddp --set compression.method=radius

After `warmup_steps` dense steps (at least one), each parameter tensor has a mask that selects the fraction `density` of
its entries. A sparse step averages only those; the others are added to a residual on each rank. Every `interval`-th
step is dense: it sends all gradients plus the residual, and after the optimizer's step it chooses a new mask where
AdamW's update is largest. Biases are always sent. With bf16 on the wire, the rounding error of sent entries also goes
to the residual. Source: Radius's artifact appendix and its authors' public code.

Shapes: N entries of a bucket, K of them chosen.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from aiscale.config import Run
from aiscale.cost.compression import is_dense_step, is_exempt
from aiscale.distributed import World, alike
from aiscale.parallel.compress.base import Bucket, Compressor
from aiscale.parallel.radius.mask import (
    ByParameter,
    choose,
    digest,
    disagreeing,
    give_back,
    pack,
    positions,
    scores,
    unpack,
)


class MaskError(RuntimeError):
    """Ranks chose different entries, so their means would mix up parameters. The message is one line."""


class Radius(Compressor):
    """The hook with its masks and residuals."""

    def __init__(self, run: Run, world: World, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(run, world, model, optimizer)
        self.mask = ByParameter(self.names, True, torch.bool)  #: the same on all ranks
        self.residual = ByParameter(self.names, 0) if self.config.residual != "none" else None  #: this rank's own
        self._counts = {parameter: parameter.numel() for parameter in self.names}  #: entries sent
        self.gathered = 0  #: sparse steps since the last dense one

    def is_dense(self, step: int) -> bool:
        return is_dense_step(self.config, step)

    def entries(self, parameters: Iterable[nn.Parameter] | None = None) -> int:
        """How many entries of `parameters`, or of all, a sparse step sends now."""
        return sum(self._counts[p] for p in parameters or self.names)

    def pack(self, bucket: Bucket) -> Tensor:
        residual = self.residual.together(bucket.parameters) if self.residual else None
        if not self.is_dense(self.step):
            at = self._positions(bucket)
            return pack(bucket.buffer, at, residual, self.arriving if self.config.wire == "bf16" else None)
        if residual is not None and self.gathered:
            averaged = self.config.residual == "mean"
            give_back(bucket.buffer, residual, self._positions(bucket) if averaged else None, self.gathered + 1)
        return bucket.buffer

    def unpack(self, bucket: Bucket, mean: Tensor) -> None:
        if self.is_dense(self.step):
            super().unpack(bucket, mean)
        else:
            unpack(bucket.buffer, self._positions(bucket), mean)

    def after_update(self) -> None:
        """Count the step; after a dense step that a sparse one follows, choose a new mask."""
        was_dense = self.is_dense(self.step)
        if was_dense and self.gathered:  # masks were in use since the last dense step
            self._agree(
                "sent other gradient entries",
                "means of different entries were mixed up: resume all ranks from the last checkpoint, and look for "
                "what writes to a mask",
            )
        super().after_update()
        self.gathered = 0 if was_dense else self.gathered + 1
        if was_dense and not self.is_dense(self.step):
            self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Choose new masks, and check that all ranks chose the same."""
        masked = {name: p for p, name in self.names.items() if not is_exempt(name)}
        scored = {name: scores(self.optimizer, p) for name, p in masked.items()}
        for name, mask in choose(scored, density=self.config.density, reach=self.config.range).items():
            self.mask[masked[name]].copy_(mask)
        self._count()
        self._agree(
            "chose other gradient entries",
            "weights or moments are no longer the same: resume all ranks from the last checkpoint, and look for what "
            "changes a model or optimizer on some ranks only",
        )

    def tensors(self) -> dict[str, list[Tensor]]:
        residual = self.residual.tensors() if self.residual else []
        return {"compression": [*residual, *self.mask.tensors()]}

    def state(self) -> dict:
        state = {
            **super().state(),
            "gathered": self.gathered,
            "mask": {name: self.mask[p] for p, name in self.names.items()},
        }
        if self.residual:
            rank = self.world.rank
            state["residual"] = {f"rank{rank}.{name}": self.residual[p] for p, name in self.names.items()}
        return state

    def load(self, state: dict) -> None:
        super().load(state)
        self.gathered = state["gathered"]
        for p, name in self.names.items():
            self.mask[p].copy_(state["mask"][name])
            if self.residual:
                self.residual[p].copy_(state["residual"][f"rank{self.world.rank}.{name}"])
        self._count()
        self._agree("loaded a mask of other entries", "the checkpoint is damaged or not one: use the one before")

    def _agree(self, differently: str, remedy: str) -> None:
        """Raise MaskError if ranks hold different masks; after that, no checkpoint can be saved."""
        digests = self.world.gather(digest(self.mask[p] for p in self.names))
        if odd := disagreeing(digests):
            apart = "than each other" if len(odd) == self.world.size else "than the rest"
            self._broken = (
                f"after step {self._optimizer_steps()} rank {', '.join(map(str, odd))} of {self.world.size} "
                f"{differently} {apart}, so {remedy}"
            )
            raise alike(MaskError(self._broken))

    def _positions(self, bucket: Bucket) -> Tensor:
        mask, k = self.mask.together(bucket.parameters), self.entries(bucket.parameters)
        at = positions(mask, k)
        if len(at) == k:
            return at
        # The other ranks wait for k entries: send k, and let all ranks stop after the backward pass.
        self._fault = (
            f"after step {self._optimizer_steps()} the masks of {', '.join(self.names[p] for p in bucket.parameters)} "
            f"have {len(at)} entries set on rank {self.world.rank}, where {k} were chosen: resume from the last "
            "checkpoint, and look for what writes to a mask"
        )
        return torch.arange(k, device=mask.device)

    def _count(self) -> None:
        self._counts = {p: int(self.mask[p].sum()) for p in self.names}
