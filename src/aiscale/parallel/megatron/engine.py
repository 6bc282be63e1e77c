"""Megatron-Core: tp ranks shard matrices, pp stages the layers, dp ranks the batch.

    aiscale train --recipe laptop --nproc 8 --set parallel.strategy=megatron --set parallel.tp=2 --set parallel.pp=2

Megatron-Core does all computing and communicating (Shoeybi et al. 2019; Narayanan et al. 2021; Korthikanti et al.
2022). We convert the weights from and to `GPT` exactly (`layout`), write the checkpoint files (`shards`), and replace
its CUDA calls on a CPU (`aiscale.without_gpu`).

Shapes: B sequences, T tokens.
"""

from __future__ import annotations

import importlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from aiscale.checkpoint import CheckpointError
from aiscale.config import ConfigError, Run
from aiscale.config.errors import require
from aiscale.distributed import World
from aiscale.model.build import build_outline
from aiscale.optim import set_lr
from aiscale.parallel.megatron import shards
from aiscale.parallel.megatron.layout import Grid, slots
from aiscale.parallel.megatron.shards import Saved, Shard
from aiscale.parallel.serial import Engine, MicroBatch, prepare
from aiscale.without_gpu import megatron_on


def preload() -> None:
    """Import Megatron-Core, only where ranks will run on the CPU."""
    if not torch.cuda.is_available():
        importlib.import_module("aiscale.parallel.megatron.core")


def check(run: Run) -> None:
    """Raise ConfigError if Megatron-Core cannot train `run`."""
    layout, precision = run.parallel, run.loop.precision
    require(
        not run.model.parallel_residual,
        "model.parallel_residual is true: Megatron-Core's layers feed the MLP with what attention gave; "
        "set it to false, or parallel.strategy to another",
    )
    require(
        precision != "fp64" or not layout.distributed_optimizer,
        "loop.precision fp64 with parallel.distributed_optimizer: Megatron-Core's takes fp32, bf16 and fp16 only: "
        "set distributed_optimizer to false, or precision to fp32",
    )
    require(
        run.optimizer.name in ("adam", "adamw") or not layout.distributed_optimizer,
        f"optimizer.name {run.optimizer.name} with parallel.distributed_optimizer: Megatron-Core divides the states "
        "of Adam and AdamW only: set optimizer.name=adamw, or distributed_optimizer=false",
    )
    require(
        not layout.sequence_parallel or run.loop.seq_len % layout.tp == 0,
        f"loop.seq_len {run.loop.seq_len} is not divisible by parallel.tp {layout.tp}: with sequence_parallel every "
        "tensor-parallel rank keeps as many tokens: change one of them",
    )


def _import_core():
    try:
        return importlib.import_module("aiscale.parallel.megatron.core")
    except ImportError as error:
        raise ConfigError(
            f"parallel.strategy megatron needs Megatron-Core ({error}): pip install megatron-core"
        ) from None


