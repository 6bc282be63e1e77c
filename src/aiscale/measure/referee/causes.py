"""Why two runs part, in words: each function looks for the traces of one mistake after the
other."""

from __future__ import annotations

import re
from dataclasses import replace

from aiscale.measure.referee.shards import ratio
from aiscale.measure.referee.step import Step
from aiscale.measure.referee.verdict import Cause

DDP, FSDP, TENSOR, WRONG = "03_ddp", "05_fsdp", "06_tensor_pipeline", "09_when_it_goes_wrong"
EXPERTS = "15_experts_and_context"

DIVIDE_BY_MICRO_BATCHES = "divide each micro-batch's loss by their number"
NO_GRADIENT = Cause(
    "it has no gradient on many ranks", "is the part of the model that uses it run, and not frozen?"
)
NO_GRADIENT_AT_ALL = Cause(
    "no weight has a gradient when the optimizer takes its step",
    "call backward before it, and let the gradients be sent (FSDP: set_requires_gradient_sync)",
)
HALF_PRECISION = Cause(
    "it is computed in half precision on many ranks, and in full on one",
    "the same precision in both",
)
OTHER_TENSORS = Cause(
    "no weight changes: the optimizer updates other tensors than those of the model",
    "make the optimizer after what puts new parameters into the model, as fully_shard does",
    FSDP,
)
NO_STATES = Cause(
    "the optimizer begins anew: a checkpoint without its states?",
    "save and load its state_dict",
    WRONG,
)
STRANGERS = Cause(
    "ranks that share the model's layers read different samples",
    "take the share of the data-parallel rank: ranks of one tensor-parallel group read the same",
    TENSOR,
)
DRIFTING = Cause(
    "copies of a weight have drifted apart: each rank updates with another gradient",
    "average the gradients before the optimizer's step",
    DDP,
)


def of_no_gradient(missing: list[str], step: Step, some: bool) -> Cause:
    """Weights that get a gradient on one rank alone; `some` others get one on many ranks."""
    if set(missing) <= set(step.on_many("before_clip")):
        words = (
            "its gradient was there when it was clipped, and gone when the optimizer took its step"
        )
        return Cause(words, "call zero_grad() after the step, not before it", WRONG)
    return NO_GRADIENT if some else NO_GRADIENT_AT_ALL


def of_initial(kind: str, ranks_differ: bool, garbage: str) -> Cause:
    if garbage:
        words = f"{garbage} holds what memory held before: nothing has filled it since to_empty"
        return Cause(words, "fill it after to_empty: buffers that are not saved, too", FSDP)
    if kind == "buffers":
        return Cause(
            "a buffer is not as the script makes it on one rank",
            "fill buffers again after to_empty",
            FSDP,
        )
    if ranks_differ:
        remedy = "set one seed on all ranks before the model is built, or broadcast as DDP does"
        return Cause("ranks drew different initial weights", remedy, DDP)
    return Cause(
        "initial weights depend on the number of ranks",
        "load the same weights in both to compare the rest",
    )


def of_activation(step: Step, name: str, kind: str, sliced: str) -> Cause:
    """`sliced`: the last module before it whose parts on the ranks made up the right whole."""
    if "BatchNorm" in kind:
        remedy = "SyncBatchNorm (on GPUs), or a norm that does not look across samples"
        return Cause("BatchNorm takes mean and variance over a rank's own samples", remedy, DDP)
    if sliced and sliced != name:
        into = f"goes into {name}" if name else "the model makes of it"
        words = f"{sliced}, of which each rank has a part, is right; what {into} is not"
        remedy = (
            "look for a reshape that counts the heads of all ranks, a fused matrix whose columns "
            "are dealt out without regard to heads, or a missing sum over ranks"
        )
        return Cause(words, remedy, TENSOR)
    if wrongly_dealt := _of_stages(step):
        return wrongly_dealt
    words = f"everything before it agrees; what {name or 'the model'} computes does not"
    return Cause(
        words, "compare its weights, its mode (train, eval), and where its output is put together"
    )


def _missing(names: list[str]) -> Cause:
    words = f"no rank has {', '.join(names[:3])}: is a layer missing?"
    return Cause(words, "deal out all layers, those that remain of a division too", TENSOR)


