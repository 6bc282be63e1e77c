"""What a simulated rank can do: compute, send, receive, gather, free. `world` runs a program on several of them.

    def program(rank):
        y = rank.forward(0, rank.inputs[0])
        ...

A rank's clock moves when it computes, when it receives, and when it uses what is still on its way. Sends and
collectives start at the clock's time, or when the rank's earlier ones are done, and travel beside the computation.
Messages arrive one after another. Values are real arrays, so a wrong answer is found by its numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from aiscale.plan import cost
from simulated.machine import Machine, Message, SimulationError, line_of_program

_SHORT = {"all_reduce": "sum", "reduce_scatter": "rs", "all_gather": "ag"}
MOST_WORK = 5000  #: pieces of work of a rank, against loops without end


class Value:
    """An array that a rank holds: a chunk, parameters, a micro-batch between two layers."""

    def __init__(self, rank: Rank, name: str, kind: str, gb: float, data: np.ndarray, since_s: float, **facts) -> None:
        self.rank, self.name, self.kind, self.gb, self.data = rank, name, kind, gb, data
        self.ready_s = self.busy_s = since_s  #: when it is there, and when it has been sent
        self.gone = ""  #: why it is held no more
        self.layer: int | None = facts.get("layer")  #: the layer before which it stands, or whose parameters it is
        self.micro: int | None = facts.get("micro")  #: micro-batch
        self.whole: Value | None = facts.get("whole")  #: of which it is a part
        self.size_gb = self.whole.gb / rank.world_size if self.whole and not gb else gb  #: if it is sent
        self.steps = [(since_s, gb)] if gb else []  #: (time, change of memory)

    def __repr__(self) -> str:
        return f"{self.name} ({self.gb:g} GB)" if self.gb else self.name


class Rank:
    """What a program can do. `index` of `world_size`; `inputs` by micro-batch, `parameters`, `gradients`, `shards` by
    layer."""

    def __init__(self, world: Machine, index: int) -> None:
        self._world, self.index, self.world_size = world, index, world.size
        self.n_layers, self.n_micro = world.layers, world.micro
        self.inputs: list[Value] = []
        self.parameters: dict[int, Value] = {}
        self.gradients: dict[int, Value] = {}
        self.shards: dict[int, Value] = {}
        self.kept: dict = {}  #: for the program's own use
        self.targets: list[np.ndarray] = []  #: of each micro-batch; `loss` compares with them
        self._saved: dict[tuple[int, int], tuple[Value, np.ndarray, np.ndarray]] = {}
        self._clock_s = self._link_free_s = self.sent_gb = 0.0
        self._inbox: list[tuple[float, float]] = []  #: times at which something arrives
        self._held: list[Value] = []
        self._work_done = self._collectives = 0

    # computation

    def forward(self, layer: int, x: Value, keep: bool = True) -> Value:
        """The layer's output. With keep, x becomes part of what is kept for the backward pass; else x stays."""
        w = self._parameters(layer, "forward")
        self._at(layer, x, "x", f"forward of layer {layer}")
        start_s = self._compute("forward", layer, x.micro, self._world.costs.forward_s, w, x)
        out = self._world.apply(layer, w.data @ x.data)
        if keep:
            name = f"what layer {layer} keeps of micro-batch {x.micro}"
            saved = self.give(name, "activations", self._world.costs.saved_gb, out, start_s, layer=layer, micro=x.micro)
            self._saved[layer, x.micro] = saved, x.data, out
            self._release(x, start_s, "which a forward pass has taken")
        return self._border("x", layer + 1, x.micro, out, start_s)

    def loss(self, y: Value) -> Value:
        """The gradient of a micro-batch's loss at the last layer's output. Takes no time."""
        self._use("loss", y)
        self._at(self.n_layers, y, "x", "the loss")
        gradient = y.data - self.targets[y.micro]
        self._clock_s = max(self._clock_s, y.ready_s)
        self.free(y)
        return self._border("dx", self.n_layers, y.micro, gradient, self._clock_s)

    def backward(self, layer: int, dy: Value) -> Value:
        """The gradient at the layer's input; adds to gradients[layer]; frees dy and what the layer had kept."""
        return self._halves(layer, dy, "backward", 2)

    def backward_input(self, layer: int, dy: Value) -> Value:
        """The gradient at the layer's input alone: half of a backward pass."""
        return self._halves(layer, dy, "backward", 1)

    def backward_weights(self, layer: int, dy: Value) -> None:
        """The other half: adds to gradients[layer]; frees dy and what the layer had kept."""
        self._halves(layer, dy, "weights", 1)

    def update(self, w: Value, gradient: Value) -> None:
        """One optimizer step of w, whole or a part of it; frees the gradient."""
        if w.data.shape != gradient.data.shape:
            self._fail(f"updates {w!r} with {gradient!r}: one is a part, the other is not")
        if self._world.owners and w.whole is None:
            self._fail(f"updates all of {w!r}, but has the optimizer states of rank.part(...) only")
        self._compute("optimizer", w.layer, 0, self._world.costs.update_s * self._share(w), w, gradient)
        w.data -= self._world.costs.lr * gradient.data
        self.free(gradient)

    def add(self, x: Value, y: Value) -> None:
        """x += y; frees y. Takes no time."""
        self._use("add", x, y)
        self._clock_s = max(self._clock_s, x.ready_s, y.ready_s)
        x.data = x.data + y.data
        self.free(y)

    def scale(self, x: Value, factor: float) -> None:
        """x *= factor. Takes no time."""
        self._use("scale", x)
        x.data = x.data * factor

    # messages

    def send(self, to: int, x: Value) -> None:
        """Start to send a copy of x."""
        self._other("sends to", to)
        self._use(f"send to rank {to}", x)
        start_s, seconds = self._link(x), self._world.costs.link_s_per_gb * x.size_gb
        self._link_free_s = x.busy_s = start_s + seconds
        self.sent_gb += x.size_gb
        message = Message(self.index, to, start_s, start_s + seconds)
        self._world.messages.append(message)
        self._world.channels[self.index, to].append((message, x, x.data.copy()))
        if seconds:
            self._world.event(self.index, x.name, start_s, self._link_free_s, "communication")

    def recv(self, source: int) -> Value:
        """The next message from a rank; waits until it has arrived."""
        self._other("receives from", source)
        channel = self._world.channels[source, self.index]
        self._wait(lambda: bool(channel), f"a message from rank {source}", [source])
        message, x, data = channel.popleft()
        seconds = message.arrived_s - message.start_s
        for begin_s, end_s in sorted(self._inbox):  # messages arrive one after another
            if seconds and begin_s < message.arrived_s and end_s > message.arrived_s - seconds:
                message.arrived_s = end_s + seconds
        self._inbox.append((message.arrived_s - seconds, message.arrived_s))
        self._clock_s = max(self._clock_s, message.arrived_s)
        return self.give(x.name, x.kind, x.size_gb, data, message.arrived_s - seconds, layer=x.layer, micro=x.micro)

    def all_reduce(self, x: Value) -> None:
        """x becomes the sum of all ranks' x."""
        parts, _, end_s = self._collective("all_reduce", x, x.size_gb)
        x.data, x.ready_s = sum(parts), end_s

    def reduce_scatter(self, x: Value) -> Value:
        """This rank's part of the sum of all ranks' x."""
        parts, start_s, end_s = self._collective("reduce_scatter", x, x.size_gb)
        data = np.array_split(sum(parts), self.world_size)[self.index].copy()
        shard = self.give(
            f"part of {x.name}", x.kind, x.size_gb / self.world_size, data, start_s, layer=x.layer, whole=x
        )
        shard.ready_s = shard.busy_s = end_s
        return shard

    def all_gather(self, part: Value, into: Value | None = None) -> Value:
        """All ranks' parts, in a new value, or in the memory of `into`."""
        self._use("all_gather", part, *([into] if into else []))
        whole_gb = part.size_gb * self.world_size
        parts, start_s, end_s = self._collective("all_gather", part, whole_gb)
        data = np.concatenate(parts)
        if into is None:
            name = part.name.replace("part of ", "")
            into = self.give(name, "weight casts", whole_gb, data, start_s, layer=part.layer)
        into.data[...] = data
        into.ready_s = into.busy_s = end_s
        return into

    # memory

    def part(self, w: Value) -> Value:
        """This rank's part of w, in the memory of w."""
        self._use("part", w)
        data = np.array_split(w.data, self.world_size)[self.index]
        return self.give(f"part of {w.name}", w.kind, 0.0, data, self._clock_s, layer=w.layer, whole=w)

    def free(self, x: Value) -> None:
        """Give the memory of x back, at once or when it has been sent."""
        self._use("free", x)
        at_s = max(self._clock_s, x.busy_s)
        self._release(x, at_s, f"which this rank freed at {at_s:g} s")

    def give(self, name: str, kind: str, gb: float, data: np.ndarray, since_s: float = 0.0, **facts) -> Value:
        """A new value, held from since_s on."""
        value = Value(self, name, kind, gb, data, since_s, **facts)
        self._held.append(value)
        return value

    # how it is done

    def _release(self, x: Value, at_s: float, gone: str) -> None:
        x.gone = gone
        if x.gb:
            x.steps.append((at_s, -x.gb))

    def _border(self, what: str, layer: int, micro: int, data: np.ndarray, since_s: float) -> Value:
        """A micro-batch (x) or its gradient (dx) before a layer."""
        place = f"before layer {layer}" if layer < self.n_layers else "after the last layer"
        name = f"{'gradient of ' if what == 'dx' else ''}micro-batch {micro} {place}"
        value = self.give(name, "activations", self._world.costs.border_gb, data, since_s, layer=layer, micro=micro)
        value.ready_s = self._clock_s
        return value

    def _halves(self, layer: int, dy: Value, kind: str, halves: int) -> Value | None:
        """A backward pass, or its input half (kind backward), or its weight half."""
        w = self._parameters(layer, "backward")
        self._at(layer + 1, dy, "dx", f"backward of layer {layer}")
        if (layer, dy.micro) not in self._saved:
            self._fail(
                f"backward of layer {layer}, micro-batch {dy.micro}: this rank keeps nothing of its forward pass"
            )
        saved, x, out = self._saved[layer, dy.micro]
        start_s = self._compute(kind, layer, dy.micro, halves * self._world.costs.forward_s, w, dy, saved)
        inner = dy.data * self._world.slope(layer, out)
        if kind == "weights" or halves == 2:
            if layer not in self.gradients or self.gradients[layer].gone:
                name, zeros = f"gradient of layer {layer}", np.zeros_like(w.data)
                self.gradients[layer] = self.give(name, "gradients", w.gb, zeros, start_s, layer=layer)
            self.gradients[layer].data = self.gradients[layer].data + np.outer(inner, x)
            self.gradients[layer].ready_s = self._clock_s
            self.free(saved)
            self.free(dy)
            del self._saved[layer, dy.micro]
        return self._border("dx", layer, dy.micro, w.data.T @ inner, start_s) if kind == "backward" else None

    def _parameters(self, layer: int, what: str) -> Value:
        if layer not in self.parameters:
            held = ", ".join(map(str, sorted(self.parameters))) or "none"
            self._fail(f"{what} of layer {layer}, but this rank holds the parameters of layers: {held}")
        return self.parameters[layer]

    def _at(self, layer: int, x: Value, what: str, work: str) -> None:
        self._use(work, x)
        is_gradient = x.name.startswith("gradient")
        if x.layer != layer or x.micro is None or is_gradient != (what == "dx"):
            wanted = f"the input of layer {layer}" if layer < self.n_layers else "the output of the last layer"
            self._fail(f"{work} takes {'the gradient at ' if what == 'dx' else ''}{wanted}, but got {x.name}")

    def _use(self, what: str, *values: Value) -> None:
        for value in values:
            if value is None:
                self._fail(f"{what} got None: was there nothing received or computed before?")
            if not isinstance(value, Value):
                self._fail(f"{what} got {value!r}, which is not something that a rank holds")
            if value.rank is not self:
                self._fail(f"{what} uses {value.name} of rank {value.rank.index}: it must be sent")
            if value.gone:
                self._fail(f"{what} uses {value.name}, {value.gone}")

    def _share(self, w: Value) -> float:
        return len(w.data) / self._world.width

    def _compute(self, kind: str, layer: int, micro: int, seconds: float, *values: Value) -> float:
        self._use(f"{kind} of layer {layer}", *values)
        self._count()
        start_s = max(self._clock_s, *(value.ready_s for value in values))
        self._clock_s = start_s + seconds
        if seconds:
            self._world.event(self.index, self._world.label(layer, micro), start_s, self._clock_s, kind)
        return start_s

    def _link(self, x: Value) -> float:
        self._count()
        return max(self._clock_s, self._link_free_s, x.ready_s)

    def _collective(self, op: str, x: Value, gb: float) -> tuple[list[np.ndarray], float, float]:
        """All ranks' arrays, the start and the end."""
        self._use(op, x)
        number, self._collectives = self._collectives, self._collectives + 1
        calls = self._world.collectives[number]
        calls[self.index] = op, x, x.data.copy(), self._link(x)
        absent = [r for r in range(self.world_size) if r not in calls]
        self._wait(lambda: len(calls) == self.world_size, f"all ranks in {op} of {x.name}", absent)
        for other, (their_op, theirs, _, _) in calls.items():
            if (their_op, theirs.name) != (op, x.name):
                self._fail(f"calls {op} of {x.name}, while rank {other} calls {their_op} of {theirs.name}")
        start_s = max(call[3] for call in calls.values())
        bytes_sent = cost.wire_bytes(op, gb, self.world_size)
        end_s = self._link_free_s = x.busy_s = start_s + bytes_sent * self._world.costs.link_s_per_gb
        self.sent_gb += bytes_sent
        name = "sum" if x.micro is not None else f"{_SHORT[op]} {x.layer}"
        self._world.event(self.index, name, start_s, end_s, "communication")
        return [calls[r][2] for r in range(self.world_size)], start_s, end_s

    def _other(self, what: str, rank: int) -> None:
        if not isinstance(rank, int) or not 0 <= rank < self.world_size or rank == self.index:
            hint = "itself" if rank == self.index else f"rank {rank}, but ranks are 0 to {self.world_size - 1}"
            self._fail(f"{what} {hint}")

    def _count(self) -> None:
        self._work_done += 1
        if self._work_done > MOST_WORK:
            self._fail(f"has done {MOST_WORK} pieces of work: does a loop never end?")

    def _wait(self, ready: Callable[[], bool], what: str, for_ranks: list[int]) -> None:
        if not ready():
            self._world.wait(self.index, ready, what, for_ranks)

    def _fail(self, problem: str) -> None:
        raise SimulationError(f"rank {self.index} at {self._clock_s:g} s: {problem}{line_of_program()}")
