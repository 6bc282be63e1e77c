"""Pipeline parallelism with torch.distributed.pipelining: each rank holds some layers, micro-batches flow through.

    aiscale train --nproc 4 --set parallel.strategy=pipeline --set parallel.pp=2 --set loop.micro_batch=2

The GPT is cut into pp x virtual_stages pieces with equally many blocks; the first also has the embeddings, the last the
norm and the head. Neighbours exchange activations (B,T,D) and their gradients, in the precision of the weights; first
and last stage add up the gradients of tied embeddings; and all gradients are all-reduced over dp once a step.

Shapes: B sequences of one micro-batch, T tokens, D width, V vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from aiscale.config import Run
from aiscale.cost import stage_ranks
from aiscale.distributed import World
from aiscale.model.build import build_outline
from aiscale.optim import build_optimizer
from aiscale.parallel.parts import Part
from aiscale.parallel.serial import AUTOCAST, Engine, MicroBatch, fill, move, on_rank0, prepare

#: schedule -> torch's class
SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
}


class PipelineEngine(Engine):
    """Some layers on every rank. Ranks are numbered pp x dp, so neighbours in a pipeline are dp apart."""

    def __init__(self, run: Run, world: World) -> None:
        self.run, self.world, layout = run, world, run.parallel
        dp = layout.data_parallel(world.size)
        with world.control():
            mesh = world.mesh(pp=layout.pp, dp=dp)
        self.pp_group, self.dp_group = mesh.get_group("pp"), mesh.get_group("dp")
        self.pp_rank, self.data_rank, self.data_world = mesh.get_local_rank("pp"), mesh.get_local_rank("dp"), dp
        self.stage_ranks = stage_ranks(layout.pp, layout.virtual_stages)
        self._cut(len(self.stage_ranks))
        self._meet_for_tied_embeddings()
        self.optimizer = build_optimizer(self.model, run.optimizer)
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=run.loop.precision == "fp16")
        # The scaler takes its device from the first loss, but only the last stage has losses.
        self.scaler.scale(torch.zeros((), device=world.device))
        # One buffer for all gradients: cleared at once, and averaged over dp by one all-reduce.
        n_parameters = sum(p.numel() for p in self.model.parameters())
        self.gradients = torch.zeros(n_parameters, dtype=self.dtype, device=world.device)
        self._attach_gradients()
        self._schedules: dict[tuple, tuple] = {}
        self._loss_sum = torch.zeros((), device=world.device, dtype=torch.float64)

    def _cut(self, pieces: int) -> None:
        """Make room for this rank's parts, and fill them with what serial draws for them."""
        run = self.run
        double = run.loop.precision == "fp64"
        prepare(run, self.world)
        whole = build_outline(run.model)
        # A checkpoint names all parameters, but no rank holds them all.
        self.shapes = {name: p.shape for name, p in whole.named_parameters()}
        self.dtype, autocast = torch.float64 if double else torch.float32, AUTOCAST.get(run.loop.precision)
        size = run.model.n_layer // pieces
        layers = {s: range(s * size, (s + 1) * size) for s, rank in enumerate(self.stage_ranks) if rank == self.pp_rank}
        self.parts = {s: Part(whole, layers[s], autocast) for s in layers}
        self.model = Part(whole, itertools.chain(*layers.values()), autocast)  # shares the modules of all parts
        move(self.model.to(self.dtype), self.world.device)
        fill(self.model, whole)

    def _meet_for_tied_embeddings(self) -> None:
        """Create the process group of the two ranks that hold the same tied embedding."""
        first, last = self.stage_ranks[0], self.stage_ranks[-1]
        self.embedding_group = None
        if not self.run.model.tied or first == last:
            return
        with self.world.control():
            for column in range(self.data_world):  # every rank must take part in creating every group
                pair = [rank * self.data_world + column for rank in (first, last)]
                group = dist.new_group(pair, group_desc="embedding")
                if self.world.rank in pair:
                    self.embedding_group = group

    def _attach_gradients(self) -> None:
        parameters = list(self.model.parameters())
        for p, flat in zip(parameters, self.gradients.split([p.numel() for p in parameters]), strict=True):
            p.grad = flat.view_as(p)

    def accumulate(self, micro_batches: list[MicroBatch]) -> float:
        self.gradients.zero_()
        self._loss_sum.zero_()
        schedule, stages = self._schedule(len(micro_batches), micro_batches[0][0].shape)
        tokens, targets = (torch.cat(part).to(self.world.device) for part in zip(*micro_batches, strict=True))
        schedule.step(
            *([tokens] if self.model.is_first else []),
            target=targets if self.model.is_last else None,
            return_outputs=False,
        )
        for stage in stages:
            stage.clear_runtime_states()  # else gradients of received activations stay until the next step
        self._average_gradients()
        return self.world.sum(self._loss_sum.item())

    def _schedule(self, n_micro: int, shape: torch.Size) -> tuple:
        """torch's schedule for `n_micro` micro-batches of `shape`, and its stages, which own the receive buffers."""
        if (n_micro, shape) not in self._schedules:
            stages = [self._stage(s, part, shape) for s, part in self.parts.items()]
            kind = SCHEDULES[self.run.parallel.schedule]
            scale = n_micro * self.data_world

            def loss(hidden: Tensor, targets: Tensor) -> Tensor:
                value = self.parts[len(self.stage_ranks) - 1].loss(hidden, targets) / scale
                self._loss_sum += value.detach()
                return self.scaler.scale(value)

            flat = not issubclass(kind, (ScheduleGPipe, Schedule1F1B))
            schedule = kind(stages if flat else stages[0], n_micro, loss_fn=loss, scale_grads=False)
            self._schedules = {(n_micro, shape): (schedule, stages)}
        return self._schedules[n_micro, shape]

    def _stage(self, index: int, part: Part, shape: torch.Size) -> PipelineStage:
        def like(is_tokens: bool) -> Tensor:
            kind = {"dtype": torch.int64} if is_tokens else {"dtype": self.dtype, "requires_grad": True}
            return torch.empty(*shape, *([] if is_tokens else [self.run.model.d_model]), device="meta", **kind)

        # Given the shapes, torch does not exchange them first, except for a 4-byte message in the first step.
        return PipelineStage(
            part,
            index,
            len(self.stage_ranks),
            self.world.device,
            input_args=like(part.is_first),
            output_args=like(False),
            group=self.pp_group,
        )

    def _average_gradients(self) -> None:
        if self.data_world > 1:  # a sum: the loss was already divided by data_world
            dist.all_reduce(self.gradients, group=self.dp_group)
        if self.embedding_group is not None:
            dist.all_reduce(self.model.token_embedding.weight.grad, group=self.embedding_group)
        if self.scaler.is_enabled() and self.world.any(not self.gradients.isfinite().all().item()):
            self.gradients.fill_(math.inf)  # an overflow on one stage skips the step on all

    def _clip(self) -> float:
        norm, limit = self._global_norm(), self.run.optimizer.clip_norm
        if limit > 0:
            total = torch.tensor(norm, dtype=self.dtype, device=self.world.device)
            nn.utils.clip_grads_with_norm_(self.model.parameters(), limit, total)
        return norm

    def _global_norm(self) -> float:
        squares = 0.0
        if self.data_rank == 0:  # the other data-parallel ranks have the same
            squares = _square_norm(self.gradients)
            if self.embedding_group is not None and not self.model.is_first:
                squares -= _square_norm(self.model.token_embedding.weight.grad)
        return math.sqrt(self.world.sum(squares))

    @torch.no_grad()
    def evaluate(self, micro_batches: Iterable[MicroBatch]) -> tuple[float, int]:
        total, tokens = torch.zeros((), device=self.world.device, dtype=torch.float64), 0
        batches = iter(micro_batches)
        while group := list(itertools.islice(batches, 4 * self.run.parallel.pp)):
            total += self._forward_only(group)
            tokens += sum(targets.numel() for _, targets in group)
        all_tokens = self.world.sum(tokens if self.pp_rank == 0 else 0)
        return self.world.sum(total.item()) / all_tokens, int(all_tokens)

    def _forward_only(self, micro_batches: list[MicroBatch]) -> Tensor:
        """The sum of these micro-batches' losses on the last stage, 0 on the others; runs the parts in sequence."""
        device, total = self.world.device, torch.zeros((), device=self.world.device, dtype=torch.float64)
        sent = []
        for s, part in self.parts.items():
            for tokens, targets in micro_batches:
                if part.is_first:
                    x = tokens.to(device)
                else:
                    x = torch.empty(*tokens.shape, self.run.model.d_model, dtype=self.dtype, device=device)
                    dist.recv(x, group=self.pp_group, group_src=self.stage_ranks[s - 1])
                x = part(x)
                if part.is_last:
                    total += part.loss(x, targets.to(device)).double() * targets.numel()
                else:
                    sent.append(dist.isend(x, group=self.pp_group, group_dst=self.stage_ranks[s + 1]))
        for message in sent:
            message.wait()
        return total

    def tensors(self) -> dict[str, list[Tensor]]:
        """As serial's; buffers are the receive buffers, one for each micro-batch."""
        received = [
            info.buffer
            for _, stages in self._schedules.values()
            for stage in stages
            for infos in (*stage.args_recv_info.values(), *stage.grad_recv_info.values())
            for info in infos
            if getattr(info, "buffer", None) is not None  # before torch 2.13 the first stage's inputs have none
        ]
        categories = super().tensors()
        return categories | {"buffers": [*categories["buffers"], *received]}

    def state(self, full: bool = False) -> dict:
        """This rank's part under GPT's names, for a checkpoint. `full`: the whole model on the CPU of rank 0."""
        return self._whole_model() if full else super().state()

    def _optimizer_state(self) -> dict:
        with self._fresh_optimizer():
            state = super()._optimizer_state()
        # The parameter groups are written once for all ranks, so they name all ranks' parameters.
        matrices = [name for name, shape in self.shapes.items() if len(shape) >= 2]
        vectors = [name for name in self.shapes if name not in matrices]
        for group, names in zip(state["param_groups"], (matrices, vectors), strict=True):
            group["params"] = names
        return state

    def _load_optimizer(self, state: dict) -> None:
        own = dict(self.model.named_parameters())
        groups = [{**g, "params": [name for name in g["params"] if name in own]} for g in state["param_groups"]]
        with self._fresh_optimizer():
            super()._load_optimizer({**state, "param_groups": groups})

    @contextmanager
    def _fresh_optimizer(self) -> Iterator[None]:
        """Without gradients: torch creates the states of an optimizer that has not stepped yet only then."""
        self.model.zero_grad(set_to_none=True)
        yield
        self._attach_gradients()

    def _whole_model(self) -> dict[str, Tensor]:
        """Gather the model on rank 0 tensor by tensor, each from the first rank that has it."""
        own, whole = dict(self.model.named_parameters()), {}
        owners = self.world.gather(sorted(own))
        with self.world.control():
            for name, shape in self.shapes.items():
                owner = next(rank for rank, names in enumerate(owners) if name in names)
                whole[name] = on_rank0(self.world, owner, own.get(name), shape, self.dtype)
        return whole if self.world.is_main else {}

    def close(self) -> None:
        self._schedules.clear()


def _square_norm(gradients: Tensor) -> float:
    return torch.linalg.vector_norm(gradients, dtype=torch.float64).item() ** 2
