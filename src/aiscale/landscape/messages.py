"""A message-driven pipeline: a rank works on whichever message arrives first, as AxonNN's ranks do.

    out = message_driven(world, model, micro_batches)            # every rank: the same GPT, of which it runs a stage
    out.loss, out.gradients, out.events                          # {GPT's name: gradient} of this rank's stage
    message_driven(world, model, micro_batches, order="1f1b")    # the same passes in a fixed order
    message_driven(world, model, micro_batches, seconds=lambda kind, stage, m: 0.02)    # a pass takes at least this

1F1B says in advance which pass comes next, and a rank waits for its message although another one may lie there. Here
the first stage starts a micro-batch when it has nothing else to do, at most as many as there are stages at a time, and
any other pass starts when its message is there (Singh and Bhatele, IPDPS 2022). A thread receives from each neighbour.

Shapes: B sequences of one micro-batch, T tokens, D width.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from aiscale.cost import Event, schedule_order
from aiscale.distributed import World
from aiscale.model import GPT
from aiscale.parallel.parts import Part


class Passed(NamedTuple):
    loss: float  #: mean over the micro-batches, the same on all ranks
    gradients: dict[str, Tensor]  #: of this rank's stage
    events: list[Event]  #: of this rank; gathered, plots.pipeline draws them


def message_driven(
    world: World,
    model: GPT,
    micro_batches: list[tuple[Tensor, Tensor]],
    *,
    order: str = "arrival",
    seconds: Callable[[str, int, int], float] = lambda kind, stage, m: 0.0,
    fault: str = "",
) -> Passed:
    """Forward and backward passes of `micro_batches` (tokens (B,T), targets (B,T)). `model`, with an untied head, is
    the same on every rank. `order`: arrival or 1f1b. `fault` plants one: skip (micro-batch 0 adds no gradients)."""
    if model.config.tied or model.config.n_layer < world.size:
        raise ValueError(f"cut a GPT with an untied head and at least {world.size} layers, one for each rank")
    stage = _Stage(world, model, micro_batches, seconds, fault)
    world.barrier()
    stage.run(order)
    world.barrier()
    gradients = {name: p.grad for name, p in stage.part.named_parameters()}
    return Passed(world.sum(sum(stage.losses)), gradients, stage.events)


class _Stage:
    def __init__(self, world: World, model: GPT, micro_batches: list, seconds: Callable, fault: str) -> None:
        self.world, self.micro_batches, self.seconds, self.fault = world, micro_batches, seconds, fault
        layers = torch.arange(model.config.n_layer).tensor_split(world.size)[world.rank].tolist()
        model.zero_grad()
        self.part, self.dtype = Part(model, layers, None), model.head_weight.dtype
        self.shape = (*micro_batches[0][0].shape, model.config.d_model)
        self.graphs: dict[int, tuple[Tensor, Tensor]] = {}  #: micro-batch -> input and output of its forward pass
        self.losses: list[float] = []
        self.events: list[Event] = []
        self.inbox: queue.Queue = queue.Queue()
        self.waiting: list[tuple] = []

    def run(self, order: str) -> None:
        for kind, source in (("forward", self.world.rank - 1), ("backward", self.world.rank + 1)):
            if 0 <= source < self.world.size:
                threading.Thread(target=self.receive, args=(kind, source), daemon=True).start()
        self.zero_s, done, n = time.perf_counter(), Counter(), len(self.micro_batches)
        fixed = () if order == "arrival" else schedule_order(order, self.world.size, n)[self.world.rank]
        while done["backward"] < n:
            next_kind = fixed[done.total()].kind if fixed else ""
            may_start = self.part.is_first and done["forward"] < min(n, done["backward"] + self.world.size)
            if may_start and (next_kind == "forward" or (not next_kind and self.inbox.empty())):
                message = ("forward", done["forward"], None)
            else:
                message = self.next_message(next_kind)
            self.compute(*message)
            done[message[0]] += 1

    def receive(self, kind: str, source: int) -> None:
        """Put (kind, micro-batch, activations or their gradient (B,T,D)) into the queue as they arrive."""
        try:
            for _ in self.micro_batches:
                message = torch.empty(1 + torch.Size(self.shape).numel(), dtype=self.dtype)
                dist.recv(message, source)
                self.inbox.put((kind, int(message[0]), message[1:].view(self.shape)))
        except RuntimeError as error:
            self.inbox.put(("failed", 0, error))

    def next_message(self, wanted: str) -> tuple:
        """The message that has waited longest; if `wanted`, of this kind."""
        while not (fitting := [message for message in self.waiting if message[0].startswith(wanted)]):
            self.waiting.append(self.inbox.get())
            if self.waiting[-1][0] == "failed":
                raise self.waiting[-1][2]
        self.waiting.remove(fitting[0])
        return fitting[0]

    def compute(self, kind: str, m: int, message: Tensor | None) -> None:
        began, (tokens, targets) = time.perf_counter(), self.micro_batches[m]
        if kind == "forward":
            x = tokens if self.part.is_first else message.requires_grad_()
            y = self.part(x)
            if self.part.is_last:
                y = self.part.loss(y, targets) / len(self.micro_batches)
                self.losses.append(y.item())
                self.inbox.put(("backward", m, None))
            self.graphs[m] = (x, y)
            sent, to = y.detach(), self.world.rank + 1
        else:
            x, y = self.graphs.pop(m)
            weights = [] if self.fault == "skip" and m == 0 < self.world.rank else list(self.part.parameters())
            torch.autograd.backward(y, message, inputs=weights + [x] * (not self.part.is_first))
            sent, to = x.grad, self.world.rank - 1
        time.sleep(max(0.0, began + self.seconds(kind, self.world.rank, m) - time.perf_counter()))
        times = (began - self.zero_s, time.perf_counter() - self.zero_s)
        self.events.append(Event(self.world.rank, str(m), *times, kind))
        if 0 <= to < self.world.size:
            dist.send(torch.cat([sent.new_tensor([m]), sent.flatten()]), to)
