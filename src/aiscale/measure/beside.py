"""What a trainer sends in a step beside the traffic that `cost` predicts: by name, to the byte.

beside("ddp", args, 4, 0)       # {("all_reduce", "world"): 4}: the mean loss

Payloads by (collective, process group) of one rank. torch's own tensor and pipeline parallelism,
`tp_pp`, has no formula in `cost`: all that it sends and holds is here.
"""

from __future__ import annotations

import argparse
from collections import Counter
from math import prod

from aiscale.plan.config import ModelConfig
from aiscale.plan.cost.memory import NARROW, WIDE, round_up
from aiscale.plan.cost.parameters import parameter_shapes
from aiscale.plan.options import precision_of, run_of

Traffic = dict[tuple[str, str], int]

#: What `tp_pp` cuts by rows, bias included, and by columns.
_BY_ROWS = ("attn.query", "attn.key", "attn.value", "mlp.up")
_BY_COLUMNS = ("attn.out.weight", "mlp.down.weight")


def beside(trainer: str, args: argparse.Namespace, world_size: int, rank: int) -> Traffic:
    if world_size == 1:
        return {}
    wide = WIDE[precision_of(args)]
    if trainer == "tp_pp":
        return TorchGrid(args, world_size, rank).traffic()
    if trainer == "megatron":
        return _losses(args, world_size, 4)
    if trainer == "zero":
        return _beside_zero(args, world_size)
    sent = wide  # the mean loss
    if trainer == "fsdp":
        tensors = len(parameter_shapes(run_of(trainer, args).model))
        sent += wide * tensors  # the norm of each gradient, of which a rank has a slice
        if args.optimizer == "lamb":
            sent += 2 * wide * tensors  # of each tensor and of its change
    return {("all_reduce", "world"): sent}


def _beside_zero(args: argparse.Namespace, world_size: int) -> Traffic:
    """The mean loss; and at stage 3 a tied embedding, which is gathered for the head as well."""
    sent = {("all_reduce", "world"): 4}
    run = run_of("zero", args)
    if args.stage == 3 and run.model.tied:
        numbers = round_up(run.model.vocab_size * run.model.d_model, world_size)
        n_micro, _ = run.loop.micro_batches(world_size)
        sent["all_gather", "world"] = 2 * n_micro * NARROW[run.loop.precision] * numbers
    return sent


def _losses(args: argparse.Namespace, world_size: int, nbytes: int) -> Traffic:
    """Of the mean loss: over the stages, of which only the last knows it, then over the copies."""
    dp = world_size // (args.tp * args.pp)
    sent = Counter()
    for axis, size in (("pp", args.pp), ("dp", dp)):
        if size > 1:
            sent["all_reduce", axis] += nbytes
    return dict(sent)


class TorchGrid:
    """A rank of `tp_pp`. Ranks are numbered dp x pp x tp.

    A is the residual stream of one micro-batch. A layer sums A over tp twice forward; backward
    once for the MLP's input, and once each for query, key and value.
    """

    def __init__(self, args: argparse.Namespace, world_size: int, rank: int) -> None:
        self.args, self.world_size = args, world_size
        self.dp = world_size // (args.tp * args.pp)
        self.stage = rank // args.tp % args.pp
        self.model: ModelConfig = run_of("tp_pp", args).model
        self.wide = WIDE[precision_of(args)]

    def axis(self, name: str, size: int) -> str:
        """A mesh axis with all ranks is called world."""
        return "world" if size == self.world_size else name

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the whole tensors of which this rank has a part."""
        mine = {}
        for name, shape in parameter_shapes(self.model).items():
            if name.startswith("blocks."):
                stage = int(name.split(".")[1]) * self.args.pp // self.model.n_layer
            else:
                stage = self.args.pp - 1 if name.startswith(("norm.", "head.")) else 0
            if stage == self.stage:
                mine[name] = shape
        return mine

    def is_cut(self, name: str) -> bool:
        return any(part in name for part in _BY_ROWS) or name.endswith(_BY_COLUMNS)

    def numbers(self) -> int:
        """In this rank's parts of its tensors."""
        total = 0
        for name, shape in self.shapes().items():
            total += prod(shape) // (self.args.tp if self.is_cut(name) else 1)
        return total

    def traffic(self) -> Traffic:
        args = self.args
        sent: Counter[tuple[str, str]] = Counter()
        micro_batches = args.batch // (self.dp * args.micro_batch)
        stream = args.micro_batch * args.length * self.model.d_model * self.wide
        layers = sum(name.endswith("mlp.up.bias") for name in self.shapes())
        if args.tp > 1:
            tp = self.axis("tp", args.tp)
            cut = sum(prod(shape) for name, shape in self.shapes().items() if self.is_cut(name))
            sent["all_reduce", tp] += 6 * layers * micro_batches * stream
            sent["all_gather", tp] += self.wide * cut  # whole gradients, for their norm
        if args.pp > 1:
            pp = self.axis("pp", args.pp)
            neighbours = (self.stage > 0) + (self.stage < args.pp - 1)
            for op in ("send", "recv"):
                sent[op, pp] += neighbours * micro_batches * stream
            sent["all_reduce", pp] += 2 * self.wide  # the loss, and the squares of the norm
        if self.dp > 1:
            dp = self.axis("dp", self.dp)
            sent["all_reduce", dp] += self.wide * (1 + self.numbers())  # the loss, and gradients
        return dict(sent)

    def held(self) -> dict[str, int]:
        weights = self.wide * self.numbers()
        counters = 4 * len(self.shapes())
        return {
            "parameters": weights,
            "gradients": weights,
            "optimizer states": 2 * weights + counters,
        }


def tp_pp_held(args: argparse.Namespace, world_size: int, rank: int) -> dict[str, int]:
    """Bytes that a rank of `tp_pp` holds, by category."""
    return TorchGrid(args, world_size, rank).held()