def _of_experts(
    apart: set[str], twice: list[tuple[str, int]], rank: int, other: int
) -> Cause | None:
    """Two ranks that differ only inside of blocks that both have: parts of them are shared out."""
    shared = [f"{place}{number}." for place, number in twice]
    if not all(module.startswith(tuple(shared)) for module in apart):
        return None
    words = f"ranks {other} and {rank} share out parts such as {min(apart)}, and something is wrong"
    remedy = (
        "follow a row there and back: its place in the order, the counts, its weight in the sum"
    )
    return Cause(f"{words} in what goes to them or comes back", remedy, EXPERTS)


def _of_stages(step: Step) -> Cause | None:
    """Blocks of a pipeline that no stage has, or that a stage has without those between."""
    held, wanted = [_blocks(trace) for trace in step.many], _blocks(step.one[0])
    everywhere = {block for blocks in held for block in blocks}
    if missing := sorted(wanted - everywhere):
        return _missing([f"{place}{number}" for place, number in missing])
    modules = [set(trace["modules"]) for trace in step.many]
    for rank, blocks in enumerate(held):
        for other in range(rank):
            apart = modules[rank] ^ modules[other]
            if apart and (twice := sorted(blocks & held[other])):
                if experts := _of_experts(apart, twice, rank, other):
                    return experts
                words = f"ranks {other} and {rank} are different stages"
                words = f"{words}, and both have {twice[0][0]}{twice[0][1]}"
                return Cause(words, "give each block to one stage", TENSOR)
        for place in sorted({place for place, _ in blocks}):
            mine = sorted(number for each, number in blocks if each == place)
            if mine[-1] - mine[0] >= len(mine):
                words = f"rank {rank} has the blocks {mine} of {place.rstrip('.')}"
                words = f"{words}, and those between are on other ranks: they run in another order"
                remedy = (
                    "give a stage blocks that follow each other, unless its schedule interleaves"
                )
                return Cause(words, remedy, TENSOR)
    return None


def _blocks(trace: dict) -> set[tuple[str, int]]:
    """What a rank has of lists of modules: the list, and the place in it."""
    found = (re.match(r"(.*?\.)(\d+)\.", module) for module in trace["modules"])
    return {(block[1], int(block[2])) for block in found if block}


def of_loss(factor: float, step: Step) -> Cause:
    """A number that the loss is not divided by, or divided by twice; a mean of means."""
    here, alone = micro_batches(step)
    if alone and here and here != alone and abs(factor * alone / here - 1) < 1e-3:
        words = f"{here} micro-batches a rank, {alone} on one rank"
        words = f"{words}: the loss is not divided by their number"
        return or_by_ranks(Cause(words, DIVIDE_BY_MICRO_BATCHES, DDP), step)
    if here > 1 and here != step.data_ranks and abs(factor / here - 1) < 1e-3:
        words = f"the losses of {here} micro-batches are added up, not divided by their number"
        return Cause(words, DIVIDE_BY_MICRO_BATCHES, DDP)
    if here > 1 and here != step.data_ranks and abs(factor * here - 1) < 1e-3:
        words = f"the loss is divided by the number of micro-batches, {here}, twice"
        return Cause(words, "divide once: some libraries do it themselves", DDP)
    for reading in (step.data_ranks, 1 / step.data_ranks):
        if step.data_ranks > 1 and abs(factor / reading - 1) < 1e-3:
            return Cause("the loss is off by the number of ranks", "scale it once, or not at all")
    if here > 1 and abs(factor / here - 1) < 1e-3:
        words = f"the losses of {here} micro-batches are added up, not divided by their number"
        return Cause(words, DIVIDE_BY_MICRO_BATCHES, DDP)
    counts = [sum(record["tokens"]) for record in step.records() if record["losses"]]
    if _is_mean_of_means(step):
        words = f"the ranks' means go over {counts} tokens: a mean of means weighs them wrongly"
        return Cause(words, "divide the sum by the tokens of all ranks and micro-batches", DDP)
    shares = [sum(mine.values()) for mine in step.read if mine]
    if len(set(shares)) > 1:
        words = f"the ranks' means go over {shares} samples: a mean of means weighs them wrongly"
        return Cause(words, "equal shares, or the sum divided by the samples of all ranks", DDP)
    held = {name for record in step.records() for name in record["weights"]}
    if missing := sorted(set(step.on_one("weights")) - held):
        return _missing(missing)
    if not step.verdict.compared["activations"]:
        return Cause("the loss, or what it is computed from: no output could be compared")
    return Cause("outputs of the model agree: the loss is computed or scaled otherwise")


