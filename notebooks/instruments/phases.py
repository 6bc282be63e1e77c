"""Graphcore's four ways to run a model on several IPUs, on our ranks: what lies where, when, and what is moved.

    shape = shape_of("tiny")                                     # of aiscale.train.presets
    done = execute(shape, world, micro_batches, "pipelined")     # forward and backward passes of one step; collective
    done.loss, done.gradients, done.events                       # events for plots.pipeline, of this rank
    predicted(shape, "parallel phased", ranks=2, micro_batches=4, length=32)    # bytes exactly; seconds as a bound

PopTorch's modes (Turing Technical Report 3, appendix A; PopTorch user guide, "Execution strategies"). The model is cut
into phases, consecutive blocks: one for each rank, in the phased modes one for each block.

    sharded          phase p on rank p; one rank works at a time
    pipelined        the same places, but ranks work on different micro-batches
    serial phased    all phases on every rank, one after the other (ranks are replicas). Weights lie in the streaming
                     memory; a phase's weights are fetched, used for all micro-batches, and dropped
    parallel phased  as serial, but even phases on rank 0, odd ones on rank 1: one fetches while the other computes

The phased modes keep only the input of each phase, in the streaming memory too, and compute the phase again in the
backward pass. On a CPU both memories are RAM: bytes are real, times of fetching are not, unless `stream_bytes_s` says
how fast to play them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from aiscale.errors import ConfigError
from aiscale.measure.distributed import World
from aiscale.plan import cost, machines
from aiscale.plan.cost import Event, Work
from aiscale.train.model import GPT, loss_of
from aiscale.train.presets import Shape

MicroBatch = tuple[Tensor, Tensor]  #: tokens (B, T), targets (B, T)
MODES = ("sharded", "pipelined", "serial phased", "parallel phased")


class Part(nn.Module):
    """Consecutive blocks of a GPT, under its own names; the first part has the embedding, the last one the head."""

    def __init__(self, whole: GPT, layers: range) -> None:
        super().__init__()
        self.is_last = layers.stop == len(whole.blocks)
        if 0 in layers:
            self.embed = whole.embed
        self.blocks = nn.ModuleDict({str(layer): whole.blocks[layer] for layer in layers})
        if self.is_last:
            self.head = whole.head

    def forward(self, x: Tensor) -> Tensor:  # first part: (B, T) tokens, others: (B, T, D) activations
        if hasattr(self, "embed"):
            x = self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        return self.head(x) if self.is_last else x


def parts_of(whole: GPT, phases: int) -> list[Part]:
    size = len(whole.blocks) // phases
    return [Part(whole, range(phase * size, (phase + 1) * size)) for phase in range(phases)]


@dataclass
class Executed:
    """What this rank did. Loss and gradients are the same on all ranks."""

    loss: float = 0.0
    gradients: dict[str, Tensor] = field(default_factory=dict)  #: of the mean loss, under GPT's own names
    events: list[Event] = field(default_factory=list)
    weight_bytes: int = 0  #: most bytes of weights in the processor's memory at once
    moved_bytes: int = 0  #: weights and activations between the two memories


def place(mode: str, phase: int, rank: int) -> int:
    """The rank of a phase; of serial phased the asking one."""
    return {"serial phased": rank, "parallel phased": phase % 2}.get(mode, phase)


def order(mode: str, rank: int, phases: int, n_micro: int) -> list[Work]:
    """What a rank does, in order."""
    if mode == "pipelined":
        return cost.schedule_order("1f1b" if n_micro >= phases else "gpipe", phases, n_micro)[rank]
    forward = [("forward", p) for p in range(phases)]
    backward = [("backward", p) for p in reversed(range(phases))]
    mine = [(kind, p) for kind, p in forward + backward if place(mode, p, rank) == rank]
    if mode == "sharded":
        return [Work(kind, p, m) for m in range(n_micro) for kind, p in mine]
    return [Work(kind, p, m) for kind, p in mine for m in range(n_micro)]


def execute(
    shape: Shape,
    world: World,
    micro_batches: list[MicroBatch],
    mode: str,
    *,
    pace_s: float = 0.0,
    stream_bytes_s: float = 0.0,
) -> Executed:
    """Run one step's passes in `mode`, without an update. `micro_batches` are the same on all ranks but replicas'.

    pace_s: least seconds of a forward pass of a phase, a backward pass twice that. stream_bytes_s: rate at which the
    streaming memory is played; 0: as fast as a copy is."""
    phases = _phases(shape, world.size, mode)
    torch.manual_seed(0)
    rank = _Rank(shape, world, micro_batches, mode, phases, pace_s, stream_bytes_s)
    world.barrier()
    return rank.work()


def _phases(shape: Shape, ranks: int, mode: str) -> int:
    """How many phases there are; raises ConfigError if the mode does not fit."""
    if mode not in MODES:
        raise ConfigError(f"mode {mode!r}: it must be one of {', '.join(MODES)}")
    phases = shape.layers if "phased" in mode else ranks
    if shape.layers % phases:
        raise ConfigError(f"{shape.layers} layers are not divisible by {phases} phases: change one of them")
    if shape.tied:
        raise ConfigError("a head that is the token embedding would lie in two phases: take a model with two")
    if mode == "parallel phased" and ranks != 2:
        raise ConfigError(f"parallel phased takes turns between 2 ranks, but there are {ranks}")
    return phases


class _Rank:
    """One rank's parts of the model, and its way through `order`."""

    def __init__(self, shape, world, micro_batches, mode, phases, pace_s, stream_bytes_s) -> None:
        self.world, self.batches, self.mode, self.phases = world, micro_batches, mode, phases
        self.pace_s, self.rate, self.streams = pace_s, stream_bytes_s, "phased" in mode
        self.done, self.sent = Executed(), []
        self.inputs: dict[tuple[int, int], Tensor] = {}  # (phase, micro-batch): what the phase began with
        self.outputs: dict[tuple[int, int], Tensor] = {}  # and its output, with the graph
        self.waiting: dict[tuple[str, int, int], Tensor] = {}  # handed over within this rank
        self.whole = GPT(shape)
        self.passed_shape = (*micro_batches[0][0].shape, shape.width)
        parts = parts_of(self.whole, phases)
        self.parts = {p: part for p, part in enumerate(parts) if place(mode, p, world.rank) == world.rank}
        held = {name: weight for part in self.parts.values() for name, weight in part.named_parameters()}
        self.stored = {name: weight.data for name, weight in held.items()} if self.streams else {}
        if self.streams:
            for weight in held.values():
                weight.data = torch.empty(0)
        self.done.weight_bytes = sum(weight.data.nbytes for weight in held.values())

    def work(self) -> Executed:
        self.zero, fetched = time.perf_counter(), None
        for work in order(self.mode, self.world.rank, self.phases, len(self.batches)):
            if self.streams and work.piece != fetched:
                self._drop(fetched)
                self._fetch(fetched := work.piece)
            getattr(self, f"_{work.kind}")(work.piece, work.micro_batch)
        if self.streams:
            self._drop(fetched)
        for request, _ in self.sent:
            request.wait()
        return self._gathered()

    def _forward(self, phase: int, micro: int) -> None:
        tokens, targets = self.batches[micro]
        x = tokens if phase == 0 else self._take("forward", phase, micro).requires_grad_()
        start, part = time.perf_counter(), self.parts[phase]
        with torch.set_grad_enabled(not self.streams):
            y = self._output(part, x, targets)
        self._mark("forward", phase, micro, start, self.pace_s)
        self.inputs[phase, micro] = x
        self.done.moved_bytes += x.nbytes * (self.streams and phase > 0)
        if part.is_last:
            self.done.loss += y.item()
        else:
            self._hand("forward", phase + 1, micro, y.detach())
        if not self.streams:
            self.outputs[phase, micro] = y

    def _backward(self, phase: int, micro: int) -> None:
        part, x = self.parts[phase], self.inputs.pop((phase, micro))
        gradient = None if part.is_last else self._take("backward", phase, micro)
        start = time.perf_counter()
        y = self._output(part, x, self.batches[micro][1]) if self.streams else self.outputs.pop((phase, micro))
        y.backward(gradient)
        self.done.moved_bytes += x.nbytes * (self.streams and phase > 0)
        self._mark("backward", phase, micro, start, 2 * self.pace_s)
        if phase > 0:
            self._hand("backward", phase - 1, micro, x.grad)

    def _output(self, part: Part, x: Tensor, targets: Tensor) -> Tensor:
        """Activations; of the last phase this micro-batch's part of the mean loss."""
        y = part(x)
        return loss_of(y, targets) / len(self.batches) if part.is_last else y

    # What passes between phases ------------------------------------------------------------------------------------

    def _hand(self, kind: str, phase: int, micro: int, tensor: Tensor) -> None:
        there = place(self.mode, phase, self.world.rank)
        if there == self.world.rank:
            self.waiting[kind, phase, micro] = tensor
        else:
            self.sent.append((dist.isend(tensor.contiguous(), there), tensor))

    def _take(self, kind: str, phase: int, micro: int) -> Tensor:
        before = phase - 1 if kind == "forward" else phase + 1
        if (there := place(self.mode, before, self.world.rank)) == self.world.rank:
            return self.waiting.pop((kind, phase, micro))
        tensor = torch.empty(self.passed_shape)
        dist.recv(tensor, there)
        return tensor

    # The streaming memory ------------------------------------------------------------------------------------------

    def _fetch(self, phase: int) -> None:
        start, weights = time.perf_counter(), dict(self.parts[phase].named_parameters())
        for name, weight in weights.items():
            weight.data = self.stored[name].clone()
        nbytes = sum(weight.nbytes for weight in weights.values())
        self.done.weight_bytes = max(self.done.weight_bytes, nbytes)
        self.done.moved_bytes += nbytes
        self._mark("data", phase, 0, start, nbytes / self.rate if self.rate else 0.0)

    def _drop(self, phase: int | None) -> None:
        """Free a phase's weights; its gradients go to the streaming memory."""
        if phase is None:
            return
        for name, weight in self.parts[phase].named_parameters():
            if weight.grad is not None:
                self.done.moved_bytes += weight.grad.nbytes
                kept = self.done.gradients.get(name)
                self.done.gradients[name] = weight.grad if kept is None else kept + weight.grad
                weight.grad = None
            weight.data = torch.empty(0)

    def _gathered(self) -> Executed:
        """Loss and gradients of all ranks: summed over phases, averaged over replicas."""
        if not self.streams:
            for part in self.parts.values():
                for name, weight in part.named_parameters():
                    self.done.gradients[name] = weight.grad
        replicas = self.world.size if self.mode == "serial phased" else 1
        for name, weight in self.whole.named_parameters():
            shape = self.stored[name].shape if name in self.stored else weight.shape
            total = self.done.gradients.get(name, torch.zeros(shape)) / replicas
            if self.world.size > 1:
                dist.all_reduce(total)
            self.done.gradients[name] = total
        self.done.loss = self.world.sum(self.done.loss) / replicas
        return self.done

    def _mark(self, kind: str, phase: int, micro: int, start: float, at_least_s: float) -> None:
        time.sleep(max(0.0, start + at_least_s - time.perf_counter()))
        name = str(phase if self.streams else micro)
        self.done.events.append(Event(self.world.rank, name, start - self.zero, time.perf_counter() - self.zero, kind))


