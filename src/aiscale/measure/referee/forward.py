"""Compares what goes into a step and what its forward pass computes: weights, samples, activations,
loss."""

from __future__ import annotations

import torch

from aiscale.measure.referee import causes, samples
from aiscale.measure.referee.shards import is_garbage, relative
from aiscale.measure.referee.step import Step, named, stacked
from aiscale.measure.referee.trace import ROW_SKETCH
from aiscale.measure.referee.verdict import Cause, Part

#: Initial weights and buffers are copied, not computed.
COPIED = 2e-6


def initial_weights(step: Step) -> list[Part]:
    """Ranks that drew other weights than each other or than one rank; weights or buffers that
    nothing has filled."""
    if step.number:
        return []
    return _initial(step, "weights") + _initial(step, "buffers")


def _initial(step: Step, kind: str) -> list[Part]:
    many, one = step.on_many(kind), step.on_one(kind)
    both = [name for name in one if name in many]
    step.verdict.compared[kind] += len(both)
    _tell_missing(step, kind, many, one)
    odd, bad = {}, {}
    for name in both:
        apart = max(many[name].copies.values())
        if apart > COPIED:
            odd[name] = apart
        elif (difference := relative(many[name].values, one[name].values)) > COPIED:
            bad[name] = difference
    if not odd and not bad:
        return []
    wrong = odd or bad
    cause = causes.of_initial(kind, bool(odd), _garbage(step, kind, wrong))
    ranks = _odd_ranks(many, odd) if odd else "all ranks"
    where, worst = named(wrong, len(both)), max(wrong.values())
    is_input = not odd and kind == "weights" and not _garbage(step, kind, wrong)
    return [Part(step.number, f"initial {kind}", where, cause, worst, COPIED, ranks, is_input)]


def _tell_missing(step: Step, kind: str, many: dict, one: dict) -> None:
    missing = sorted(set(one) - set(many))
    if missing and kind == "weights":
        words = (
            f"weights that have no namesake on {len(step.many)} ranks: {named(missing, len(one))}"
        )
        step.verdict.not_compared.append(words)


def _odd_ranks(many: dict, odd: dict) -> str:
    ranks = {rank for name in odd for rank, apart in many[name].copies.items() if apart > COPIED}
    return f"ranks {sorted(ranks)} differ from the first that has them"


def _garbage(step: Step, kind: str, wrong: dict) -> str:
    """The name of a tensor that holds what memory held before."""
    one = step.on_one(kind)
    for name in wrong:
        for record in step.records():
            piece = record[kind].get(name)
            if piece and is_garbage(piece["values"], one[name].values):
                return name
    return ""


def samples_read(step: Step) -> list[Part]:
    """Ranks that together read other samples than one rank, or one sample more often than
    another."""
    total, wanted = (
        sum(step.read, samples.Counter()),
        sum(samples.counts(step.calls[1]), samples.Counter()),
    )
    step.verdict.compared["samples"] += len(wanted)
    repeats = {count / wanted[sample] for sample, count in total.items() if sample in wanted}
    if set(total) == set(wanted) and len(repeats) < 2:
        return []
    lengths = [samples.lengths(calls) for calls in step.calls[:2]]
    why = samples.difference(step.read, wanted, step.read_before, *lengths)
    if step.resumed:
        words = "after the restart other samples are read: the order of the data is not resumed"
        why = samples.Difference(words, "save how far the data was read, and go on there", True)
    elif not why.is_fault:
        why = samples.own_orders(step.many, step.one) or why
    missing, others = set(wanted) - set(total), set(total) - set(wanted)
    where = f"{len(missing)} of {len(wanted)} are missing, {len(others)} are others"
    cause = Cause(why.words, why.remedy, causes.DDP if why.is_fault else "")
    is_input = not why.is_fault
    return [Part(step.number, "samples", where, cause, ranks=why.ranks, is_input=is_input)]


