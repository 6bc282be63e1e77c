"""Why two runs part, in words: each function looks for the traces of one mistake after the
other."""

from __future__ import annotations

from aiscale.measure.referee.shards import is_multiple, ratio, relative
from aiscale.measure.referee.step import Step
from aiscale.measure.referee.verdict import Cause

DDP, FSDP, TENSOR, WRONG = "03_ddp", "05_fsdp", "06_tensor_pipeline", "09_when_it_goes_wrong"

NO_GRADIENT = Cause(
    "it has no gradient on many ranks", "is the part of the model that uses it run, and not frozen?"
)
NO_STATES = Cause(
    "the optimizer begins anew: a checkpoint without its states?",
    "save and load its state_dict",
    WRONG,
)
DRIFTING = Cause(
    "copies of a weight have drifted apart: each rank updates with another gradient",
    "average the gradients before the optimizer's step",
    DDP,
)


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


def of_samples(words: str, is_fault: bool) -> Cause:
    if is_fault:
        return Cause(
            words, "give each rank its own share: [rank::world_size], or a DistributedSampler", DDP
        )
    remedy = "pass a batch for each rank, such as {16//N}, and read in one order on all ranks"
    return Cause(words, remedy)


def of_activation(name: str, kind: str, sliced: str) -> Cause:
    if "BatchNorm" in kind:
        remedy = "SyncBatchNorm (on GPUs), or a norm that does not look across samples"
        return Cause("BatchNorm takes mean and variance over a rank's own samples", remedy, DDP)
    if sliced and sliced != name:
        words = f"{sliced}, of which each rank has a part, is right; what goes into {name} is not"
        remedy = (
            "look for a missing sum over ranks, or a reshape that counts the heads of all ranks"
        )
        return Cause(words, remedy, TENSOR)
    words = f"everything before it agrees; what {name or 'the model'} computes does not"
    return Cause(
        words, "compare its weights, its mode (train, eval), and where its output is put together"
    )


def of_loss(factor: float, step: Step) -> Cause:
    here, alone = len(step.records()[0]["losses"]), len(step.alone["losses"])
    for record in step.records():
        here = max(here, len(record["losses"]))
    counts = [sum(record["tokens"]) for record in step.records()]
    if (
        len(set(counts)) > 1
        or len({each for record in step.records() for each in record["tokens"]}) > 1
    ):
        words = f"the ranks' means go over {counts} tokens: a mean of means weighs them wrongly"
        return Cause(words, "divide the sum by the tokens of all ranks and micro-batches", DDP)
    if alone and here and here != alone and abs(factor * alone / here - 1) < 0.02:
        words = f"{here} micro-batches a rank, {alone} on one rank"
        words = f"{words}: the loss is not divided by their number"
        return Cause(
            words + _two_readings(step), "divide each micro-batch's loss by their number", DDP
        )
    for reading in (step.data_ranks, 1 / step.data_ranks):
        if step.data_ranks > 1 and abs(factor / reading - 1) < 0.02:
            return Cause(
                "the loss is off by the number of ranks" + _two_readings(step),
                "scale it once, or not at all",
            )
    return Cause("outputs of the model agree: the loss is computed or scaled otherwise")


def _two_readings(step: Step) -> str:
    """Where N ranks have N times fewer micro-batches, one factor may have either reason."""
    here, alone = len(step.records()[0]["losses"]), len(step.alone["losses"])
    if here and alone == here * step.data_ranks and step.data_ranks > 1:
        return "; or by the number of ranks, the same factor here: try another micro-batch"
    return ""


def of_learning_rate(factor: float, ranks: int) -> Cause:
    why = ": scaled with the number of ranks" if abs(factor / ranks - 1) < 1e-6 else ""
    words = f"the learning rate is {factor:.4g} times that of one rank{why}"
    return Cause(words, "with an equal global batch the learning rate stays as it is", DDP)


def of_update(step: Step, kind: str, bad: dict, ranks_differ: bool) -> Cause:
    if kind == "buffers":
        words = "statistics come from a rank's own samples"
        return Cause(words, "SyncBatchNorm (on GPUs), or average the buffers", DDP)
    if ranks_differ:
        return DRIFTING
    if step.on_many("grad"):
        return Cause(
            "the gradient was right: the optimizer's settings, its states, or a later write differ"
        )
    before, after = step.on_many("weights"), step.on_many("weights", step.number + 1)
    alone = step.on_one("weights", step.number + 1)
    factors = []
    for name in bad:
        if name in before and name in after:
            start = before[name].values
            factors.append(ratio(after[name].values - start, alone[name].values - start))
    if not factors:
        return Cause("the update differs; the optimizer's gradients cannot be seen")
    words = f"updates are {min(factors):.3g} to {max(factors):.3g} times those of one rank"
    return Cause(words + "; the optimizer's gradients cannot be seen")


