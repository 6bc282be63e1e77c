"""The puzzles: what the ranks hold at first, what must be true at the end, and the targets.

Each function draws new numbers and returns (world, verify); verify(returned) says what is wrong, or nothing. Gradients
are held to those of torch, on one process; in a web page to the chain rule's, which a test holds to torch's.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import numpy as np

from simulated.chunks import CHUNKS, Case, Prepared, Puzzle, broadcast
from simulated.machine import Costs
from simulated.ranks import Rank
from simulated.world import World

WIDTH = 4


# training ------------------------------------------------------------------------------------------------------------


class Training:
    """A model of square layers, data, and the gradients of each sample."""

    def __init__(self, rng: np.random.Generator, layers: int, samples: int, linear: tuple[int, ...] = ()) -> None:
        self.weights = rng.normal(size=(layers, WIDTH, WIDTH)) * 0.6
        self.x, self.targets = rng.normal(size=(2, samples, WIDTH))
        self.gradients = np.empty((samples, layers, WIDTH, WIDTH))
        found = (by_hand if importlib.util.find_spec("torch") is None else by_torch)(self, linear)
        for i, (of_weights, of_input) in enumerate(found):
            self.gradients[i] = of_weights
            if i == 0:
                self.x_gradient = of_input

    def give(self, rank: Rank, samples: range, *, inputs: bool = True) -> None:
        """The micro-batches of a rank and their targets."""
        rank.targets = [self.targets[i] for i in samples]
        if inputs:
            gb = rank._world.costs.border_gb
            rank.inputs = [
                rank.give(f"micro-batch {k} before layer 0", "activations", gb, self.x[i], layer=0, micro=k)
                for k, i in enumerate(samples)
            ]

    def give_parameters(self, rank: Rank, layers: range, gb: float) -> None:
        for layer in layers:
            data = self.weights[layer].copy()
            rank.parameters[layer] = rank.give(f"parameters of layer {layer}", "parameters", gb, data, layer=layer)


Found = list[tuple[list[np.ndarray], np.ndarray]]  #: of each sample the gradients of all weights, and of its input


def by_torch(training: Training, linear: tuple[int, ...]) -> Found:
    """By autograd, which knows nothing of how the simulated ranks compute."""
    import torch  # here, because it loads slowly

    weights = [torch.tensor(w, requires_grad=True) for w in training.weights]
    found = []
    for x, target in zip(training.x, training.targets, strict=True):
        first = h = torch.tensor(x, requires_grad=True)
        for layer, w in enumerate(weights):
            h = w @ h if layer in linear else torch.tanh(w @ h)
        loss = ((h - torch.tensor(target)) ** 2).sum() / 2
        *of_weights, of_input = (g.numpy() for g in torch.autograd.grad(loss, [*weights, first]))
        found.append((of_weights, of_input))
    return found


def by_hand(training: Training, linear: tuple[int, ...]) -> Found:
    """By the chain rule, for a web page, which has no torch."""
    found = []
    for x, target in zip(training.x, training.targets, strict=True):
        inputs, h = [], x
        for layer, w in enumerate(training.weights):
            inputs.append(h)
            h = w @ h if layer in linear else np.tanh(w @ h)
        of_weights, dy, out = [], h - target, h
        for layer in reversed(range(len(inputs))):
            inner = dy if layer in linear else dy * (1 - out**2)
            of_weights.insert(0, np.outer(inner, inputs[layer]))
            dy, out = training.weights[layer].T @ inner, inputs[layer]
        found.append((of_weights, dy))
    return found


def _data_parallel(world: World, rng: np.random.Generator) -> Training:
    training = Training(rng, world.layers, world.size * world.micro)
    for rank in world.ranks:
        training.give(rank, range(rank.index * world.micro, (rank.index + 1) * world.micro))
    return training


def _verify_updates(world: World, training: Training, find: Callable, cut: Callable) -> Callable[[list], str]:
    """Every rank's parameters after one update with the mean gradient. find(rank, layer) -> Value, cut(rank, array)."""
    g, mean = training.gradients, training.gradients.mean(0)

    def verify(_: list) -> str:
        for layer in range(world.layers):
            for rank in world.ranks:
                where = f"layer {layer} on rank {rank.index}"
                value, before = find(rank, layer), cut(rank, training.weights[layer])
                if value is None or value.gone:
                    return f"the parameters of {where} are not held at the end"
                mine = g[rank.index * world.micro : (rank.index + 1) * world.micro, layer]
                known = {
                    "the mean gradient of this rank's own data": mine.mean(0),
                    "the mean gradient of the last micro-batches": g[world.micro - 1 :: world.micro, layer].mean(0),
                    "gradients that were summed over the ranks more than once": sum(
                        world.size ** (world.micro - 1 - i) * g[i :: world.micro, layer].sum(0)
                        for i in range(world.micro)
                    ),
                }
                used = (before - value.data) / world.costs.lr
                known = {name: cut(rank, array) for name, array in known.items()}
                problem = explain(used, cut(rank, mean[layer]), known)
                if problem:
                    return f"{where} was updated with {problem}"
        return ""

    return verify


