"""Training on one process: the engine that every other strategy must agree with, by overriding single methods.

Shapes: B sequences, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from aiscale.config import Run
from aiscale.distributed import World
from aiscale.model import GPT
from aiscale.model.build import build_outline
from aiscale.optim import build_optimizer, clip_, set_lr

MicroBatch = tuple[Tensor, Tensor]  # tokens (B, T), targets (B, T)

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class StepResult:
    """One optimizer step, the same on all ranks."""

    loss: float  #: mean cross-entropy over the tokens of the global batch, nats
    tokens: int  #: in the global batch
    grad_norm: float  #: global norm before clipping
    skipped: bool  #: the gradients were not finite, so nothing was updated


def prepare(run: Run, world: World) -> None:
    """Seed torch and set the precision of fp32 products on a GPU; call it before building a model."""
    torch.manual_seed(run.loop.seed)
    if world.device.type == "cuda":
        torch.set_float32_matmul_precision("high" if run.loop.precision == "tf32" else "highest")


def move(model: nn.Module, device: torch.device) -> nn.Module:
    """`model` on `device`; one on the meta device gets memory there, with no weights yet."""
    on_meta = any(parameter.device.type == "meta" for parameter in model.parameters())
    return model.to_empty(device=device) if on_meta else model.to(device)


def fill(part: nn.Module, whole: GPT) -> None:
    """Draw the weights of `whole`, and keep those of the parameters, or shards, that `part` has."""
    parameters = dict(part.named_parameters())

    @torch.no_grad()
    def take(name: str, weight: Tensor) -> None:
        parameter = parameters.get(name)
        if isinstance(parameter, DTensor):
            # Without a source every rank cuts its own shard, and nothing is sent.
            where = parameter.device_mesh, parameter.placements
            shard = distribute_tensor(weight, *where, src_data_rank=None)
            parameter.to_local().copy_(shard.to_local())
        elif parameter is not None:
            parameter.copy_(weight)

    whole.draw(take)


class Engine:
    """The whole model on one rank. The base of every data-parallel engine."""

    #: torch's distributed checkpoint, or one of `checkpoint.store.READERS`: such an engine has `write` and `read`
    checkpoint_format = "dcp"

    def __init__(self, run: Run, world: World) -> None:
        self.run, self.world = run, world
        self.data_rank, self.data_world = world.rank, world.size
        precision = run.loop.precision
        prepare(run, world)
        outline = build_outline(run.model)
        dtype = torch.float64 if precision == "fp64" else torch.float32
        self.model = self._place(outline.to(dtype))
        if isinstance(self.model, GPT):
            # Drawn in fp32 on the CPU, so that they are the same for every precision and device.
            fill(self.model, self.model)
        self.optimizer = self._build_optimizer()
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=precision == "fp16")
        self.autocast_dtype = AUTOCAST.get(precision)

    # Overridden by other strategies --------------------------------------------------------------------------------

    def _place(self, model: nn.Module) -> nn.Module:
        """The outline of the whole model -> this rank's part of it on its device."""
        return move(model, self.world.device)

    def _build_optimizer(self) -> torch.optim.Optimizer:
        return build_optimizer(self.model, self.run.optimizer)

    def _loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of one micro-batch, ()."""
        return self.model(tokens, targets)

    def _accumulating(self, is_last: bool):
        """Context for one micro-batch's forward and backward pass; `is_last`: the update follows."""
        return nullcontext()

    def _optimizer_state(self) -> dict:
        """The optimizer state that this rank writes into a checkpoint, under the model's parameter names."""
        return get_optimizer_state_dict(self.model, self.optimizer)

    def _load_optimizer(self, state: dict) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, state, options=StateDictOptions(strict=True))

    def _clear_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def _backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def _average_gradients(self) -> None:
        """Replace every gradient by its mean over the data-parallel ranks."""

    def _clip(self) -> float:
        """Clip the gradients; returns the whole model's norm before clipping."""
        return clip_(self.model.parameters(), self.run.optimizer.clip_norm).item()

    def _take_step(self) -> None:
        """Step the optimizer; gradients are clipped already."""
        self.scaler.step(self.optimizer)

    def _after_update(self) -> None:
        """Called after the optimizer's step, unless it was skipped."""

    # Shared by most ------------------------------------------------------------------------------------------------

    def step(self, micro_batches: list[MicroBatch], lr: float) -> StepResult:
        """One optimizer step over this rank's micro-batches, which all have one shape (B, T)."""
        loss = self.accumulate(micro_batches)
        grad_norm, skipped = self.update(lr)
        tokens = sum(targets.numel() for _, targets in micro_batches) * self.data_world
        return StepResult(loss, tokens, grad_norm, skipped)

    def accumulate(self, micro_batches: list[MicroBatch]) -> float:
        """The first half of a step: forward and backward passes, gradients averaged; returns the mean loss."""
        self._clear_gradients()
        loss = torch.zeros((), device=self.world.device, dtype=torch.float64)
        for i, batch in enumerate(micro_batches):
            with self._accumulating(is_last=i == len(micro_batches) - 1):
                part = self._forward(batch) / len(micro_batches)
                self._backward(part)
            loss += part.detach()
        self._average_gradients()
        return self.world.sum(loss.item()) / self.world.size

    def update(self, lr: float) -> tuple[float, bool]:
        """The second half: clip and update, or skip the update if the gradients are not finite. Returns (norm before
        clipping, skipped)."""
        set_lr(self.optimizer, lr)
        if self.scaler.is_enabled():
            self.scaler.unscale_(self.optimizer)
        norm = self._clip()
        finite = math.isfinite(norm)
        if finite or self.scaler.is_enabled():
            self._take_step()
        self.scaler.update()
        if finite:
            self._after_update()
        return norm, not finite

    @torch.no_grad()
    def evaluate(self, micro_batches: Iterable[MicroBatch]) -> tuple[float, int]:
        """(mean cross-entropy, tokens) over all ranks' micro-batches, without gradients."""
        total, tokens = 0.0, 0
        for batch in micro_batches:
            n = batch[1].numel()
            total, tokens = total + self._forward(batch, evaluate=True).item() * n, tokens + n
        all_tokens = self.world.sum(tokens)
        return self.world.sum(total) / all_tokens, int(all_tokens)

    def tensors(self) -> dict[str, list[Tensor]]:
        """The tensors that live between steps, by category. Gradients are those of the last backward pass."""
        parameters = list(self.model.parameters())
        return {
            "parameters": parameters,
            "gradients": [p.grad for p in parameters if p.grad is not None],
            "optimizer states": [
                value for state in self.optimizer.state.values() for value in state.values() if torch.is_tensor(value)
            ],
            "buffers": list(self.model.buffers()),
        }

    def state(self, full: bool = False) -> dict:
        """What a checkpoint saves. `full`: only the model, under GPT's own names; else optimizer moments too."""
        if full:
            return self.model.state_dict()
        model, optimizer = get_model_state_dict(self.model), self._optimizer_state()
        return {"model": model, "optimizer": optimizer, "scaler": self.scaler.state_dict()}

    def note(self) -> dict:
        """Entries of a checkpoint's note besides the layout; `loadable` reads them."""
        return {}

    def loadable(self, note: dict) -> dict:
        """The state to fill from a checkpoint with this note; raises CheckpointError if it does not fit."""
        return self.state()

    def load(self, state: dict) -> None:
        """Load a `state(full=False)`, from the same or another world size."""
        set_model_state_dict(self.model, state["model"], options=StateDictOptions(strict=True))
        self._load_optimizer(state["optimizer"])
        if state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])

    def close(self) -> None:
        """Free what the engine holds. The world stays connected."""

    def _forward(self, batch: MicroBatch, evaluate: bool = False) -> Tensor:
        tokens, targets = (t.to(self.world.device, non_blocking=True) for t in batch)
        with torch.autocast(self.world.device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None):
            return self.model(tokens, targets) if evaluate else self._loss(tokens, targets)


def on_rank0(
    world: World, owner: int, tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor | None:
    """Send `tensor` (shape) from rank `owner` to rank 0, through the host; None elsewhere. Collective."""
    if world.rank == owner:
        tensor = tensor.detach().cpu()
        if owner != 0:
            dist.send(tensor, 0)
    elif world.is_main:
        tensor = torch.empty(shape, dtype=dtype)
        dist.recv(tensor, owner)
    return tensor if world.is_main else None
