"""Graders of the exercises on ZeRO: pieces are compared with labelled numbers, clipping with torch's."""

import ast
import random
import re

import numpy as np
import torch

from aiscale import cost
from aiscale.lesson.gap_grader import Gap
from aiscale.lesson.grading import exercise, require

# 04.a ---------------------------------------------------------------------------------------------------------------

P = 4 * 236_928  #: bytes of the GPT's parameters in fp32

by_hand = Gap(
    "04.a",
    "Who updates what",
    "train_zero1.py",
    minutes=10,
    arguments="--steps 2",
    saves=False,
    against_arguments="--micro-batch 4",  # so that a factor tells ranks from micro-batches
    explained={
        "has no attribute 'step'": "the loop calls `Zero1(model, lr)` and `optimizer.step()`",
        "can't optimize a non-leaf": "the share is cut from a tensor with a graph: `detach()` the buffer first",
        "updates are ": "is a gradient of another share, or of this rank alone, used?",
        "the update differs": "clip to norm 1, by the norm of the whole gradient: the square root of the sum of the "
        "squares of all shares",
        "updates other tensors": "after `vector_to_parameters(buffer, parameters)` these are windows onto it",
        "no weight changes": "the optimizer takes no step",
    },
    hints=[
        "`__init__`: one flat buffer without a graph; make the parameters windows onto it; the optimizer's only tensor "
        "is `buffer.chunk(world_size)[rank]`, with `requires_grad_()`.",
        "`step` begins with one flat gradient of all parameters. `dist.reduce_scatter` fills `own.grad`, which must be "
        "there: `torch.empty_like(own)`. Mean, not sum.",
        "The square of the whole norm is the sum of the shares' squares: one all_reduce of one number. Clip, step, and "
        "`dist.all_gather(list(buffer.chunk(world_size)), own.detach())`.",
    ],
    solution="""
    def __init__(self, model, lr):
        self.weights = list(model.parameters())
        self.flat = parameters_to_vector(self.weights).detach()  # all weights, one after the other
        vector_to_parameters(self.flat, self.weights)
        self.own = self.flat.chunk(world_size)[rank].requires_grad_()
        self.adam = torch.optim.AdamW([self.own], lr=lr)

    def step(self):
        gradient = parameters_to_vector([weight.grad for weight in self.weights])
        self.own.grad = torch.empty_like(self.own)
        dist.reduce_scatter(self.own.grad, list(gradient.chunk(world_size)), dist.ReduceOp.AVG)
        squares = self.own.grad.square().sum()
        dist.all_reduce(squares)  # of all shares
        clip_grads_with_norm_([self.own], 1.0, squares.sqrt())
        self.adam.step()
        dist.all_gather(list(self.flat.chunk(world_size)), self.own.detach())
    """,
)


@by_hand.demand
def weights_are_gathered_once(tried):
    if tried.omitted:
        return  # a step of the optimizer, which the verdict tells
    gathered = (tried.traffic.get("all_gather", 0) + tried.traffic.get("broadcast", 0)) / P
    require(gathered < 1.1, f"a rank gathers {gathered:.2f} times the weights in a step: once is enough")


NUMBERS = 4 * 8 * 8  #: of a small model


class Network:
    """`dist` for rank 0 of two, in one process: rank 1 has three times rank 0's gradients."""

    ReduceOp = torch.distributed.ReduceOp

    def __init__(self):
        self.others_square = 0.0

    def reduce_scatter(self, output, input_list, op=torch.distributed.ReduceOp.SUM, **_):
        times = 2.0 if op == torch.distributed.ReduceOp.AVG else 4.0
        output.copy_(times * input_list[0])
        self.others_square = (times * input_list[1]).square().sum()

    def all_reduce(self, tensor, *args, **kwargs):
        assert tensor.numel() == 1
        tensor += self.others_square

    def all_gather(self, tensor_list, tensor, **_):
        tensor_list[0].copy_(tensor)


