"""Aligns samples: a hash of its input tells a sample wherever it is computed.

What a pipeline's stage is given is known by its hash from what another stage has put out.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch


def dim_of_samples(many: list[dict], one: list[dict]) -> int:
    """0, or 1 if inputs are (T, B): then the ranks' rows are strange to one rank, and their columns
    are not. Columns of a (B, T) input are short: the same come again and again."""
    shared, distinct = [], []
    for key in ("rows", "columns"):
        mine, alone = _read_in_step_0(many, key), _read_in_step_0(one, key)
        shared.append(len(set(mine) & set(alone)) / max(1, len(set(alone))))
        distinct.append(len(set(alone)) / max(1, len(alone)))
    return int(shared[0] < 0.1 and shared[1] > 0.4 and distinct[1] > 0.9)


def _read_in_step_0(traces: list[dict], key: str) -> list[str]:
    calls = _flat([trace["steps"][0]["calls"] for trace in traces])
    return [piece for call in calls if call["used"] for piece in call[key]]


def _turned(call: dict) -> dict:
    """A call whose samples lie in dim 1, as if they lay in dim 0."""
    size = (len(call["rows"]), len(call["columns"]))
    activations = []
    for name, kind, values in call["activations"]:
        if values.dim() > 1 and tuple(values.shape[:2]) == size:
            activations.append((name, kind, values.transpose(0, 1)))
    return call | {"rows": call["columns"], "activations": activations, "out": []}


def calls_with_samples(traces: list[dict], step: int, dim: int = 0) -> list[list[dict]]:
    """For each rank its calls of this step that a gradient came back to, each with "samples": a
    name for each row; or for each column, if samples lie in dim 1."""
    calls = [[call for call in trace["steps"][step]["calls"] if call["used"]] for trace in traces]
    if dim:
        calls = [[_turned(call) for call in mine] for mine in calls]
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
    for trace, mine in zip(traces[1:], found[1:], strict=True):
        if _is_later_stage(trace, traces[0]) and not _flat_rows(mine) & set(origin):
            _align_in_order(mine, found[0])
    return found


def _is_later_stage(trace: dict, first: dict) -> bool:
    """Whether it has weights, and none of those of the first rank."""
    weights = set(trace["steps"][0]["weights"])
    return bool(weights) and not weights & set(first["steps"][0]["weights"])


def _flat_rows(calls: list[dict]) -> set[str]:
    return {row for call in calls for row in call["rows"]}


def _align_in_order(calls: list[dict], first_stage: list[dict]) -> None:
    """A stage that was given other bits than the stage before has put out: take its samples to come
    in the same order."""
    if [len(call["rows"]) for call in calls] != [len(call["rows"]) for call in first_stage]:
        return
    for call, before in zip(calls, first_stage, strict=True):
        call["samples"] = before["samples"]


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


def lengths(calls: list[list[dict]]) -> set[int]:
    """How long the rows are that models are given: tokens of a text, and what fills it up."""
    return {call["length"] for call in _flat(calls) if call["length"] is not None}


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


def difference(
    read: list[Counter],
    wanted: Counter,
    before: set[str],
    lengths_here: set[int],
    lengths_alone: set[int],
) -> Difference:
    """Shares that are no shares, or overlap; a last batch filled up; another batch, other lengths,
    another order.

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
    if lengths_here != lengths_alone:
        words = f"rows are {sorted(lengths_here)} long, on one rank {sorted(lengths_alone)}: each"
        words = f"{words} batch is filled up to its longest row, and one rank makes other batches"
        remedy = "equal rows can be compared: for this test, fill all up to one length"
        return Difference(words, remedy)
    words = "others than on one rank: the order depends on the number of ranks"
    return Difference(words, "read in one order, of which each rank takes its share")


def own_orders(many: list[dict], one: list[dict]) -> Difference | None:
    """Ranks that shuffle all samples, each in another order: their shares overlap.

    A rank that shuffles a part of the data draws a shorter order than one rank does."""
    for drawn in zip(*(trace["orders"] for trace in many), strict=False):
        lengths = {length for length, _ in drawn}
        digests = [digest for _, digest in drawn]
        length = drawn[0][0]
        is_whole = len(lengths) == 1 and any(length == each for each, _ in one[0]["orders"])
        odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if is_whole and odd:
            words = f"each rank shuffles all {length} samples in an order of its own"
            words = f"{words}: their shares overlap"
            remedy = "shuffle with the same seed on all ranks; a DistributedSampler does"
            return Difference(words, remedy, True, f"ranks {odd} differ from rank 0")
    return None


def _same_shares(read: list[Counter]) -> tuple[int, int] | None:
    for rank, mine in enumerate(read):
        for other in range(rank):
            if mine and mine == read[other]:
                return other, rank
    return None


def _shared(mine: Counter, total: Counter) -> bool:
    return any(total[sample] > count for sample, count in mine.items())