def explain(got: np.ndarray, want: np.ndarray, known: dict[str, np.ndarray]) -> str:
    """What a wrong gradient is; nothing if it is right."""
    if got.shape == want.shape and np.allclose(got, want):
        return ""
    if got.shape != want.shape:
        return f"an array of shape {got.shape}: it must be {want.shape}"
    if not got.any():
        return "nothing: it was not updated, or is as it was before the update"
    ratio = _ratio(got, want)
    if ratio:
        return f"{ratio:.3g} times the mean: what is it divided by?"
    for name, array in known.items():
        ratio = _ratio(got, array)
        if ratio:
            return name if np.isclose(ratio, 1) else f"{ratio:.3g} times {name}"
    right = [np.allclose(*rows) for rows in zip(got, want, strict=True)]
    others = [row for row, fine in zip(got, right, strict=True) if not fine]
    if any(right) and not any(row.any() for row in others):
        return "the right gradient in one part only: the others are as they were before"
    return "another gradient"


def _ratio(got: np.ndarray, array: np.ndarray) -> float:
    """got / array if it is the same everywhere, else 0."""
    ratio = got.ravel() @ array.ravel() / (array.ravel() @ array.ravel() or 1)
    return ratio if np.allclose(got, ratio * array, atol=1e-9) else 0.0


def ddp(rng: np.random.Generator, ranks: int, layers: int, micro: int) -> Prepared:
    world = World(ranks, Costs(link_s_per_gb=2 / 3, saved_gb=1), layers=layers, micro=micro)
    training = _data_parallel(world, rng)
    for rank in world.ranks:
        training.give_parameters(rank, range(layers), 2.0)
    return world, _verify_updates(world, training, lambda rank, layer: rank.parameters[layer], lambda _, a: a)


def zero(rng: np.random.Generator, ranks: int, layers: int) -> Prepared:
    world = World(ranks, Costs(link_s_per_gb=2 / 3, saved_gb=1, update_s=4), layers=layers)
    world.owners = True
    training = _data_parallel(world, rng)
    for rank in world.ranks:
        training.give_parameters(rank, range(layers), 2.0)
        for layer in range(layers):
            rank.give(f"optimizer states of a part of layer {layer}", "optimizer states", 12 / ranks, np.zeros(1))
    return world, _verify_updates(world, training, lambda rank, layer: rank.parameters[layer], lambda _, a: a)


def fsdp(rng: np.random.Generator, ranks: int, layers: int) -> Prepared:
    world = World(ranks, Costs(link_s_per_gb=2 / 3, saved_gb=0.5), layers=layers)
    training = _data_parallel(world, rng)

    def cut(rank: Rank, array: np.ndarray) -> np.ndarray:
        return np.array_split(array, ranks)[rank.index]

    for rank in world.ranks:
        for layer in range(layers):
            name, data = f"part of parameters of layer {layer}", cut(rank, training.weights[layer]).copy()
            rank.shards[layer] = rank.give(name, "parameters", 2 / ranks, data, layer=layer)
    return world, _verify_updates(world, training, lambda rank, layer: rank.shards[layer], cut)


def _verify_gradients(world: World, training: Training, owner: Callable[[int], int]) -> Callable[[list], str]:
    total, each = training.gradients.sum(0), training.gradients

    def verify(_: list) -> str:
        for layer in range(world.layers):
            rank = world.ranks[owner(layer)]
            value = rank.gradients.get(layer)
            if value is None or value.gone:
                return (
                    f"rank {rank.index} has no gradient of layer {layer} at the end: was its backward pass forgotten?"
                )
            if not np.allclose(value.data, total[layer]):
                missing = [i for i in range(world.micro) if np.allclose(value.data, total[layer] - each[i, layer])]
                why = f"it lacks micro-batch {missing[0]}" if missing else "micro-batches are missing or counted twice"
                return f"the gradient of layer {layer} on rank {rank.index} is wrong: {why}"
        return ""

    return verify


