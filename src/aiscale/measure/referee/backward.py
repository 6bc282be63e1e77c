"""Compares what comes out of a step.

That is: gradients before clipping and as the optimizer uses them, its settings and states, and the
next weights.
"""

from __future__ import annotations

from aiscale.measure.referee import causes, gradient_causes
from aiscale.measure.referee.shards import relative
from aiscale.measure.referee.step import ONLY_NOISE, Step, named
from aiscale.measure.referee.verdict import Part

_WORDS = {"before_clip": "gradient before clipping", "grad": "gradient that the optimizer uses"}


def gradients(step: Step) -> list[Part]:
    """Gradients that are no average over the ranks, averaged twice, clipped by a norm of their own,
    or missing."""
    parts = []
    for kind in ("before_clip", "grad"):
        parts += _gradients(step, kind) + _missing(step, kind)
    return parts


def _gradients(step: Step, kind: str) -> list[Part]:
    many, one = step.on_many(kind), step.on_one(kind)
    bad, odd = {}, {}
    for name in one:
        if name not in many:
            continue
        noise = step.noise_of(kind, name)
        if noise > ONLY_NOISE:
            step.verdict.only_noise.append(name)
            continue
        allowed = step.tolerance(noise, one[name].is_fp64)
        step.verdict.compared["gradients"] += 1
        difference = relative(many[name].values, one[name].values)
        if difference > allowed and _is_turned_choice(step, name, many[name], one[name], allowed):
            continue
        copies_apart = max(many[name].copies.values())
        if difference > allowed:
            bad[name] = (difference, allowed)
        if copies_apart > allowed:
            odd[name] = (copies_apart, allowed)
        if max(difference, copies_apart) <= allowed:
            step.right[kind].add(name)
    if not bad and not odd:
        return []
    shown = odd or bad
    cause, ranks = gradient_causes.of_gradients(step, kind, bad, odd)
    size, allowed = max(shown.values())
    return [Part(step.number, _WORDS[kind], named(shown, len(one)), cause, size, allowed, ranks)]


def _is_turned_choice(step: Step, name: str, many, one, allowed: float) -> bool:
    """Top-k and routing: rounding turns a choice, and a few entries of a sparse gradient are
    others."""
    if many.is_sketch or one.values.dim() < 2:
        return False
    apart = (many.values - one.values).abs() > allowed * one.values.abs().max()
    is_sparse = (one.values == 0).double().mean() > 0.2
    if not is_sparse or apart.double().mean() > 2e-3:
        return False
    step.choices.add(name)
    entries = f"{int(apart.sum())} of {apart.numel()} entries of the gradient"
    words = f"{entries} of {name} in step {step.number}"
    step.verdict.not_compared.append(f"{words}: a choice (top-k, routing) that rounding can turn")
    return True


def _is_turned_sign(step: Step, name: str, many, one) -> bool:
    """Adam's first step is the gradient's sign: in half precision, rounding turns that of entries
    near 0, in a gradient that agrees, or that a library hides."""
    is_half = any("half precision" in trace["notes"] for trace in step.one)
    is_hidden = any(trace["unseen"] for trace in step.many)
    agrees = name in step.right["grad"] or is_hidden
    if not is_half or not agrees or many.is_sketch:
        return False
    apart = (many.values - one.values).abs() > 0.05 * one.values.abs().max()
    if apart.double().mean() > 0.05:
        return False
    words = f"{int(apart.sum())} of {apart.numel()} entries of {name} are more than 5 % apart"
    words = f"{words} after step {step.number}"
    step.verdict.not_compared.append(f"{words}: in half precision rounding turns an update's sign")
    return True


def _is_enlarged_rounding(step: Step, many, one) -> bool:
    """Adam enlarges the rounding of entries whose gradient is near 0.

    Where a library hides the gradients, they cannot tell which entries these are. Measured for
    Megatron-Core: rounding moves an entry by 8e-5 of the largest, the usual faults by 6e-3.
    """
    if not any(trace["unseen"] for trace in step.many) or many.is_sketch:
        return False
    apart = (many.values - one.values).abs().max()
    return bool(apart < 2e-4 * one.values.abs().max())


