"""Bytes that an engine of `fit` sends and holds, predicted and counted, for lesson 11 and for ranks that do not exist.

The byte table of the trainers is `measure.bytes`; this goes with the engines.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from aiscale import cost
from aiscale.config import Run
from aiscale.meter import held_bytes
from aiscale.parallel import build

CATEGORIES = ("parameters", "gradients", "optimizer states")

#: 67 tokens: a prime, so padding by a library shows up.
_MODEL = ("model.n_layer=4", "model.n_head=4", "model.d_model=32", "model.vocab_size=67", "model.max_seq_len=16")
_LOOP = ("loop.seq_len=16", "loop.micro_batch=1", "loop.device=cpu")


@dataclass(frozen=True)
class ByteCase:
    """A strategy with its options, and the world sizes at which it is measured."""

    name: str
    settings: tuple[str, ...]
    worlds: tuple[int, ...]
    micro_batches: int = 2  #: per data-parallel rank and step

    def run(self, world_size: int) -> Run:
        run = Run().override(*_MODEL, *_LOOP, *self.settings)
        dp = run.parallel.data_parallel(world_size)
        return run.override(f"loop.global_batch={dp * self.micro_batches}")


def predicted_and_counted(run, world, steps: int = 3) -> list[dict]:
    """Rows {kind, what, predicted, measured, calls} of this rank in the last of `steps` steps. `world` may be one of
    `distributed.fake`; calls: of the collective, 0 for what is held."""
    traffic, calls, tensor_bytes = _last_step(run, world, steps)
    predicted_traffic = cost.step_traffic(run, world.size, world.rank)
    predicted_bytes = cost.held_bytes(run, world.size, world.rank)
    categories = (*CATEGORIES, *(["compression"] if "compression" in {**tensor_bytes, **predicted_bytes} else []))
    counted = [
        ("payload", f"{op} {group}", (op, group), predicted_traffic, traffic)
        for op, group in sorted({*traffic, *predicted_traffic})
    ]
    counted += [("held", what, what, predicted_bytes, tensor_bytes) for what in categories]
    return [
        {"kind": kind, "what": what, "predicted": predicted.get(key, 0), "measured": measured.get(key, 0)}
        | {"calls": calls[key]}
        for kind, what, key, predicted, measured in counted
    ]


def _last_step(run, world, steps: int) -> tuple[Counter, Counter, dict]:
    """(payload bytes and calls by (collective, group) of the last step, bytes held after it by category)."""
    engine = build(run, world)
    torch.manual_seed(engine.data_rank)
    batch = random_batch(run, engine.data_world)
    for _ in range(steps):  # the first steps are set-up: DDP rebuilds its buckets, AdamW creates its states
        before = world.traffic.groups()
        engine.step(batch, 1e-3)
    traffic, calls = Counter(), Counter()
    for (op, group), count in world.traffic.groups_since(before).items():
        if len(group.ranks) > 1:
            traffic[op, group.name] += count.payload_bytes
            calls[op, group.name] += count.calls
    tensor_bytes = held_bytes(engine.tensors())
    engine.close()
    return traffic, calls, tensor_bytes


def random_batch(run: Run, data_world: int) -> list:
    """One step's micro-batches of random tokens, for one of `data_world` data-parallel ranks."""
    n_micro, size = run.loop.micro_batches(data_world)
    tokens = torch.randint(0, run.model.vocab_size, (n_micro, size, run.loop.seq_len + 1))
    return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in tokens]