def activations(step: Step) -> list[Part]:
    """The first module whose output differs for a sample, while all before it agree."""
    found, _ = samples.activations(step.calls[0])
    alone, kinds = samples.activations(step.calls[1])
    noisy, _ = samples.activations(step.calls[2])
    sliced = ""  # the last module of which each rank had a part, all parts together right
    for name, by_sample in alone.items():
        usable = _complete(step, name, found.get(name, {}))
        shared = [
            sample for sample in by_sample if sample in usable and sample in noisy.get(name, {})
        ]
        if not shared:
            continue
        slices = _slices_without_a_reader(shared, usable, by_sample)
        if 1 < slices <= len(step.many):
            where = f"of {name} each of {slices} ranks has a part, and they read different samples"
            return [Part(step.number, "samples", where, causes.STRANGERS, ranks="all ranks")]
        worst, allowed, ranks, was_sliced = _furthest(
            step, name, shared, usable, by_sample, noisy[name]
        )
        if ranks:
            cause = causes.of_activation(step, name, kinds[name], sliced)
            if step.is_half_on_many_alone:
                cause = causes.HALF_PRECISION
            where = f"{name or 'the model'} ({kinds[name]})"
            return [Part(step.number, "activation", where, cause, worst, allowed, ranks)]
        step.verdict.compared["activations"] += 1
        if was_sliced:
            sliced = name
    return []


def _slices_without_a_reader(shared: list[str], found: dict, alone: dict) -> int:
    """In how many slices an activation is cut, if of each sample some slices are on no rank."""
    slices = 0
    for sample in shared:
        whole = _any(alone[sample]).numel()
        sizes = [row.numel() for row in found[sample].values()]
        if min(sizes) != max(sizes) or not sizes[0] or whole % sizes[0]:
            return 0
        slices = whole // sizes[0]
        if len(sizes) >= slices:
            return 0
    return slices


def _complete(step: Step, name: str, by_sample: dict) -> dict:
    """Without ranks that have only a part of this module: a pipeline's stage is not the model."""
    inside = {
        module for module in step.one[0]["modules"] if not name or module.startswith(f"{name}.")
    }
    whole = {rank for rank, trace in enumerate(step.many) if inside <= set(trace["modules"])}
    kept = {}
    for sample, by_rank in by_sample.items():
        rows = {rank: row for rank, row in by_rank.items() if rank in whole}
        if rows:
            kept[sample] = rows
    return kept


def _furthest(step: Step, name, shared, found, alone, noisy) -> tuple[float, float, str, bool]:
    """(largest difference, what rounding explains, the ranks beyond it, whether rows were put
    together)."""
    base = stacked([_any(alone[sample]) for sample in shared])
    noise = relative(stacked([_any(noisy[sample]) for sample in shared]), base)
    is_fp64 = _any(alone[shared[0]]).dtype == torch.float64 and base.shape[1:].numel() != ROW_SKETCH
    allowed = step.tolerance(noise, is_fp64)
    worst, ranks, was_sliced = 0.0, set(), False
    for sample in shared:
        right = _any(alone[sample])
        rows = {rank: row for rank, row in found[sample].items() if row.shape == right.shape}
        if not rows:
            whole = samples.joined([row for _, row in sorted(found[sample].items())], right.shape)
            if whole is None:
                step.verdict.not_compared.append(
                    f"activation of {name or 'the model'}: each rank has a part of it"
                )
                return 0.0, allowed, "", False
            rows, was_sliced = {"all ranks, each with a part": whole}, True
        apart_by_rank = {rank: relative(row, right) for rank, row in rows.items()}
        if max(apart_by_rank.values()) > allowed and relative(sum(rows.values()), right) <= allowed:
            was_sliced = True  # each rank has a term of a sum
            continue
        for rank, apart in apart_by_rank.items():
            worst = max(worst, apart)
            if apart > allowed:
                ranks.add(rank)
    return worst, allowed, _ranks(ranks), was_sliced


def _any(by_rank: dict):
    return next(iter(by_rank.values()))


def _ranks(ranks: set) -> str:
    if not ranks or not all(isinstance(rank, int) for rank in ranks):
        return next(iter(ranks), "")
    return f"ranks {sorted(ranks)}"


def loss(step: Step) -> list[Part]:
    """A loss that is scaled by another number, or a mean over another number of tokens."""
    many, one, noisy = (_mean_loss(each, step.number) for each in (step.many, step.one, step.noisy))
    if many is None or not one or noisy is None:
        return []
    step.verdict.compared["loss"] += 1
    allowed = max(2e-5, step.tolerance(abs(noisy / one - 1)))
    difference = abs(many / one - 1)
    if difference <= allowed:
        return []
    where = f"mean over ranks {many:.6f}, on one rank {one:.6f}: {many / one:.5g} times"
    cause = causes.of_loss(many / one, step)
    return [Part(step.number, "loss", where, cause, difference, allowed, "all ranks")]


def _mean_loss(traces: list[dict], number: int) -> float | None:
    sums = []
    for trace in traces:
        losses = trace["steps"][number]["losses"]
        if losses:
            sums.append(sum(losses))
    return sum(sums) / len(sums) if sums else None