class MegatronEngine(Engine):
    """One rank of a tp x pp x dp grid."""

    checkpoint_format = "megatron"

    def __init__(self, run: Run, world: World) -> None:
        check(run)
        self.core, self.run, self.world = _import_core(), run, world
        self.grid = Grid.of(run.parallel, world.size)
        self.tp_rank, self.data_rank, self.pp_rank = self.grid.coordinates(world.rank)
        self.data_world = self.grid.dp
        prepare(run, world)
        with torch.random.fork_rng(devices=[]), world.control(), self._adapted():
            self.core.start_groups(self.grid)
            try:
                self.chunks = self.core.build_chunks(run, world.device)
                self.optimizer = self.core.build_optimizer(run, self.chunks, world.device)
            except BaseException:
                self.core.end_groups()
                raise
            self._schedule = self.core.get_forward_backward_func()
        self._scaler = getattr(self.optimizer.chained_optimizers[0], "grad_scaler", None)
        self.stages = [self.grid.stage(self.pp_rank, chunk) for chunk in range(self.grid.virtual)]
        self.is_last = self.stages[-1] == self.grid.stages - 1
        self._set_length(run.loop.seq_len)
        build_outline(run.model).draw(self._filler())

    def accumulate(self, micro_batches: list[MicroBatch]) -> float:
        with self._adapted():
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            losses = self._run(micro_batches)
        return self._shared(sum(losses) / len(micro_batches)) / self.data_world

    def update(self, lr: float) -> tuple[float, bool]:
        set_lr(self.optimizer, lr)
        with self._adapted():
            overflow = self.optimizer.prepare_grads()  # in fp16 the loss scale follows it
            norm, limit = self._grad_norm(), self.run.optimizer.clip_norm
            if overflow or not math.isfinite(norm):
                return norm, True
            if limit > 0:
                gradients = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
                torch.nn.utils.clip_grads_with_norm_(gradients, limit, torch.tensor(norm, dtype=torch.float64))
            self.optimizer.step_with_ready_grads()
        return norm, False

    @torch.no_grad()
    def evaluate(self, micro_batches: Iterable[MicroBatch]) -> tuple[float, int]:
        total, tokens = 0.0, 0
        with self._adapted(), self.world.control():
            for shape, group in groupby(micro_batches, key=lambda batch: batch[1].shape):
                batches = list(group)
                # The interleaved schedule needs a multiple of pp: pad, and leave the padding out of the sum.
                more = -len(batches) % self.grid.pp if self.grid.virtual > 1 else 0
                losses = self._run(batches + batches[-1:] * more, forward_only=True)[: len(batches)]
                total, tokens = total + sum(losses) * shape.numel(), tokens + len(batches) * shape.numel()
        all_tokens = tokens * self.data_world
        return self._shared(total) / all_tokens, all_tokens

    def _run(self, micro_batches: list[MicroBatch], forward_only: bool = False) -> list[float]:
        """Run the schedule; returns each micro-batch's loss on the last stage."""
        B, T = micro_batches[0][0].shape
        if self._positions.shape[1] != T:
            self._set_length(T)
        iterators = [iter(micro_batches) for _ in self.chunks]
        losses = self._schedule(
            forward_step_func=self._forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=len(micro_batches),
            seq_length=T,
            micro_batch_size=B,
            forward_only=forward_only,
        )
        return [loss.item() for loss in losses] if self.is_last else []

    def _set_length(self, T: int) -> None:
        self._mask = torch.ones(1, 1, T, T, dtype=torch.bool, device=self.world.device).triu(1)  # True: not attended
        self._positions = torch.arange(T, device=self.world.device)[None]

    def _forward_step(self, iterator: Iterator[MicroBatch], chunk):
        """Megatron-Core's forward_step_func: one micro-batch on one piece of the model."""
        tokens, targets = (t.to(self.world.device, non_blocking=True) for t in next(iterator))
        output = chunk(tokens, self._positions.expand_as(tokens), self._mask, labels=targets)

        def mean(losses: Tensor) -> tuple[Tensor, Tensor]:
            loss = losses.mean()
            return loss, loss.detach().clone()  # Megatron-Core divides the first in place

        return output, mean

    def _grad_norm(self) -> float:
        """The norm of the whole model's gradients. Megatron-Core sums in fp32, so in fp64 we sum ourselves."""
        if self.run.loop.precision != "fp64":
            return float(self.optimizer.get_grad_norm())
        (optimizer,) = self.optimizer.chained_optimizers
        squares = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for gradient in optimizer.get_grads_for_grad_norm():
            squares += gradient.square().sum()
        dist.all_reduce(squares, group=optimizer.get_grad_stats_parallel_group())
        return math.sqrt(squares.item())

    def tensors(self) -> dict[str, list[Tensor]]:
        """The tensors that live between steps, by category; fp32 masters count as optimizer states."""
        buffers = [buffer for chunk in self.chunks for buffer in chunk.buffers]
        parameters = [p for chunk in self.chunks for p in chunk.parameters()]
        groups = self.optimizer.param_groups
        states = [v for state in self._states().values() for v in state.values() if torch.is_tensor(v)]
        return {
            "parameters": [b.param_data for b in buffers if b.param_data is not None] + parameters,
            "gradients": [buffer.grad_data for buffer in buffers],
            "optimizer states": states + [p for group in groups for p in group["params"]],
            "buffers": [self._mask, self._positions, *self.core.workspace(self.chunks)],
        }

    def state(self, full: bool = False) -> dict:
        """The whole model under GPT's names, on rank 0; `write` saves this rank's shards."""
        return shards.gather(self._written(), self.world, self.grid, self.run.model)

    def write(self, folder: Path) -> None:
        """Write the shards that only this rank writes to one file."""
        facts = {"rank": self.world.rank, "grid": self.grid, "model": self.run.model}
        content = shards.content(self._written(), **facts, optimizer=self.run.optimizer.name)
        content["scaler"] = self._scaler and self._scaler.state_dict()
        self.world.together(lambda: shards.write(folder, content))

    def read(self, folder: Path, note: dict) -> None:
        saved = self.world.together(lambda: self._open(folder))
        fill = self._filler()
        for source in {shard.slot.source for shard in self._shards()}:
            fill(source, saved.tensor(source))
        if self._scaler and saved.scaler:
            with self._adapted():
                self._scaler.load_state_dict(saved.scaler)
        states = self._states()
        for shard in self._shards():
            if shard.main is None:
                continue
            moments, counts = saved.state(shard.slot.source)
            device = shard.main.device  # a fused optimizer needs its step count on the device too
            state = {key: torch.tensor(count, dtype=torch.float32, device=device) for key, count in counts.items()}
            for key in moments:
                part = self._part(shard, saved.tensor(shard.slot.source, key))
                state[key] = part.to(shard.main, copy=True)
            states[shard.main] = state

    def close(self) -> None:
        self.chunks, self.optimizer, self._schedule = [], None, None
        self.core.end_groups()

    def _adapted(self) -> AbstractContextManager[None]:
        return megatron_on(self.world.device, double=self.run.loop.precision == "fp64")

    def _shards(self) -> list[Shard]:
        tables = [slots(self.run.model, self.grid, stage) for stage in self.stages]
        return list(self.core.owned(self.optimizer, self.chunks, self.stages, tables))

    def _written(self) -> list[Shard]:
        """The shards that this rank saves. Only one rank saves a replica: data-parallel ranks hold replicas without the
        distributed optimizer, tensor-parallel ranks those of unsharded tensors."""
        mine = [shard for shard in self._shards() if shard.main is not None and not shard.slot.is_copy]
        mine = [shard for shard in mine if shard.slot.dim is not None or self.tp_rank == 0]
        return mine if self.run.parallel.distributed_optimizer or self.data_rank == 0 else []

    def _states(self) -> dict[Tensor, dict]:
        """Main parameter -> its optimizer states."""
        return self.optimizer.chained_optimizers[0].optimizer.state

    def _filler(self) -> Callable[[str, Tensor], None]:
        """A function of (name, GPT's whole tensor) that sets this rank's weights, and masters in
        full precision."""
        shards_of = defaultdict(list)
        for shard in self._shards():
            shards_of[shard.slot.source].append(shard)

        @torch.no_grad()
        def take(name: str, full: Tensor) -> None:
            for shard in shards_of[name]:
                shard.parameter.copy_(shard.slot.cut(full, self.tp_rank))
                if shard.main is not None:
                    shard.main.copy_(self._part(shard, full))

        return take

    def _part(self, shard: Shard, full: Tensor) -> Tensor:
        """The range of GPT's tensor that shard.main covers."""
        return shard.slot.cut(full, self.tp_rank).reshape(-1)[shard.start : shard.end].view_as(shard.main)

    def _open(self, folder: Path) -> Saved:
        saved, run = Saved(folder), self.run
        if saved.model != run.model:
            changed = [key for key, value in vars(saved.model).items() if value != getattr(run.model, key)]
            raise CheckpointError(
                f"{folder} holds a model with {changed[0]} {getattr(saved.model, changed[0])}, this run has "
                f"{getattr(run.model, changed[0])}: set model.{changed[0]}={getattr(saved.model, changed[0])}"
            )
        if saved.optimizer != run.optimizer.name:
            raise CheckpointError(
                f"{folder} holds the states of optimizer {saved.optimizer}, this run has {run.optimizer.name}: "
                f"set optimizer.name={saved.optimizer}"
            )
        return saved

    def _shared(self, value: float) -> float:
        """Sum of the last stages' values over data-parallel ranks, on every rank."""
        has_value = self.is_last and self.tp_rank == 0
        return self.world.sum(value if has_value else 0.0)