def _missing(step: Step, kind: str) -> list[Part]:
    """A weight that learns on one rank and gets no gradient on many."""
    have, many, one = step.on_many(kind), step.on_many("weights"), step.on_one(kind)
    seen = {name for record in step.records() for name in record[kind]}
    missing = [name for name in one if name in many and name not in have and name not in seen]
    hides_gradients = any(trace["unseen"] for trace in step.many) or kind == "before_clip"
    if not missing or (not have and hides_gradients):
        return []
    cause = causes.of_no_gradient(missing, step, some=bool(have))
    return [Part(step.number, _WORDS[kind], named(missing, len(one)), cause, ranks="all ranks")]


def most_agree(step: Step) -> bool:
    """Whether more than half of the gradients agree, as they are or as means over the ranks: then
    the loss has not made the others wrong."""
    kind = "before_clip" if step.on_one("before_clip") else "grad"
    means, one = step.on_many(kind, reduce="mean"), step.on_one(kind)
    compared = [name for name in one if name in means]
    agree = 0
    for name in compared:
        is_right = name in step.right[kind]
        agree += is_right or relative(means[name].values, one[name].values) < 1e-4
    return agree > len(compared) / 2


def copies(step: Step) -> list[Part]:
    """Copies of a weight that are no longer the same: seen without a run on one rank."""
    many = step.on_many("weights", step.number + 1)
    apart = {name: max(whole.copies.values()) for name, whole in many.items()}
    odd = {name: size for name, size in apart.items() if size > 1e-4}
    if not odd:
        return []
    worst = max(odd.values())
    return [
        Part(
            step.number,
            "next weights",
            named(odd, len(many)),
            causes.DRIFTING,
            worst,
            1e-4,
            "copies on ranks",
        )
    ]


def learning_rate(step: Step) -> list[Part]:
    """A learning rate that depends on the number of ranks."""
    right = step.alone["lr"]
    for rank, record in enumerate(step.records()):
        rates = record["lr"]
        if rates and right and abs(rates[0] - right[0]) > 1e-9 * abs(right[0]):
            where = f"{rates[0]:.3g}, on one rank {right[0]:.3g}"
            factor = rates[0] / right[0] if right[0] else float("inf")
            cause = causes.of_learning_rate(factor, len(step.many), step.number > 0)
            return [Part(step.number, "learning rate", where, cause, ranks=f"rank {rank}")]
    return []


def states(step: Step) -> list[Part]:
    """States of the optimizer that are missing: a checkpoint without them."""
    have, wanted = step.on_many("states"), step.on_one("states")
    missing = sorted(set(wanted) - set(have))
    sees_gradients = any(record["grad"] for record in step.records())
    in_part = {name for record in step.records() for name in record["states"]}
    missing = [name for name in missing if name not in in_part]
    if not sees_gradients or not missing:
        return []
    return [
        Part(
            step.number,
            "optimizer's states",
            named(missing, len(wanted)),
            causes.NO_STATES,
            ranks="all ranks",
        )
    ]


def next_weights(step: Step) -> list[Part]:
    """Weights and buffers after the step: an update by other settings, statistics of a rank's own,
    a later write."""
    return _next(step, "weights") + _next(step, "buffers")


def _next(step: Step, kind: str) -> list[Part]:
    after = step.number + 1
    many, one = step.on_many(kind, after), step.on_one(kind, after)
    bad, odd = {}, {}
    for name in one:
        if name not in many or name in step.choices:
            continue
        noise = step.noise_of(kind, name, after)
        if noise > ONLY_NOISE:
            continue
        allowed = step.tolerance(noise, one[name].is_fp64)
        copies_apart = max(many[name].copies.values())
        step.verdict.compared["updates" if kind == "weights" else kind] += 1
        difference = relative(many[name].values, one[name].values)
        if difference > allowed and not (
            _is_enlarged_rounding(step, many[name], one[name])
            or _is_turned_sign(step, name, many[name], one[name])
        ):
            bad[name] = (difference, allowed)
        if copies_apart > allowed:
            odd[name] = (copies_apart, allowed)
    shown = odd or bad
    if not shown:
        return []
    cause = causes.of_update(step, kind, bad, bool(odd))
    size, allowed = max(shown.values())
    ranks = "copies on ranks differ" if odd else "all ranks"
    return [Part(step.number, f"next {kind}", named(shown, len(one)), cause, size, allowed, ranks)]
