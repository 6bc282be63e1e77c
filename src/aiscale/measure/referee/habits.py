"""What changes no value, and is hardly intended: each function sees one such habit, and says it as
a warning."""

from __future__ import annotations

import math
from collections import Counter

import torch

from aiscale.measure.referee import samples
from aiscale.measure.referee.verdict import Verdict


def look(many: list[dict], one: list[dict], verdict: Verdict, dim_of_samples: int = 0) -> None:
    if len(many) < 2:
        return
    read = samples.counts(samples.calls_with_samples(many, 0, dim_of_samples))
    found = [repeated_epoch(many)]
    if not is_sharded(many, one):
        found += [same_samples(many, read), sends_each_micro_batch(many)]
    found += [same_masks(many, read), untied(many, one), learns_nothing(many)]
    verdict.warnings += [words for words in found if words]


def is_sharded(many: list[dict], one: list[dict]) -> bool:
    """Whether ranks hold different parts of the model, and so may read the same samples."""
    held, whole = [], one[0]["steps"][0]["weights"]
    for trace in many:
        weights = trace["steps"][0]["weights"]
        if trace.get("has_slices"):
            return True
        for name, piece in weights.items():
            right = whole.get(name, piece)
            if piece["size"] != piece["shape"] or piece["shape"] != right["shape"]:
                return True
        held.append({name: piece["shape"] for name, piece in weights.items()})
    return any(mine != held[0] for mine in held)


def same_samples(many: list[dict], read: list[Counter]) -> str:
    """All ranks compute the whole batch: N times the work, for the same result."""
    if not read[0] or any(mine != read[0] for mine in read):
        return ""
    words = f"all {len(many)} ranks compute the same {len(read[0])} samples"
    return f"{words}: nothing is gained. No sampler?"


def sends_each_micro_batch(many: list[dict]) -> str:
    """Gradients that are sent after each micro-batch, where once a step is enough."""
    first = many[0]["steps"][0]
    micro_batches = len(first["losses"])
    steps = sum(bool(step["losses"]) for step in many[0]["steps"])
    weights_bytes = sum(_bytes(piece) for piece in first["weights"].values())
    if micro_batches < 2 or not steps or not weights_bytes or not first["grad"]:
        return ""
    sent = many[0]["traffic"].get("all_reduce", 0) / steps / weights_bytes
    if sent < 0.7 * micro_batches:
        return ""
    words = f"gradients are sent {sent:.1f} times a step, for {micro_batches} micro-batches"
    return f"{words}: no_sync() sends them once"


def _bytes(piece: dict) -> int:
    """Of a weight in fp64, or else in fp32."""
    numbers = math.prod(piece["size"])
    is_whole = piece["values"].numel() == numbers
    return numbers * (8 if is_whole and piece["values"].dtype == torch.float64 else 4)


def repeated_epoch(many: list[dict]) -> str:
    """An epoch in the order of the one before: DistributedSampler.set_epoch is not called."""
    orders = []
    for step in many[0]["steps"]:
        orders.append([row for call in step["calls"] for row in call["rows"]])
    orders = [order for order in orders if order]
    for later in range(2, len(orders) - 1):
        distinct = len({tuple(order) for order in orders[:later]}) == later
        if distinct and orders[later : later + 2] == orders[:2]:
            words = f"rank 0 reads from step {later} what it read from step 0, in the same order"
            return f"{words}: does each epoch call set_epoch?"
    return ""


def same_masks(many: list[dict], read: list[Counter]) -> str:
    """Dropout: ranks with different samples begin with the same state of the generator."""
    states = [trace["steps"][0]["generator"] for trace in many]
    for rank, state in enumerate(states):
        for other in range(rank):
            if state and state == states[other] and not set(read[rank]) & set(read[other]):
                words = (
                    f"ranks {other} and {rank} draw the same dropout masks for different samples"
                )
                return f"{words}: after building the model, seed with seed + rank"
    return ""


def untied(many: list[dict], one: list[dict]) -> str:
    """Weights that are one tensor on one rank, and two copies on a rank of many."""
    for names in one[0]["tied"]:
        for trace in many:
            held = [name for name in names if name in trace["steps"][0]["weights"]]
            together = any(set(held) <= set(group) for group in trace["tied"])
            if len(held) > 1 and not together:
                words = f"{' and '.join(names)} are one tensor on one rank"
                return f"{words}, and copies on rank {trace['rank']}"
    return ""


def learns_nothing(many: list[dict]) -> str:
    """Optimizers that were given other tensors than the model has: those before fully_shard."""
    steps = many[0]["steps"]
    first, last = steps[0]["weights"], steps[-1]["weights"]
    kept = [name for name in first if name in last]
    if not kept or all(rate == 0 for step in steps for rate in step["lr"]):
        return ""
    if any(not torch.equal(first[name]["values"], last[name]["values"]) for name in kept):
        return ""
    words = "the optimizer's steps change no weight of the model: does it have other tensors?"
    return f"{words} Make it after fully_shard, and after all that replaces parameters"