def of_gradients(step: Step, kind: str, bad: dict, odd: dict) -> tuple[Cause, str]:
    """(cause, which ranks). `odd`: gradients of which ranks have different copies."""
    if odd:
        return _of_different_copies(step, kind, odd)
    for look in (_of_one_factor, _of_tied_copies, _of_old_gradients, _of_own_factors):
        cause = look(step, kind, bad)
        if cause:
            return cause, "all ranks"
    if _right_on_average(step, bad):
        words = (
            "what comes out of backward is right on average; what is done to it afterwards is not"
        )
        return Cause(words, "look between backward() and the optimizer's step"), "all ranks"
    if step.on_many("local"):
        return Cause(
            "it is wrong when it comes out of the backward pass", lesson=TENSOR
        ), "all ranks"
    return Cause("unknown: what comes out of the backward pass cannot be seen"), "all ranks"


def _of_different_copies(step: Step, kind: str, odd: dict) -> tuple[Cause, str]:
    """Gradients that were never averaged; clipping before the average; one rank that does something
    else."""
    many, which = step.on_many(kind), _list(odd)
    ranks = sorted(
        {rank for name in odd for rank, apart in many[name].copies.items() if apart > odd[name][1]}
    )
    where = f"ranks {ranks} have other values than the first"
    own = [_is_own(step, kind, name) for name in odd]
    if all(own):
        later = step.on_many("grad")
        averaged = kind == "before_clip" and all(
            max(later[n].copies.values()) < 1e-4 for n in odd if n in later
        )
        if averaged and later:
            words = f"{which}: clipped before the average, by the norm of each rank's own gradient"
            return Cause(words, "average first, then clip", DDP), where
        words = f"{which}: each rank's own gradient, never averaged"
        return Cause(words, "all-reduce it, or let the wrapper's own forward run", DDP), where
    if len(ranks) == 1:
        return Cause(
            f"rank {ranks[0]} alone has another gradient", "look for a condition on the rank", WRONG
        ), where
    return Cause(
        f"{which}: not the same on all ranks", "average it over all ranks that have a copy", DDP
    ), where


def _is_own(step: Step, kind: str, name: str) -> bool:
    """Whether what a rank uses is a multiple of what came out of its own backward pass."""
    found = 0
    for record in step.records():
        used, local = record[kind].get(name), record["local"].get(name)
        if used is None or local is None:
            continue
        if used["values"].shape != local["values"].shape or not is_multiple(
            used["values"], local["values"]
        ):
            return False
        found += 1
    return found > 1


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
    return _read_factor(step, factor, _right_on_average(step, bad))


def _read_factor(step: Step, factor: float, right_locally: bool) -> Cause:
    words = f"all gradients are {factor:.4g} times as large"
    ranks, here, alone = (
        step.data_ranks,
        len(step.records()[0]["losses"]),
        len(step.alone["losses"]),
    )
    if ranks > 1 and abs(factor / ranks - 1) < 0.01 and right_locally:
        return Cause(
            f"{words}: summed over ranks, not averaged",
            "divide by the number of ranks, or use AVG",
            DDP,
        )
    if ranks > 1 and abs(factor * ranks - 1) < 0.01 and right_locally:
        return Cause(f"{words}: divided by the number of ranks twice", "divide once", DDP)
    if here and alone and here != alone and abs(factor * alone / here - 1) < 0.01:
        words = f"{words}: not divided by the number of micro-batches{_two_readings(step)}"
        return Cause(words, "divide each micro-batch's loss by their number", DDP)
    if right_locally:
        words = f"{words}; what comes out of backward is right, what is done to it is not"
        return Cause(
            words, "is each gradient clipped by the norm of the whole model's gradient?", WRONG
        )
    return Cause(words, "look at what the loss is divided by")


def _right_on_average(step: Step, names) -> bool:
    """Whether what came out of the ranks' backward passes is right: on average or, where losses are
    shares, in sum."""
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
                return Cause(
                    words,
                    "tie them again after to_empty, or add the gradients of the copies",
                    TENSOR,
                )
    return None


def _of_old_gradients(step: Step, kind: str, bad: dict) -> Cause | None:
    """zero_grad is missing: the gradient still contains that of the step before."""
    if not step.number:
        return None
    many, one = step.on_many(kind), step.on_one(kind)
    before = step.on_many("grad", step.number - 1)
    for name in bad:
        if (
            name not in before
            or relative(many[name].values - before[name].values, one[name].values) > 1e-3
        ):
            return None
    return Cause(
        "it still contains the gradient of the step before",
        "call optimizer.zero_grad() each step",
        WRONG,
    )


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
    remedy = "clip by the norm of the whole gradient: add the squares of all ranks before the root"
    return Cause(f"{words}: clipped by the norm of its own slices", remedy, FSDP)


def _list(names) -> str:
    names = list(names)
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