def tried_alone(script: str) -> tuple[int, torch.Tensor | None, torch.Tensor]:
    """Of rank 0's AdamW: its numbers, the gradient of its step, and what that gradient should be.

    The gradient is shorter than 1, so that nothing is clipped. None: the step does not follow.
    """
    given: list = []

    class Kept(torch.optim.AdamW):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            given.append(self)

        def step(self, *args, **kwargs):
            self.seen = torch.cat([weight.grad.flatten() for weight in weights_of(self)])
            return super().step(*args, **kwargs)

    def weights_of(optimizer):
        return [weight for group in optimizer.param_groups for weight in group["params"]]

    tree = ast.parse(script)
    parts = [each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == "Zero1"]
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(4)))
    names = {"dist": Network(), "rank": 0, "world_size": 2, "device": torch.device("cpu"), "torch": torch}
    utils = torch.nn.utils
    for name in ("parameters_to_vector", "vector_to_parameters", "clip_grads_with_norm_"):
        names[name] = getattr(utils, name)
    real, torch.optim.AdamW = torch.optim.AdamW, Kept
    try:
        exec(compile(ast.Module(parts, []), "train_zero1.py", "exec"), names)
        optimizer = names["Zero1"](model, 0.1)
        held = sum(weight.numel() for weight in weights_of(given[0]))
        gradient = 1e-3 * torch.randn(NUMBERS)
        for weight, part in zip(model.parameters(), gradient.split(8 * 8), strict=True):
            weight.grad = part.view_as(weight).clone()
        mean = 2 * gradient[: NUMBERS // 2]
        try:
            optimizer.step()
        except Exception:
            return held, None, mean
        return held, given[0].seen, mean
    finally:
        torch.optim.AdamW = real


@by_hand.look
def a_share_and_its_mean(folder):
    try:
        held, seen, mean = tried_alone((folder / "train_zero1.py").read_text())
    except Exception:
        return  # in a style that this process cannot follow, or with an error that the ranks will tell
    told = f"on two ranks a rank has the states of {held} numbers, and the model has {NUMBERS}: a share is half"
    require(held <= NUMBERS // 2, told)
    if seen is not None and seen.shape == mean.shape:
        told = "the optimizer gets the sum of the ranks' gradients, not their mean; a gradient longer than 1 hides it"
        require(not torch.allclose(seen, 2 * mean), f"{told}, for it is clipped")
        told = "the optimizer gets this rank's own gradient: of its share it needs the mean over the ranks"
        require(not torch.allclose(seen, mean / 2), told)


def _zero1(*changes):
    lines = by_hand.lines
    for old, new in changes:
        assert old in lines, old
        lines = lines.replace(old, new)
    return lines


by_hand.refuses("all states on each rank", "a share is half", _zero1((".chunk(world_size)[rank].req", ".req")))
by_hand.refuses("the sum", "not their mean", _zero1((", dist.ReduceOp.AVG", "")))
by_hand.refuses(
    "clipped by its own norm", "all shares", _zero1(("    dist.all_reduce(squares)  # of all shares\n", ""))
)
by_hand.refuses(
    "not clipped", "all shares", _zero1(("    clip_grads_with_norm_([self.own], 1.0, squares.sqrt())\n", ""))
)
by_hand.refuses(
    "nothing is gathered",
    "have drifted apart",
    _zero1(("    dist.all_gather(list(self.flat.chunk(world_size)), self.own.detach())", "    pass")),
)
by_hand.refuses(
    "the buffer is no model's", "windows onto it", _zero1(("    vector_to_parameters(self.flat, self.weights)\n", ""))
)
by_hand.refuses(
    "the next rank's share", "of another share", _zero1(("(world_size)[rank]", "(world_size)[(rank + 1) % world_size]"))
)
_SCATTER = "    dist.reduce_scatter(self.own.grad, list(gradient.chunk(world_size)), dist.ReduceOp.AVG)\n"
_OWN = ("torch.empty_like(self.own)", "gradient.chunk(world_size)[rank].clone()")
by_hand.refuses("nothing reduced", "this rank's own gradient", _zero1((_SCATTER, ""), _OWN))
by_hand.refuses("Adam's own rate", "learning rate", _zero1((", lr=lr", "")))
by_hand.refuses("no step", "took a step", _zero1(("    self.adam.step()\n", "")))
by_hand.refuses("no name of the loop's", "calls `Zero1(model, lr)`", _zero1(("def step(", "def update(")))

# 04.b ---------------------------------------------------------------------------------------------------------------

engine = Gap(
    "04.b",
    "The engine",
    "train_zero.py",
    minutes=7,
    arguments="--steps 2",
    limit_s=150,
    explained={
        "'tuple' object has no attribute": "initialize returns several things, of which the engine is the first",
        "'NoneType'": "where no checkpoint is, load_checkpoint returns None, None: then begin with step 0",
        "requires an optimizer": "initialize was given none",
        "'str' and 'str'": 'the two "auto" of the JSON are still there: write the numbers of this run over them',
        "samples in a step": "train_batch_size counts the samples of a step over all ranks, and "
        "train_micro_batch_size_per_gpu those that a rank computes at once",
    },
    hints=[
        "The JSON is a dict, in which both sizes are `auto`: `settings |= {...}` writes this run's over them.",
        "`deepspeed.initialize` takes model, optimizer and config by these names, and returns a tuple: `engine, *_`.",
        '`engine.load_checkpoint` returns the folder, or None, and the dict that was saved: `saved["steps"]`.',
    ],
    solution="""
    settings = json.load(args.config)
    settings |= {"train_batch_size": args.batch, "train_micro_batch_size_per_gpu": args.micro_batch}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    check_shared(args.save)
    folder, saved = engine.load_checkpoint(args.save)
    first = saved["steps"] if folder else 0
    """,
)


@engine.demand_with("--steps 2", after="--steps 1")
def goes_on_from_its_checkpoint(tried):
    found = dict(re.findall(r"^step (\d+) loss (\S+)", tried.printed, flags=re.MULTILINE))
    right = dict(re.findall(r"^step (\d+) loss (\S+)", tried.expected, flags=re.MULTILINE))["1"]
    told = "started again after one step it begins at step 0: set `first` to the steps that were saved"
    require(sorted(found) == ["1"], told)
    told = f"started again after one step it has the loss {found['1']}, where {right} is right: load the checkpoint"
    require(abs(float(found["1"]) - float(right)) < 2e-5, told)


_ENGINE = """
settings = json.load(args.config)
settings |= {{"train_batch_size": {batch}, "train_micro_batch_size_per_gpu": {micro_batch}}}
{given} = deepspeed.initialize({of})
check_shared(args.save)
{load}
"""


def refuse_engine(name: str, message: str, **wrong: str) -> None:
    right = {"batch": "args.batch", "micro_batch": "args.micro_batch", "given": "engine, *_"}
    right |= {"of": "model=model, optimizer=optimizer, config=settings"}
    right |= {"load": 'folder, saved = engine.load_checkpoint(args.save)\nfirst = saved["steps"] if folder else 0'}
    engine.refuses(name, message, _ENGINE.format(**right | wrong))


refuse_engine(
    "a step for each micro-batch", "those that a rank computes at once", micro_batch="args.batch // world_size"
)
refuse_engine("the batch of a rank", "over all ranks", batch="args.batch // world_size")
refuse_engine("the whole tuple", "of which the engine is the first", given="engine")
refuse_engine("no optimizer", "was given none", of="model=model, config=settings")
refuse_engine(
    "the JSON as it is",
    "are still there",
    of="model=model, optimizer=optimizer, config=json.load(open(args.config.name))",
)
refuse_engine("it never goes on", "begins at step 0", load="engine.load_checkpoint(args.save)\nfirst = 0")
refuse_engine(
    "it takes a checkpoint for granted",
    "begin with step 0",
    load='folder, saved = engine.load_checkpoint(args.save)\nfirst = saved["steps"]',
)
refuse_engine(
    "nothing is loaded",
    "load the checkpoint",
    load='from pathlib import Path\nfirst = int(Path(args.save, "latest").exists())',
)
refuse_engine(
    "clipped to another number",
    "the update differs",
    of='model=model, optimizer=optimizer, config=settings | {"gradient_clipping": 0.0}',
)

# 04.c ---------------------------------------------------------------------------------------------------------------

its_step = Gap(
    "04.c",
    "A step of the engine",
    "train_zero.py",
    minutes=6,
    arguments="--steps 2",
    against_arguments="--micro-batch 4",  # so that a factor tells ranks from micro-batches
    limit_s=150,
    explained={
        "took a step": "engine.step counts micro-batches: call it after each micro-batch, and it acts after the last",
        "Expected parameter `tensor`": "weights have no gradient, for the engine has them, and averages them",
        "updates other tensors": "the engine updates copies of the weights: call engine.step",
        "KeyError": "the engine takes a step, and there was no backward pass",
        "samples in a step": "the optimizer takes a step after each micro-batch: leave it to the engine",
    },
    hints=[
        "The engine takes the model's place, in the forward pass too, and does all that stands behind the loop in "
        "train_ranks.py: it averages, clips, updates, and clears gradients.",
        "For each micro-batch: `part = loss_of(engine(x), y)`, `engine.backward(part)`, `engine.step()`. The engine "
        "counts them.",
        "The loss is yours: the mean over the micro-batches, and over the ranks.",
    ],
    solution="""
        for i, micro_batch in enumerate(micro_batches):
            part = loss_of(engine(micro_batch[:, :-1]), micro_batch[:, 1:])
            engine.backward(part)  # divides by the number of micro-batches
            if i == 0 and step + 1 == args.steps and rank == 0:
                print(f"rank 0 holds {held_bytes(model)} bytes", flush=True)
            engine.step()  # acts after the last micro-batch only
            loss += part.detach() / len(micro_batches)
        dist.all_reduce(loss, dist.ReduceOp.AVG)  # each rank knows the loss of its own share
    """,
)


@its_step.demand
def says_what_it_holds(tried):
    told = "rank 0 does not say in the last step what it holds: put the two lines that are given after engine.backward"
    require("rank 0 holds" in tried.printed or tried.verdict.unknown, told)


_STEP = """
for i, micro_batch in enumerate(micro_batches):
    part = loss_of({model}(micro_batch[:, :-1]), micro_batch[:, 1:]){over}
    {backward}
    if i == 0 and step + 1 == args.steps and rank == 0:
        print(f"rank 0 holds {{held_bytes(model)}} bytes", flush=True)
    {step}
    loss += part.detach(){share}
{last}
"""
_MEAN = "dist.all_reduce(loss, dist.ReduceOp.AVG)"


def refuse_step(name: str, message: str, **wrong: str) -> None:
    right = {"model": "engine", "over": "", "backward": "engine.backward(part)", "step": "engine.step()"}
    its_step.refuses(name, message, _STEP.format(**right | {"share": " / len(micro_batches)", "last": _MEAN} | wrong))


refuse_step("divided twice", "twice", over=" / len(micro_batches)", share="")
refuse_step("the optimizer steps, too", "leave it to the engine", step="engine.step()\n    optimizer.step()")
refuse_step(
    "the optimizer steps instead", "call engine.step", step="", last=f"optimizer.step()\noptimizer.zero_grad()\n{_MEAN}"
)
refuse_step(
    "only after the last", "after each micro-batch", step="if i + 1 == len(micro_batches):\n        engine.step()"
)
refuse_step("one step after the loop", "after each micro-batch", step="", last=f"engine.step()\n{_MEAN}")
refuse_step("no step", "after each micro-batch", step="")
refuse_step("no backward", "no backward pass", backward="pass")
refuse_step("the loss of rank 0", "is the mean", last="")
refuse_step("a sum of losses", "is the mean", share="")
refuse_step(
    "averaged by hand",
    "the engine has them",
    last=f"for weight in model.parameters():\n    dist.all_reduce(weight.grad, dist.ReduceOp.AVG)\n{_MEAN}",
)
refuse_step("silent", "the two lines that are given", backward="engine.backward(part)\n    i = 1")
its_step.refuses(
    "the whole batch at once",
    "after each micro-batch",
    f"""
    part = loss_of(engine(batch[:, :-1]), batch[:, 1:])
    engine.backward(part)
    engine.step()
    loss += part.detach()
    {_MEAN}
    """,
)

# 04.1 ---------------------------------------------------------------------------------------------------------------


def labels(sizes: list[int]) -> list[tuple[int, int]]:
    """Each number of each tensor, end to end: (tensor, position)."""
    return [(tensor, position) for tensor, size in enumerate(sizes) for position in range(size)]


def dealt(sizes: list[int], ranks: int) -> list[list[tuple[int, int]]]:
    """The numbers of each rank: padded, and cut into equal rows by numpy."""
    row = np.arange(sum(sizes))
    padded = np.pad(row, (0, -len(row) % ranks), constant_values=-1).reshape(ranks, -1)
    return [[labels(sizes)[i] for i in share if i >= 0] for share in padded]


def misdealt(sizes: list[int], ranks: int) -> dict[str, list[list[tuple[int, int]]]]:
    """What mistakes give."""
    total, every = sum(sizes), labels(sizes)
    small, shares = total // ranks, range(ranks)
    balanced = [[every[i] for i in part] for part in np.array_split(np.arange(total), ranks)]
    each = [-(-size // ranks) for size in sizes]
    on_its_own = [[(t, i) for t, i in every if i // each[t] == rank] for rank in shares]
    dropped = [every[rank * small : (rank + 1) * small] for rank in shares]
    to_last = [*dropped[:-1], every[(ranks - 1) * small :]]
    return {
        f"{total % ranks} numbers at the end have no owner: pad the row, so round the share up": dropped,
        f"the last rank takes the rest: pad the row, so that all shares have {-(-total // ranks)}": to_last,
        "the shares differ by one, with the larger ones first: pad the row at its end, and cut it equally": balanced,
        "each tensor is cut on its own, as FSDP does: lay them end to end first": on_its_own,
    }


@exercise(
    "04.1",
    "Whose numbers are these?",
    "pieces",
    minutes=8,
    hints=[
        "In the long row a rank owns rank x share to (rank + 1) x share. Where in that row does each tensor begin?",
        "Subtract that place from both ends of the share: now they count from the tensor's own beginning.",
        "What is below 0 or above the tensor's size lies in other tensors: cut it off with max and min.",
    ],
)
def whose_numbers(pieces):
    for _ in range(4):
        ranks = random.randint(3, 6)
        sizes = [random.randint(2, 9), random.randint(2, 9), random.randint(15, 40), random.randint(2, 9)]
        random.shuffle(sizes)
        sizes[-1] += (1 - sum(sizes)) % ranks  # one number too many, so that the padding matters
        right, wrong = dealt(sizes, ranks), misdealt(sizes, ranks)
        found = [pieces(sizes, rank, ranks) for rank in range(ranks)]
        where = f"tensors of {sizes} on {ranks} ranks"
        mine = [expanded(list(owned), sizes, f"{where}, rank {rank}") for rank, owned in enumerate(found)]
        for mistake, numbers in wrong.items():
            require(mine != numbers, f"{where}: {mistake}")
        require(mine != right[1:] + right[:1], f"{where}: rank r has what rank r + 1 should have")
        for rank in range(ranks):
            counts = len(mine[rank]), len(right[rank])
            told = f"it should begin at {right[rank][0]}" if right[rank] else "it owns nothing"
            said = f"{where}: rank {rank} has {counts[0]} numbers, and it should have {counts[1]}; (tensor, position): "
            began = f"its first is {mine[rank][0]}" if mine[rank] else "it has none"
            require(mine[rank] == right[rank], f"{said}{began}, {told}")


def expanded(owned: list, sizes: list[int], where: str) -> list[tuple[int, int]]:
    for piece in owned:
        require(len(piece) == 3, f"{where}: a piece is (tensor, start, stop), not {piece}")
        tensor, start, stop = piece
        require(tensor in range(len(sizes)), f"{where}: there is no tensor {tensor}")
        require(start != stop, f"{where}: the piece {piece} is empty: leave it out")
        own = "positions count from the tensor's own beginning, and padding is no piece"
        require(0 <= start, f"{where}: the piece {piece} begins before its tensor: {own}")
        require(
            stop <= sizes[tensor], f"{where}: the piece {piece} goes past the end of a tensor of {sizes[tensor]}: {own}"
        )
        require(start < stop, f"{where}: the piece {piece} stops before it starts")
    return [(tensor, position) for tensor, start, stop in owned for position in range(start, stop)]


_PIECES = """
share = {share}
owned, offset = [], 0
for tensor, size in enumerate(sizes):
    start, stop = max(0, rank * share - offset), min(size, (rank + 1) * share - offset)
    if {kept}:
        owned.append(({piece}))
    offset += size
return owned
"""
_CUT = {"share": "math.ceil(sum(sizes) / ranks)", "kept": "start < stop", "piece": "tensor, start, stop"}
whose_numbers.refuses("rounded down", "have no owner", _PIECES.format(**_CUT | {"share": "sum(sizes) // ranks"}))
whose_numbers.refuses(
    "empty pieces",
    "leave it out",
    _PIECES.format(**_CUT | {"kept": "True", "piece": "tensor, min(start, size), max(min(start, size), stop)"}),
)
whose_numbers.refuses(
    "positions in the long row",
    "the tensor's own beginning",
    _PIECES.format(**_CUT | {"piece": "tensor, start + offset, stop + offset"}),
)
whose_numbers.refuses(
    "whole tensors in turn",
    "it should",
    "return [(tensor, 0, size) for tensor, size in enumerate(sizes) if tensor % ranks == rank]",
)
whose_numbers.refuses(
    "ranks from 1 on",
    "what rank r + 1 should have",
    "rank = (rank + 1) % ranks\n" + _PIECES.format(**_CUT).strip(),
)
whose_numbers.refuses(
    "hard-coded for the shown tensors",
    "tensors of",
    "return [[(0, 0, 4)], [(0, 4, 6), (1, 0, 2)], [(1, 2, 3), (2, 0, 3)], [(2, 3, 4)]][rank % 4]",
)


# 04.3 ---------------------------------------------------------------------------------------------------------------


def smallest(parameters: float, stage: int, usable_bytes: float) -> int | None:
    """By counting up, with the bytes of the ZeRO paper's figure 1."""
    for dp in range(1, 2000):
        if sum(cost.zero_state_bytes(parameters, stage, dp).values()) <= usable_bytes:
            return dp
    return None


@exercise(
    "04.3",
    "How many devices?",
    "devices",
    minutes=8,
    core=False,
    hints=[
        "Each stage splits the 16 bytes in two: those that every device holds whole, and those that are divided.",
        "What the whole part leaves of usable_bytes is room for divided bytes: how many such rooms do you need?",
        "No room, no number of devices. And a device cannot be cut: round up.",
    ],
)
def how_many_devices(devices):
    for low, high in ((17, 25), (4.5, 15), (2.3, 3.8), (0.2, 1.8)):
        parameters = random.choice([1, 1.5, 3, 7, 13, 22, 70]) * 1e9
        usable = random.randint(int(low * parameters), int(high * parameters))
        found = devices(parameters, usable)
        where = f"{parameters / 1e9:g} billion parameters, {usable / 1e9:.1f} GB a device"
        require(isinstance(found, (list, tuple)) and len(found) == 4, f"return a list of four, not {str(found)[:60]}")
        for stage, mine in enumerate(found):
            check_stage(stage, mine, parameters, usable, where)


def check_stage(stage: int, mine: object, parameters: float, usable: int, where: str) -> None:
    right, told = smallest(parameters, stage, usable), f"{where}: at stage {stage} "
    if right is None:
        whole = sum(cost.zero_state_bytes(parameters, stage, 10**9).values()) / 1e9
        require(mine is None, f"{told}you say {mine}, but every device holds {whole:.1f} GB whole: no number is enough")
        return
    require(mine is not None, f"{told}you say None, but {right} would do: stages divide more and more")
    require(mine == int(mine), f"{told}you say {mine:.4g}: a device cannot be cut")
    require(mine >= 1, f"{told}you say {mine}: at least one device is needed")
    holds = sum(cost.zero_state_bytes(parameters, stage, int(mine)).values()) / 1e9
    require(mine >= right, f"{told}you say {mine}, but then each would hold {holds:.1f} GB")
    require(mine == right, f"{told}you say {mine}, but {right} would do")


_COUNT = """
found = []
for divided in {divided}:
    room = {usable} - (16 - divided) * parameters
    if room < 0 or (divided and not room):
        found.append(None)
    else:
        found.append(max(1, {rounded}))
return found
"""
_UP = {
    "divided": "(0, 12, 14, 16)",
    "usable": "usable_bytes",
    "rounded": "math.ceil(divided * parameters / room) if divided else 1",
}
how_many_devices.refuses(
    "everything divided at each stage", "no number is enough", "return [math.ceil(16 * parameters / usable_bytes)] * 4"
)
how_many_devices.refuses(
    "rounded down",
    "then each would hold",
    _COUNT.format(**_UP | {"rounded": "int(divided * parameters / room) if divided else 1"}),
)
how_many_devices.refuses(
    "not rounded",
    "cannot be cut",
    _COUNT.format(**_UP | {"rounded": "divided * parameters / room if divided else 1"}),
)
how_many_devices.refuses(
    "parameters divided before gradients are", "stage 2", _COUNT.format(**_UP | {"divided": "(0, 12, 12, 16)"})
)
how_many_devices.refuses(
    "gradients of 4 bytes",
    "would do",
    _COUNT.format(**_UP | {"divided": "(0, 12, 16, 18)"}).replace("(16 -", "(18 -"),
)
how_many_devices.refuses("hard-coded for the shown model", "stage", "return [None, None, None, 11]")