def pipeline(rng: np.random.Generator, ranks: int, micro: int, pieces: int = 1) -> Prepared:
    """Layer k lies on rank k modulo the number of ranks; times and memory of a rank are the same for any number."""
    layers = ranks * pieces
    world = World(ranks, Costs(forward_s=1 / pieces, saved_gb=1 / pieces), layers=layers, micro=micro)
    world.labels = "micro"
    training = Training(rng, layers, micro)
    for rank in world.ranks:
        training.give(rank, range(micro), inputs=rank.index == 0)
        training.give_parameters(rank, range(rank.index, layers, ranks), 0.0)
    return world, _verify_gradients(world, training, lambda layer: layer % ranks)


def checkpoint(rng: np.random.Generator, ranks: int, layers: int) -> Prepared:
    world = World(ranks, Costs(saved_gb=4, border_gb=1), layers=layers)
    training = Training(rng, layers, 1)
    training.give(world.ranks[0], range(1))
    training.give_parameters(world.ranks[0], range(layers), 0.0)
    return world, _verify_gradients(world, training, lambda _: 0)


def tensor_parallel(rng: np.random.Generator, ranks: int) -> Prepared:
    """Layer 0 is cut by its outputs, with tanh; layer 1 by its inputs, without. A border is 2 GB: a sum takes 2 s."""
    world = World(ranks, Costs(link_s_per_gb=2 / 3, border_gb=2, saved_gb=1), layers=2)
    world.linear = {1}
    training = Training(rng, 2, 1, linear=(1,))
    for rank in world.ranks:
        training.give(rank, range(1))
        cuts = [np.array_split(training.weights[0], ranks), np.array_split(training.weights[1], ranks, axis=1)]
        for layer in range(2):
            data = cuts[layer][rank.index].copy()
            rank.parameters[layer] = rank.give(f"parameters of layer {layer}", "parameters", 1.0, data, layer=layer)

    def verify(returned: list) -> str:
        for rank, dx in zip(world.ranks, returned, strict=True):
            wanted = (
                np.array_split(training.gradients[0, 0], ranks),
                np.array_split(training.gradients[0, 1], ranks, axis=1),
            )
            for layer in (1, 0):
                value = rank.gradients.get(layer)
                if value is None:
                    return f"rank {rank.index} has no gradient of layer {layer}"
                problem = explain(value.data, wanted[layer][rank.index], {})
                if problem:
                    return (
                        f"the gradient of layer {layer} on rank {rank.index} is wrong: the loss must see the whole "
                        "output, summed once"
                    )
            if dx is None or dx.rank is not rank or dx.gone:
                return f"rank {rank.index} does not return the gradient at the input of layer 0"
            if not np.allclose(dx.data, training.x_gradient):
                ratio = dx.data / training.x_gradient
                why = (
                    f"it is {ratio[0]:.3g} times the right one"
                    if np.allclose(ratio, ratio[0])
                    else "it comes from this rank's part of the hidden numbers only"
                )
                return f"the gradient at the input is wrong on rank {rank.index}: {why}"
        return ""

    return world, verify