def predicted(shape: Shape, mode: str, ranks: int, *, micro_batches: int, length: int) -> dict:
    """Most bytes of weights on a rank, bytes moved by a rank, and seconds of a step; None where no source has numbers.

    A micro-batch is a sequence of `length` tokens. Weights of 4 bytes; seconds at a GC200's published peak for half
    precision, all of it: a bound from below."""
    phases = _phases(shape, ranks, mode)
    with torch.device("meta"):
        parts = parts_of(GPT(shape), phases)
    weights, streams = [4 * sum(p.numel() for p in part.parameters()) for part in parts], "phased" in mode
    mine = [p for p in range(phases) if place(mode, p, 0) == 0]
    activations = 4 * micro_batches * length * shape.width
    # Fetched for each pass, gradients sent back; the last phase stays for its backward pass.
    fetches = sum(weights[p] * (3 - (p == mine[-1])) for p in mine)
    moved = fetches + 2 * activations * sum(p > 0 for p in mine)
    chip = machines.ACCELERATORS["ipu-gc200"]
    # The phased modes compute forward passes twice: 4 thirds. Pipelined ranks work at the same time.
    flops = shape.flops_per_token(length) * micro_batches * length
    busy_s = flops * (4 / 3 if streams else 1) / chip.peak_flops("fp16")
    if mode == "pipelined":
        busy_s *= (1 + cost.bubble("gpipe", ranks, micro_batches)) / ranks
    return {
        "weight_bytes": max(weights[p] for p in mine),
        "moved_bytes": moved if streams else 0,
        "compute_s": busy_s,
        "streaming_s": None if streams else 0.0,  # no source gives the streaming memory's rate with its direction
    }