def _is_mean_of_means(step: Step) -> bool:
    """Whether losses that are weighted by their tokens agree, of ranks or of micro-batches."""
    alone = [step.alone]
    for weighted in (_mean_over_ranks, _mean_over_micro_batches):
        here, right = weighted(step.records()), weighted(alone)
        if here and right and abs(here / right - 1) < 2e-4:
            return True
    return False


def _mean_over_ranks(records: list[dict]) -> float:
    total, tokens = 0.0, 0
    for record in records:
        total += sum(record["losses"]) * sum(record["tokens"])
        tokens += sum(record["tokens"])
    return total / tokens if tokens else 0.0


def _mean_over_micro_batches(records: list[dict]) -> float:
    """Each rank divides the loss of a micro-batch by the number of its micro-batches."""
    total, tokens = 0.0, 0
    for record in records:
        count = len(record["losses"])
        if count != len(record["tokens"]):
            return 0.0
        for loss, size in zip(record["losses"], record["tokens"], strict=True):
            total += loss * count * size
            tokens += size
    return total / tokens if tokens else 0.0


def micro_batches(step: Step) -> tuple[int, int]:
    """Of a rank, and on one rank: each begins a backward pass."""
    here = max(len(record["losses"]) for record in step.records())
    return here, len(step.alone["losses"])


def or_by_ranks(cause: Cause, step: Step) -> Cause:
    """Where N ranks have N times fewer micro-batches, one factor may have either reason."""
    here, alone = micro_batches(step)
    if step.data_ranks < 2 or not here or alone != here * step.data_ranks:
        return cause
    words = f"{cause.words}; or by the number of ranks, the same factor here"
    remedy = "another micro-batch on one rank, by --reference-args, tells which"
    return replace(cause, words=words, remedy=remedy, is_open=True)


def of_learning_rate(factor: float, ranks: int, is_later: bool) -> Cause:
    """`is_later`: it was the same in the first step."""
    if is_later:
        words = f"it was the same at first, and is {factor:.4g} times that of one rank now"
        words = f"{words}: the schedule depends on the number of ranks"
        remedy = "is its length the number of a rank's batches, or does each step advance it twice?"
        return Cause(words, remedy, DDP)
    why = ": scaled with the number of ranks" if abs(factor / ranks - 1) < 1e-6 else ""
    words = f"the learning rate is {factor:.4g} times that of one rank{why}"
    return Cause(words, "with an equal global batch the learning rate stays as it is", DDP)


def of_update(step: Step, kind: str, bad: dict, ranks_differ: bool) -> Cause:
    """The gradients agree, or cannot be seen, and the next weights or buffers differ."""
    if kind == "buffers":
        words = "statistics come from a rank's own samples"
        return Cause(words, "SyncBatchNorm (on GPUs), or average the buffers", DDP)
    if ranks_differ:
        return DRIFTING
    if step.on_many("grad"):
        words = "the gradient was right: the optimizer's settings, its states, or a later write"
        return Cause(f"{words} differ")
    before, after = step.on_many("weights"), step.on_many("weights", step.number + 1)
    alone = step.on_one("weights", step.number + 1)
    factors = []
    for name in bad:
        if name in before and name in after:
            start = before[name].values
            factors.append(ratio(after[name].values - start, alone[name].values - start))
    if factors and not any(factors):
        return OTHER_TENSORS
    if all(abs(factor - 1) < 0.01 for factor in factors):
        return Cause("the update differs; the optimizer's gradients cannot be seen")
    if max(map(abs, factors)) < 1e-6:
        words = "the optimizer's steps do not change them: it has other tensors than the model"
        return Cause(words, "make it from the parameters of the model that is trained")
    words = f"updates are {min(factors):.3g} to {max(factors):.3g} times those of one rank"
    return Cause(words + "; the optimizer's gradients cannot be seen")
