"""Why gradients differ, in words: each function looks for the traces of one mistake."""

from __future__ import annotations

from aiscale.measure.referee.causes import (
    DDP,
    DIVIDE_BY_MICRO_BATCHES,
    FSDP,
    TENSOR,
    WRONG,
    micro_batches,
    or_by_ranks,
)
from aiscale.measure.referee.shards import is_multiple, ratio, relative
from aiscale.measure.referee.step import Step
from aiscale.measure.referee.verdict import Cause


def of_gradients(step: Step, kind: str, bad: dict, odd: dict) -> tuple[Cause, str]:
    """(cause, which ranks). `odd`: gradients of which ranks have different copies."""
    if odd:
        return _of_different_copies(step, kind, odd)
    looks = (_of_one_factor, _of_tied_copies, _of_old_gradients, _of_own_factors)
    for look in (*looks, _of_mixed_slices, _of_lost_micro_batches, _of_factor_of_some):
        cause = look(step, kind, bad)
        if cause:
            return cause, "all ranks"
    if _right_on_average(step, bad):
        words = "what comes out of backward is right on average; what is done to it later is not"
        remedy = "look between backward() and the optimizer's step"
        if max(micro_batches(step)) > 1:
            remedy = f"{remedy}: is zero_grad() called once a step"
            if _has_slices(step, kind):
                remedy = f"{remedy}, and do the slices get the average of all micro-batches (FSDP: "
                remedy = f"{remedy}set_requires_gradient_sync(True) before the last one's forward)"
            remedy = f"{remedy}?"
        return Cause(words, remedy), "all ranks"
    if step.on_many("local"):
        words = "it is wrong when it comes out of the backward pass"
        return Cause(words, lesson=TENSOR), "all ranks"
    return Cause("unknown: what comes out of the backward pass cannot be seen"), "all ranks"


def _has_slices(step: Step, kind: str) -> bool:
    pieces = [piece for record in step.records() for piece in record[kind].values()]
    return any(piece["size"] != piece["shape"] for piece in pieces)


def _of_different_copies(step: Step, kind: str, odd: dict) -> tuple[Cause, str]:
    """Gradients that were never averaged; clipping before the average; a rank that stands apart."""
    many, which = step.on_many(kind), _list(odd)
    ranks = sorted(
        {rank for name in odd for rank, apart in many[name].copies.items() if apart > odd[name][1]}
    )
    where = f"ranks {ranks} have other values than the first"
    own = [_is_own(step, kind, name) for name in odd]
    if all(own):
        later = step.on_many("grad")
        apart = [max(later[name].copies.values()) for name in odd if name in later]
        if kind == "before_clip" and apart and max(apart) < 1e-4:
            words = f"{which}: clipped before the average, by the norm of each rank's own gradient"
            return Cause(words, "average first, then clip", DDP), where
        words = f"{which}: each rank's own gradient, never averaged"
        return Cause(words, "all-reduce it, or let the wrapper's own forward run", DDP), where
    if _have_the_right_mean(step, kind, odd):
        words = f"{which}: one part of it was averaged over the ranks, another is each rank's own"
        return Cause(words, "average once, after the last micro-batch", DDP), where
    if len(ranks) == 1:
        words = f"rank {ranks[0]} alone has another gradient"
        return Cause(words, "look for a condition on the rank", WRONG), where
    words = f"{which}: not the same on all ranks"
    return Cause(words, "average it over all ranks that have a copy", DDP), where


def _have_the_right_mean(step: Step, kind: str, names) -> bool:
    mean, one = step.on_many(kind, reduce="mean"), step.on_one(kind)
    return all(
        name in one and relative(mean[name].values, one[name].values) < 1e-4 for name in names
    )


def _is_own(step: Step, kind: str, name: str) -> bool:
    """Whether what a rank uses is a multiple of what came out of its own backward pass."""
    found = []
    for record in step.records():
        if name in record[kind] and name in record["local"]:
            used, local = record[kind][name]["values"], record["local"][name]["values"]
            found.append(used.shape == local.shape and is_multiple(used, local))
    return len(found) > 1 and all(found)


def _of_one_factor(step: Step, kind: str, bad: dict) -> Cause | None:
    """Gradients that are summed, averaged twice, or not divided by the number of micro-batches."""
    many, one = step.on_many(kind), step.on_one(kind)
    compared = [name for name in one if name in many]
    if len(bad) < 0.9 * len(compared) - 2:
        return None
    factors = []
    for name in bad:
        if not is_multiple(many[name].values, one[name].values):
            return None
        factors.append(ratio(many[name].values, one[name].values))
    factor = sum(factors) / len(factors)
    if max(factors) - min(factors) > 1e-3 * abs(factor):
        return None
    if kind == "grad" and set(bad) <= step.right["before_clip"]:
        words = f"right before it is clipped, {factor:.4g} times as large after it"
        words = f"{words}: clipped by another norm, or to another number"
        return Cause(words, "is it clipped by the norm of the whole model's gradient?", WRONG)
    return _read_factor(step, factor, _right_on_average(step, bad))


