"""Aligns samples: a hash of its input tells a sample wherever it is computed.

What a pipeline's stage is given is known by its hash from what another stage has put out.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch


def calls_with_samples(traces: list[dict], step: int) -> list[list[dict]]:
    """For each rank its calls of this step that a gradient came back to, each with "samples": a
    name for each row."""
    calls = [[call for call in trace["steps"][step]["calls"] if call["used"]] for trace in traces]
    origin: dict[str, str] = {}  # the hash of what a stage has put out -> the sample
    for _ in traces:  # a stage after the other
        for call in _flat(calls):
            if len(call["out"]) == len(call["rows"]):
                origin.update(
                    {
                        out: origin.get(row, row)
                        for row, out in zip(call["rows"], call["out"], strict=True)
                    }
                )
    found = []
    for mine in calls:
        from_stages = [call for call in mine if any(row in origin for row in call["rows"])]
        kept = from_stages or mine  # other calls of a later stage only try shapes out
        found.append(
            [call | {"samples": [origin.get(row, row) for row in call["rows"]]} for call in kept]
        )
    return found


def _flat(calls: list[list[dict]]) -> list[dict]:
    return [call for mine in calls for call in mine]


def counts(calls: list[list[dict]]) -> list[Counter]:
    """How often each rank computes each sample."""
    found = []
    for mine in calls:
        found.append(Counter())
        for call in mine:
            found[-1].update(call["samples"])
    return found


def shares(read: list[Counter]) -> int:
    """In how many different shares the ranks read: the data-parallel size, if nothing is wrong."""
    return len({frozenset(mine) for mine in read if mine})


def activations(
    calls: list[list[dict]],
) -> tuple[dict[str, dict[str, dict[int, torch.Tensor]]], dict[str, str]]:
    """({module: {sample: {index of the rank: row}}}, {module: class}), modules in the order in
    which they ran."""
    found: dict = {}
    classes: dict[str, str] = {}
    for rank, mine in enumerate(calls):
        for call in mine:
            for name, kind, rows in call["activations"]:
                classes.setdefault(name, kind)
                for sample, row in zip(call["samples"], rows, strict=True):
                    found.setdefault(name, {}).setdefault(sample, {}).setdefault(rank, row)
    return found, classes


def joined(parts: list[torch.Tensor], shape: torch.Size) -> torch.Tensor | None:
    """Slices of a row, put together along the one dim in which they are short; None if that does
    not fit."""
    short = parts[0].shape
    if len(short) != len(shape):
        return None
    for dim, length in enumerate(shape):
        slices = length // max(short[dim], 1)
        rest_fits = short[:dim] == shape[:dim] and short[dim + 1 :] == shape[dim + 1 :]
        if slices > 1 and len(parts) >= slices and rest_fits and slices * short[dim] == length:
            return torch.cat(parts[:slices], dim)
    return None


_SPLIT = "give each rank its own share: [rank::world_size], or a DistributedSampler"


@dataclass(frozen=True)
class Difference:
    """Why the ranks together read something else than one rank does."""

    words: str
    remedy: str
    is_fault: bool = False  #: or only another order, which says nothing
    ranks: str = ""


def difference(read: list[Counter], wanted: Counter, before: set[str]) -> Difference:
    """Shares that are no shares, or overlap; a last batch filled up; another batch, another order.

    `before`: the samples of earlier steps."""
    total = sum(read, Counter())
    others = set(total) - set(wanted)
    if len(set(total)) < len(set(wanted)):
        same = _same_shares(read)
        if same:
            words = (
                f"rank {same[1]} reads the same samples as rank {same[0]}: are they split by rank?"
            )
            return Difference(words, _SPLIT, True, f"ranks {same[0]} and {same[1]}")
        at = [rank for rank, mine in enumerate(read) if _shared(mine, total)]
        if at and not others:
            words = "some samples are read by more than one rank"
            return Difference(words, _SPLIT, True, f"ranks {at}")
    if set(wanted) <= set(total) and others and others <= before:
        words = f"a last batch is filled up with {len(others)} samples that were read before"
        return Difference(words, "drop_last=True, or count such samples once", True)
    here, alone = sum(total.values()), sum(wanted.values())
    if here != alone:
        words = f"{here} samples in a step on {len(read)} ranks, {alone} on one"
        remedy = "pass a batch for each rank, such as {16//N}"
        return Difference(f"{words}: equal global batches can be compared", remedy)
    words = "others than on one rank: the order depends on the number of ranks"
    return Difference(words, "read in one order, of which each rank takes its share")


def _same_shares(read: list[Counter]) -> tuple[int, int] | None:
    for rank, mine in enumerate(read):
        for other in range(rank):
            if mine and mine == read[other]:
                return other, rank
    return None


def _shared(mine: Counter, total: Counter) -> bool:
    return any(total[sample] > count for sample, count in mine.items())