PUZZLES = {
    **CHUNKS,
    "ddp": Puzzle(
        title="DDP with gradient accumulation",
        minutes=10,
        prepare=ddp,
        cases=(
            Case(ranks=4, sizes={"layers": 4, "micro": 2}, targets={"time": 26, "memory": 20, "sent": 12}),
            Case(ranks=2, sizes={"layers": 3, "micro": 3}, shown=False),
        ),
        hints={
            ("time", 32): "All sums come after the backward pass. Which gradients are complete before its end?",
            ("time", None): "What do ranks wait for?",
            ("sent", None): "Is every micro-batch sent? What does `no_sync` do in DDP?",
            ("memory", None): "Run a micro-batch backward before the next one goes forward.",
        },
    ),
    "zero": Puzzle(
        title="ZeRO-2: who updates what",
        prepare=zero,
        cases=(
            Case(ranks=4, sizes={"layers": 4}, targets={"time": 17, "memory": 27.5, "sent": 12}),
            Case(ranks=2, sizes={"layers": 3}, shown=False),
        ),
        hints={
            ("time", 18): "Which gradient is complete first? Update that layer first, and send it meanwhile.",
            ("time", 21): "Do the gathers wait for all updates, or the sums for the whole backward pass?",
            ("time", None): "What travels while the ranks compute, and what could?",
            ("memory", None): "Do whole gradients, or old parameters, stay? Who needs them?",
            ("sent", None): "An all-reduce gives everybody the whole sum. What does a rank need of it?",
        },
    ),
    "fsdp": Puzzle(
        title="FSDP with prefetch",
        prepare=fsdp,
        cases=(
            Case(ranks=4, sizes={"layers": 4}, targets={"time": 14, "memory": 10, "sent": 16.5}),
            Case(ranks=2, sizes={"layers": 3}, shown=False),
        ),
        hints={
            ("sent", 18): "The last layer is gathered again, though its backward pass comes next.",
            ("sent", None): "What is gathered more often than twice, or reduced where a part is enough?",
            ("time", None): "Ranks wait for a gather, or for a gradient that is updated at once.",
            ("memory", None): "A layer's parameters and gradient are not needed after it has computed.",
        },
    ),
    "checkpoint": Puzzle(
        title="Activation checkpointing",
        minutes=10,
        prepare=checkpoint,
        cases=(
            Case(ranks=1, sizes={"layers": 8}, targets={"time": 27, "memory": 25}),
            Case(ranks=1, sizes={"layers": 6}, shown=False),
        ),
        hints={
            ("time", 32): "Every layer is recomputed. How many must be?",
            ("time", 31): "Every layer but one is recomputed. How many must be?",
            ("time", None): "More layers are computed twice than the memory asks for.",
            ("memory", 34): "Everything is kept.",
            ("memory", None): "Memory is fullest when the forward pass ends, or in a second one: see the picture.",
        },
    ),
    "tp": Puzzle(
        title="Tensor parallelism's two sums",
        minutes=10,
        prepare=tensor_parallel,
        cases=(
            Case(ranks=4, targets={"time": 8, "sent": 6}),
            Case(ranks=2, shown=False),
        ),
        hints={
            ("time", 10): "Nothing is computed during the second sum. Which work does not need its result?",
            ("time", 9): "One half of a layer's backward pass hides behind the sum. Can more?",
            ("time", None): "What do ranks wait for?",
            ("sent", None): "Two sums are enough: the hidden numbers need none.",
        },
    ),
    "1f1b": Puzzle(
        title="One forward, one backward",
        prepare=pipeline,
        cases=(
            Case(ranks=4, sizes={"micro": 8}, targets={"time": 33, "memory": 4}),
            Case(ranks=3, sizes={"micro": 5}, targets={"time": 21, "memory": 3}, shown=False),
            Case(ranks=4, sizes={"micro": 2}, shown=False),
        ),
        hints={
            ("memory", 8): "All forward passes come first: that is GPipe. When can rank 0 free something?",
            ("memory", None): "Rank 0 runs too far ahead.",
            ("time", 96): "One micro-batch at a time.",
            ("time", None): "Ranks wait because others do not run far enough ahead.",
        },
    ),
    "interleaved": Puzzle(
        title="Interleaved stages",
        minutes=25,
        prepare=pipeline,
        cases=(
            Case(ranks=4, sizes={"micro": 8, "pieces": 2}, targets={"time": 28.5, "memory": 5.5}),
            Case(ranks=3, sizes={"micro": 6, "pieces": 2}, shown=False),
        ),
        hints={
            ("memory", 8): "All forward passes come first.",
            ("memory", None): "Ranks run too far ahead.",
            ("time", None): "Ranks wait because others do not run far enough ahead, or do the layers in another order.",
        },
    ),
    "broadcast-again": Puzzle(
        title="Broadcast again",
        minutes=30,
        plain=True,
        prepare=broadcast,
        arguments=("chunks",),
        cases=(
            Case(ranks=8, sizes={"chunks": 8}, targets={"time": 10}),
            Case(ranks=4, sizes={"chunks": 5}, targets={"time": 6}, shown=False),
        ),
        hints={
            ("time", 14): "That is the chain: most ranks have one partner only.",
            ("time", None): "Which ranks have something that another one lacks, and do not send it?",
        },
    ),
    "zero-bubble": Puzzle(
        title="Zero bubble",
        prepare=pipeline,
        cases=(
            Case(ranks=4, sizes={"micro": 8}, targets={"time": 27, "memory": 4}),
            Case(ranks=3, sizes={"micro": 5}, targets={"time": 17, "memory": 3}, shown=False),
        ),
        hints={
            ("time", None): "In the picture, which weight half comes while another rank waits for an input half?",
            ("memory", None): "What a layer keeps is freed by the weight half: some are put off too long.",
        },
    ),
}