def _read_factor(step: Step, factor: float, right_locally: bool) -> Cause:
    words = f"all gradients are {factor:.4g} times as large"
    ranks, (here, alone) = step.data_ranks, micro_batches(step)
    if ranks > 1 and abs(factor / ranks - 1) < 0.01 and right_locally:
        words = f"{words}: summed over ranks, not averaged"
        return Cause(words, "divide by the number of ranks, or use AVG", DDP)
    if ranks > 1 and abs(factor * ranks - 1) < 0.01 and right_locally:
        return Cause(f"{words}: divided by the number of ranks twice", "divide once", DDP)
    if here and alone and here != alone and abs(factor * alone / here - 1) < 0.01:
        words = f"{words}: not divided by the number of micro-batches"
        return or_by_ranks(Cause(words, DIVIDE_BY_MICRO_BATCHES, DDP), step)
    if right_locally:
        words = f"{words}; what comes out of backward is right, what is done to it is not"
        return Cause(words, "is it clipped by the norm of the whole model's gradient?", WRONG)
    return Cause(words, "look at what the loss is divided by")


def _right_on_average(step: Step, names) -> bool:
    """Whether what came out of backward is right: the ranks' average or, for shares, their sum."""
    right = step.on_one("local")
    for reduce in ("mean", "sum"):
        local = step.on_many("local", reduce=reduce)
        both = [name for name in names if name in local and name in right]
        if both and all(relative(local[name].values, right[name].values) < 1e-4 for name in both):
            return True
    return False


def _of_tied_copies(step: Step, kind: str, bad: dict) -> Cause | None:
    """Two names of one tensor on one rank, two tensors on many: their gradients are to be added."""
    many, one = step.on_many(kind), step.on_one(kind)
    for names in step.one[0]["tied"]:
        known = [name for name in names if name in many]
        right = next((one[name].values for name in names if name in one), None)
        if len(known) > 1 and right is not None and set(known) & set(bad):
            total = sum(many[name].values for name in known)
            if relative(total, right) < 1e-3:
                words = f"{' and '.join(known)} are one tensor on one rank and copies here"
                words = f"{words}: their gradients are not added"
                return Cause(words, "tie them again, or add the gradients of the copies", TENSOR)
    return None


def _of_old_gradients(step: Step, kind: str, bad: dict) -> Cause | None:
    """zero_grad is missing: the gradient still contains that of the step before."""
    if not step.number:
        return None
    many, one = step.on_many(kind), step.on_one(kind)
    before = step.on_many("grad", step.number - 1)
    for name in bad:
        if name not in before:
            return None
        rest = many[name].values - before[name].values
        if relative(rest, one[name].values) > 1e-3:
            return None
    words = "it still contains the gradient of the step before"
    return Cause(words, "call optimizer.zero_grad() each step", WRONG)


def _of_mixed_slices(step: Step, kind: str, bad: dict) -> Cause | None:
    """Slices that are no copies of each other, averaged over the ranks that hold them."""
    for name in bad:
        pieces = [record[kind][name] for record in step.records() if name in record[kind]]
        places = {piece["at"] for piece in pieces}
        first = pieces[0]["values"] if pieces else None
        if len(places) < 2 or len({piece["values"].shape for piece in pieces}) > 1:
            return None
        if any(relative(piece["values"], first) > 1e-5 for piece in pieces):
            return None
    words = f"{_list(bad)}: ranks that hold different slices have the same gradient"
    return Cause(words, "average over the data-parallel group alone, not over all ranks", TENSOR)


def _of_factor_of_some(step: Step, kind: str, bad: dict) -> Cause | None:
    """Gradients that are summed where all others are averaged, such as those of experts."""
    many, one = step.on_many(kind), step.on_one(kind)
    if any(not is_multiple(many[name].values, one[name].values) for name in bad):
        return None
    factors = [ratio(many[name].values, one[name].values) for name in bad]
    if not factors or max(factors) - min(factors) > 1e-3 * abs(factors[0]):
        return None
    words = f"{_list(bad)}: {factors[0]:.4g} times as large, and the others are right"
    return Cause(words, "divide by the same number as the others: do ranks sum or average?", DDP)


def _of_lost_micro_batches(step: Step, kind: str, bad: dict) -> Cause | None:
    """zero_grad between micro-batches: on one rank, too, what is used is not what came out."""
    used, came_out = step.on_one(kind), step.on_one("local")
    if kind != "before_clip" or max(micro_batches(step)) < 2:
        return None
    for name in bad:
        if name not in came_out or is_multiple(used[name].values, came_out[name].values):
            return None
    words = "it does not contain all micro-batches, on one rank neither"
    return Cause(words, "call zero_grad() once a step, not for each micro-batch", WRONG)


def _of_own_factors(step: Step, kind: str, bad: dict) -> Cause | None:
    """Slices that each rank has clipped by the norm of its own slices."""
    one, factors = step.on_one(kind), []
    for record in step.records():
        mine = []
        for name, piece in record[kind].items():
            if name not in one or one[name].is_sketch or not piece["values"].numel():
                continue
            place = zip(piece["at"], piece["size"], strict=True)
            right = one[name].values[tuple(slice(begin, begin + length) for begin, length in place)]
            if right.norm() > 1e-3:
                mine.append(ratio(piece["values"], right))
        if not mine or max(mine) - min(mine) > 2e-3 * abs(max(mine)):
            return None
        factors.append(mine[0])
    if not factors or max(factors) - min(factors) < 1e-3 * max(factors):
        return None
    numbers = ", ".join(f"{factor:.3g}" for factor in factors)
    words = f"each rank has multiplied its slices by another number, {numbers}"
    words = f"{words}: clipped by the norm of its own slices, or by a number of its own"
    remedy = "clip by the norm of the whole gradient: add the squares of all ranks before the root"
    return Cause(words, remedy, FSDP)


def _list(names) -> str:
    names = list(names)
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
