"""Graders of the exercises on FSDP: autograd in one process, a simulation tick by tick, and torch's own chunks."""

import random

import torch

from aiscale.lesson.gap_grader import Gap
from aiscale.lesson.grading import exercise, require, same, same_on_ranks

# 05.a ---------------------------------------------------------------------------------------------------------------

P = 4 * 236_928  #: bytes of the GPT's parameters in fp32
MICRO_BATCHES = 4  #: of 2 sequences: a step has 16, on two ranks

units = Gap(
    "05.a",
    "Units",
    "train_fsdp.py",
    minutes=8,
    explained={
        "Invariant encountered": "parameters of a unit are cut again: fully_shard(model) comes after its blocks",
        "can only be applied to a module once": "a module is made a unit twice",
        "no attribute 'set_requires_gradient_sync'": "the model itself is no unit: call fully_shard(model), too",
        "must have the same dtype": "a unit without the policy computes in fp32, its neighbour in bf16",
    },
    hints=[
        "One policy serves all: `param_dtype` is the format in which weights are gathered and used, `reduce_dtype` "
        "that in which gradients are summed.",
        "`fully_shard` leaves out what is in a unit already, so the blocks come first. It changes the module itself.",
        "`zip(model.blocks, model.blocks[1:])` gives each block with the one after it. The optimizer comes last: "
        "only then are `model.parameters()` the slices.",
    ],
    solution="""
    dtype = torch.bfloat16 if args.bf16 else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)  # gathered, used and freed one at a time
    fully_shard(model, mp_policy=policy)  # the root: embeddings and head
    for block, following in zip(model.blocks, model.blocks[1:]):
        block.set_modules_to_forward_prefetch([following])  # gathered one ahead
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    """,
)


@units.demand
def blocks_are_freed(tried):
    gathered = tried.traffic.get("all_gather", 0) / MICRO_BATCHES / P
    told = f"a micro-batch gathers {gathered:.2f} times the weights: nothing is freed after the forward pass"
    require(gathered > 1.5, f"{told}, and the whole model is there at once. Make each block a unit, freed after use")


@units.demand
def blocks_come_early(tried):
    told = "no block is gathered before its turn: tell each one, by set_modules_to_forward_prefetch, which comes next"
    require("forward prefetch" in tried.notes, told)


@units.demand_with("--bf16")
def formats_are_those_of_the_policy(tried):
    gathered, reduced = tried.traffic.get("all_gather", 0) / MICRO_BATCHES / P, sent_gradients(tried)
    told = (
        f"with --bf16 a micro-batch gathers {gathered:.2f} times the bytes of the fp32 weights, where 0.92 are enough"
    )
    require(gathered < 1.2, f"{told}: give the policy its param_dtype")
    told = f"with --bf16 the gradients of a step are {reduced:.2f} times the bytes that they have in fp32"
    require(reduced > 0.9, f"{told}, so they are summed in bf16: set reduce_dtype")


def sent_gradients(tried) -> float:
    """In a step, in units of all of them in fp32. gloo builds a reduce-scatter from an all-reduce."""
    return (tried.traffic.get("all_reduce", 0) + tried.traffic.get("reduce_scatter", 0)) / P


_POLICY = "policy = MixedPrecisionPolicy(param_dtype={}, reduce_dtype=torch.float32)"
_BLOCKS = "for block in model.blocks:\n    fully_shard(block, mp_policy=policy)"
_ROOT = "fully_shard(model, mp_policy=policy)"
_PAIRS = "for block, following in zip(model.blocks, model.blocks[1:]):"
_AHEAD = f"{_PAIRS}\n    block.set_modules_to_forward_prefetch([following])"
_ADAM = "optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)"
_USUAL = _POLICY.format("torch.bfloat16 if args.bf16 else None")


def refuse_units(name: str, message: str, *lines: str) -> None:
    units.refuses(name, message, "\n".join(lines))


refuse_units("the root alone", "the whole model is there at once", _USUAL, _ROOT, _ADAM)
refuse_units("the root first", "comes after its blocks", _USUAL, _ROOT, _BLOCKS, _AHEAD, _ADAM)
refuse_units(
    "the optimizer before the units", "other tensors than those of the model", _ADAM, _USUAL, _BLOCKS, _ROOT, _AHEAD
)
refuse_units("always in bf16", "half precision", _POLICY.format("torch.bfloat16"), _BLOCKS, _ROOT, _AHEAD, _ADAM)
refuse_units(
    "gradients summed in bf16",
    "set reduce_dtype",
    _USUAL.replace(", reduce_dtype=torch.float32", ""),
    _BLOCKS,
    _ROOT,
    _AHEAD,
    _ADAM,
)
refuse_units("nothing in bf16", "its param_dtype", _POLICY.format("None"), _BLOCKS, _ROOT, _AHEAD, _ADAM)
refuse_units(
    "a policy for the root alone",
    "a unit without the policy",
    _USUAL,
    _BLOCKS.replace(", mp_policy=policy", ""),
    _ROOT,
    _AHEAD,
    _ADAM,
)
refuse_units(
    "blocks that stay",
    "nothing is freed",
    _USUAL,
    _BLOCKS.replace("=policy", "=policy, reshard_after_forward=False"),
    _ROOT,
    _AHEAD,
    _ADAM,
)
refuse_units("nothing ahead", "before its turn", _USUAL, _BLOCKS, _ROOT, _ADAM)
refuse_units("no root", "no unit", _USUAL, _BLOCKS, _AHEAD, _ADAM)
refuse_units("blocks twice", "a unit twice", _USUAL, _BLOCKS, _BLOCKS, _ROOT, _AHEAD, _ADAM)
refuse_units(
    "Adam's own rate", "the learning rate is", _USUAL, _BLOCKS, _ROOT, _AHEAD, _ADAM.replace(", lr=args.lr", "")
)

# 05.b ---------------------------------------------------------------------------------------------------------------

once_a_step = Gap(
    "05.b",
    "One message a step",
    "train_fsdp.py",
    minutes=5,
    against_arguments="--micro-batch 4",  # so that a factor tells ranks from micro-batches
    explained={"c10d.allreduce_": "these gradients are slices, DTensors, and FSDP has averaged them already"},
    hints=[
        "It is the loop of lesson 01: a forward pass, a backward pass of the loss over the number of micro-batches.",
        "`for i, micro_batch in enumerate(micro_batches)`: which i is the last? Only then gradients are sent. The loss "
        "that is printed is each rank's own until `dist.all_reduce` averages it.",
    ],
    solution="""
        for i, micro_batch in enumerate(micro_batches):
            model.set_requires_gradient_sync(i + 1 == len(micro_batches))  # once a step
            part = loss_of(model(micro_batch[:, :-1]), micro_batch[:, 1:]) / len(micro_batches)
            part.backward()
            loss += part.detach()
        dist.all_reduce(loss, dist.ReduceOp.AVG)  # each rank knows the loss of its own share
    """,
)


@once_a_step.demand
def gradients_are_sent_once(tried):
    sent = sent_gradients(tried)
    require(
        sent < 1.5, f"gradients are sent {sent:.0f} times a step, once for each micro-batch: the last one is enough"
    )


_LOOP = """
for i, micro_batch in enumerate(micro_batches):
    {sync}
    part = loss_of(model(micro_batch[:, :-1]), micro_batch[:, 1:]){over}
    part.backward()
    {then}
    loss += part.detach()
{last}
"""
_SYNC, _MEAN = "model.set_requires_gradient_sync({})", "dist.all_reduce(loss, dist.ReduceOp.AVG)"


def refuse_loop(name: str, message: str, **wrong: str) -> None:
    right = {"sync": _SYNC.format("i + 1 == len(micro_batches)"), "over": " / len(micro_batches)"}
    once_a_step.refuses(name, message, _LOOP.format(**right | {"then": "", "last": _MEAN} | wrong))


refuse_loop("at each micro-batch", "gradients are sent 4 times", sync="")
refuse_loop("never", "set_requires_gradient_sync", sync=_SYNC.format(False))
refuse_loop("off by one", "set_requires_gradient_sync", sync=_SYNC.format("i == len(micro_batches)"))
refuse_loop("the first alone", "all micro-batches", sync=_SYNC.format("i == 0"))
refuse_loop(
    "told after the backward pass", "all micro-batches", sync="", then=_SYNC.format("i + 1 == len(micro_batches)")
)
refuse_loop("not divided", "divided by their number", over="")
refuse_loop("divided by the ranks as well", "number of ranks", over=" / len(micro_batches) / world_size")
refuse_loop("the loss of rank 0", "is the mean", last="")
refuse_loop("zero_grad after each", "no weight has a gradient", then="optimizer.zero_grad()")
refuse_loop(
    "averaged again by hand",
    "averaged them already",
    last=f"for weight in model.parameters():\n    dist.all_reduce(weight.grad, dist.ReduceOp.AVG)\n{_MEAN}",
)
once_a_step.refuses(
    "the last micro-batch alone",
    "are missing",
    f"""
    part = loss_of(model(micro_batches[-1][:, :-1]), micro_batches[-1][:, 1:])
    part.backward()
    loss += part.detach()
    {_MEAN}
    """,
)


def shares(tensor: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """Its rows as torch cuts them: equal chunks, of which the last have fewer, or none."""
    chunks = list(tensor.chunk(ranks))
    return chunks + [tensor[:0]] * (ranks - len(chunks))


def compare_shapes() -> None:
    """On a rank: from now on refuse a collective of tensors that differ in shape: gloo would end the process."""
    import torch
    import torch.distributed as dist
    from IPython import get_ipython

    world = get_ipython().user_ns["world"]

    def comparing(real, name):
        def compared(*args, **kwargs):
            given = [*args, *kwargs.values()]
            tensors = [t for value in given for t in (value if isinstance(value, (list, tuple)) else [value])]
            mine = [tuple(t.shape) for t in tensors if isinstance(t, torch.Tensor)]
            calls = [None] * dist.get_world_size()
            with world.control():
                dist.all_gather_object(calls, (name, mine))
            uneven = next((set(shapes) for op, shapes in calls if op in lists and len(set(shapes)) > 1), None)
            if uneven:
                shapes = " and ".join(map(str, sorted(uneven)))
                raise ValueError(f"{name} of tensors of {shapes}: all must have the same shape, so pad here too")
            other = next((r for r, call in enumerate(calls) if call != calls[0]), None)
            if other is not None:
                told = [f"rank {r} {calls[r][0]} of {sorted(set(calls[r][1]))}" for r in (0, other)]
                raise ValueError(f"{told[0]}, {told[1]}: all ranks must call the same, with the same shapes")
            return real(*args, **kwargs)

        return compared

    lists = ("all_gather", "reduce_scatter")
    names = (*lists, "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")
    if not hasattr(dist, "uncompared"):
        dist.uncompared = {name: getattr(dist, name) for name in names}
    for name, real in dist.uncompared.items():
        setattr(dist, name, comparing(real, name))


def compare_no_more() -> None:
    """On a rank: collectives as they were; a rank that was started meanwhile has nothing to restore."""
    import torch.distributed as dist

    for name, real in getattr(dist, "uncompared", {}).items():
        setattr(dist, name, real)


# 05.1 ---------------------------------------------------------------------------------------------------------------


@exercise(
    "05.1",
    "A borrowed layer, backwards",
    "backward",
    minutes=15,
    ranks=True,
    hints=[
        "The rows of the whole weight are the columns of d_y: from them and the ranks follows what each share has.",
        "Gather shards padded to equal shape, concatenate, and cut off the padding, which all lies at the end.",
        "The gradient of the whole weight is padded likewise, then `list(t.chunk(world_size))` goes to reduce_scatter.",
    ],
)
def borrowed_layer(backward):
    n = backward.size
    for rows in random.sample([k for k in range(n + 1, 5 * n) if k % n and -(-k // n) * (n - 1) < k], 2):
        tokens, d = random.randint(2, 4), random.randint(5, 7)
        weight = torch.randn(rows, d).double().requires_grad_()
        xs = [torch.randn(tokens, d).double().requires_grad_() for _ in range(n)]
        d_ys = [torch.randn(tokens, rows).double() for _ in range(n)]
        own = [torch.autograd.grad(x @ weight.T, weight, d_y)[0] for x, d_y in zip(xs, d_ys, strict=True)]
        d_xs = [torch.autograd.grad(x @ weight.T, x, d_y)[0] for x, d_y in zip(xs, d_ys, strict=True)]
        mean = shares(sum(own) / n, n)
        backward.on_ranks(compare_shapes)
        try:
            found = backward.each(d_ys, [x.detach() for x in xs], shares(weight.detach(), n))
        finally:
            backward.on_ranks(compare_no_more)
        for rank, pair in enumerate(found):
            told = f"rank {rank} returns {str(pair)[:60]}: two tensors are wanted, d_x and the rows of d_W"
            require(isinstance(pair, (tuple, list)) and len(pair) == 2, told)
        where = f"{rows} rows on {n} ranks, the gradient of"
        own_part = [
            torch.cat([torch.zeros_like(w) if r != rank else w for r, w in enumerate(shares(weight, n))])
            for rank in range(n)
        ]
        causes = {
            "only the rank's own rows are used: gather the others": [
                g @ w for g, w in zip(d_ys, own_part, strict=True)
            ],
            "this is the mean over the ranks, but each rank has a batch of its own": [sum(d_xs) / n] * n,
        }
        scale = {1 / n: "it belongs to this rank's own batch: no mean over ranks here"}
        same_on_ranks([pair[0] for pair in found], d_xs, f"{where} x", scale=scale, causes=causes, rtol=1e-6)
        causes = {
            "nothing has arrived from the other ranks": [shares(g, n)[rank] for rank, g in enumerate(own)],
            "this is the rank's own gradient over the number of ranks: what the others have is missing": [
                shares(g / n, n)[rank] for rank, g in enumerate(own)
            ],
            "this is the whole gradient: a rank keeps the rows that it owns": [sum(own) / n] * n,
            "the padding is still there: a rank has as many rows as its shard": [
                torch.cat([part, part.new_zeros(len(mean[0]) - len(part), d)]) for part in mean
            ],
        }
        scale = {n: "reduce_scatter adds up: the mean over the ranks is wanted"}
        same_on_ranks([pair[1] for pair in found], mean, f"{where} W", scale=scale, causes=causes, rtol=1e-6)
        sent, padded = backward.sent[0], 8 * d * n * len(mean[0])
        gathered, reduced = sent.get("all_gather", (0, 0))[1], sent.get("all_reduce", (0, 0))[1]
        told = "both are right, but the whole gradient went to all_reduce, twice the way: reduce_scatter is enough"
        require(not reduced, told)
        told = f"both are right, but {gathered} bytes are gathered, and the padded weight has {padded}"
        require(gathered <= padded, f"{told}: the shards are all that a rank needs")


_LAYER = """
rows, d = d_y.shape[1], x.shape[1]
each = -(-rows // world_size)
pieces = [x.new_empty(each, d) for _ in range(world_size)]
dist.all_gather(pieces, pad(shard, (0, 0, 0, each - len(shard))))
d_x = {d_x}
whole = pad(d_y.T @ x / {divisor}, (0, 0, 0, each * world_size - rows))
mine = x.new_empty(each, d)
{scatter}
return d_x, {own}
"""
_RIGHT = {
    "d_x": "d_y @ torch.cat(pieces)[:rows]",
    "divisor": "world_size",
    "scatter": "dist.reduce_scatter(mine, list(whole.chunk(world_size)))",
    "own": "mine[: len(shard)]",
}
borrowed_layer.refuses("sum for mean", "reduce_scatter adds up", _LAYER.format(**_RIGHT | {"divisor": "1"}))
borrowed_layer.refuses(
    "x divided by the ranks as well",
    "no mean over ranks here",
    _LAYER.format(**_RIGHT | {"d_x": "d_y @ torch.cat(pieces)[:rows] / world_size"}),
)
borrowed_layer.refuses(
    "own rows only",
    "gather the others",
    _LAYER.format(**_RIGHT | {"d_x": "d_y[:, rank * each : rank * each + len(shard)] @ shard"}),
)
borrowed_layer.refuses(
    "gradient never sent",
    "what the others have is missing",
    _LAYER.format(**_RIGHT | {"scatter": "mine = whole.chunk(world_size)[rank]"}),
)
borrowed_layer.refuses("padding returned", "the padding is still there", _LAYER.format(**_RIGHT | {"own": "mine"}))
borrowed_layer.refuses(
    "whole gradient by all_reduce",
    "reduce_scatter is enough",
    _LAYER.format(**_RIGHT | {"scatter": "dist.all_reduce(whole)\nmine = whole.chunk(world_size)[rank]"}),
)
borrowed_layer.refuses(
    "rows in the other order",
    "the gradient of x",
    _LAYER.format(**_RIGHT | {"d_x": "d_y @ torch.cat(pieces[::-1])[:rows]"}),
)
borrowed_layer.refuses(
    "shards padded, gradients not",
    "so pad here too",
    _LAYER.format(**_RIGHT).replace("each * world_size - rows", "0"),
)
borrowed_layer.refuses(
    "hard-coded for 10 rows on 4 ranks",
    "raised",
    _LAYER.format(**_RIGHT).replace(
        "rows, d = d_y.shape[1], x.shape[1]\neach = -(-rows // world_size)", "rows, d = 10, x.shape[1]\neach = 3"
    ),
)


# 05.2 ---------------------------------------------------------------------------------------------------------------


def ticks(gather_s: list[int], compute_s: list[int], room: int, wires: int = 1) -> int:
    """The seconds of the pass, second by second. Free room and wires are used at once."""
    to_gather, to_compute = list(gather_s), list(compute_s)
    begun, now = 0, 0
    while any(to_compute):
        done = sum(not left for left in to_compute)  # they compute in order
        travelling = sum(left > 0 for left in to_gather[:begun])
        while begun < len(gather_s) and begun - done < room and travelling < wires:
            begun, travelling = begun + 1, travelling + 1
        at_work = done if done < begun and not to_gather[done] else None
        for block in range(begun):
            to_gather[block] = max(0, to_gather[block] - 1)
        if at_work is not None:
            to_compute[at_work] -= 1
        now += 1
    return now


@exercise(
    "05.2",
    "When to borrow",
    "forward_pass",
    minutes=8,
    hints=[
        "For each block find two moments: when is it gathered, and when has it computed?",
        "A gather waits for the wire and for room: block b finds room when block b - ahead - 1 is done.",
        "A block computes from the later of two moments: it is gathered, and the block before it is done.",
    ],
)
def when_to_borrow(forward_pass):
    kinds = [((6, 9), (1, 4), 3), ((1, 3), (5, 9), 0), ((1, 3), (5, 9), 1), ((1, 3), (5, 9), 2)]
    kinds += [((1, 9), (1, 9), ahead) for ahead in (0, 1, 1, 2, 2, 3)]
    for gathers, computes, ahead in kinds:
        n = random.randint(6, 9)
        gather_s = [random.randint(*gathers) for _ in range(n)]
        compute_s = [random.randint(*computes) for _ in range(n)]
        where = f"with gather_s {gather_s}, compute_s {compute_s}, {ahead} ahead: "
        more = "this needs more room than there is, by one block: the block at work takes room, too"
        causes = {
            more: ticks(gather_s, compute_s, ahead + 2),
            "gathers and blocks take turns, as with nothing ahead": ticks(gather_s, compute_s, 1),
            "this needs more room than there is: gathers never wait for it": ticks(gather_s, compute_s, n),
            "several gathers use the wire at once": ticks(gather_s, compute_s, ahead + 1, n),
            "several gathers use the wire at once, and never wait for room": ticks(gather_s, compute_s, n, n),
            "nothing hides the first gather: the pass begins with it": sum(compute_s),
        }
        if ahead:
            causes["this is one block of room too few"] = ticks(gather_s, compute_s, ahead)
        right = ticks(gather_s, compute_s, ahead + 1)
        same(forward_pass(gather_s, compute_s, ahead), right, f"{where}the time", causes=causes, rtol=1e-9)


_PASS = """
wire_free, done = 0, []
for block in range(len(gather_s)):
    wire_free = {start} + gather_s[block]
    done.append(max(wire_free, done[-1] if done else 0) + compute_s[block])
return done[-1]
"""
when_to_borrow.refuses("one after the other", "take turns", "return sum(gather_s) + sum(compute_s)")
when_to_borrow.refuses("room without end", "more room than there is", _PASS.format(start="wire_free"))
when_to_borrow.refuses(
    "one block too many",
    "more room than there is",
    _PASS.format(start="max(wire_free, done[block - ahead - 2] if block > ahead + 1 else 0)"),
)
when_to_borrow.refuses(
    "gathers side by side", "wire at once", _PASS.format(start="(done[block - ahead - 1] if block > ahead else 0)")
)
when_to_borrow.refuses(
    "formula for equal blocks",
    "the time",
    "return gather_s[0] + len(gather_s) * max(gather_s[0], compute_s[0])",
)
when_to_borrow.refuses("hard-coded for the shown blocks", "the time", "return 11 if ahead else 15")


# 05.3 ---------------------------------------------------------------------------------------------------------------


@exercise(
    "05.3",
    "Saved by four, opened by three",
    "open_rows",
    minutes=12,
    core=False,
    hints=[
        "Which rows of the whole tensor are mine, from where to where? Which rows has file f?",
        "Two ranges share the rows from the larger beginning to the smaller end, if there are any.",
        "A file counts from 0: subtract the row with which it begins from both ends. Then torch.cat.",
    ],
)
def opened_by_three(open_rows):
    for savers, ranks in [
        (4, 3),
        (4, 2),
        random.choice([(3, 4), (2, 5)]),
        (random.randint(5, 8), random.randint(2, 6)),
    ]:
        rows = random.choice([k for k in range(11, 40) if tells(k, savers, ranks)])
        whole = torch.randn(rows, 2).double()
        files, expected = shares(whole, savers), shares(whole, ranks)
        opened = [look(open_rows, files, rows, ranks, rank) for rank in range(ranks)]
        where = f"{rows} rows, saved by {savers}, opened by {ranks}: "
        found = [tensor for tensor, _ in opened]
        same_on_ranks(found, expected, f"{where}the tensor", causes=misread(whole, savers, ranks), rtol=0)
        for rank, (_, n) in enumerate(opened):
            told = f"{where}rank {rank} reads {n} rows, and needs {len(expected[rank])}: read no others"
            require(n == len(expected[rank]), told)


def tells(rows: int, savers: int, ranks: int) -> bool:
    """Whether every rank gets rows, and each mistake gives something else."""
    each, left = -(-rows // ranks), rows % ranks
    return bool(
        rows % savers
        and left
        and each * (ranks - 1) < rows
        and (ranks == 2 or left < ranks - 1)  # or torch.tensor_split cuts alike
        and rows // ranks != -(-rows // savers)
    )


def look(open_rows, files: list[torch.Tensor], rows: int, ranks: int, rank: int) -> tuple[torch.Tensor, int]:
    """What a rank returns, and how many rows it has read."""
    read_rows = []

    def read(file, start, stop):
        held = len(files[file]) if 0 <= file < len(files) else 0
        if not held:
            raise IndexError(f"file {file} has no rows: {rows} rows saved by {len(files)}")
        if not 0 <= start < stop <= held:
            raise IndexError(f"file {file} has {held} rows, and you read [{start}:{stop}] of it")
        read_rows.append(stop - start)
        return files[file][start:stop].clone()

    return open_rows(rows, len(files), ranks, rank, read), sum(read_rows)


def misread(whole: torch.Tensor, savers: int, ranks: int) -> dict[str, list]:
    """What mistakes give."""
    rows, files = len(whole), shares(whole, savers)
    small = rows // ranks
    return {
        "these are the rows that the same rank saved: the cuts lie elsewhere now": [
            files[rank] if rank < savers else whole[:0] for rank in range(ranks)
        ],
        "this is the whole tensor: return the rank's own rows": [whole] * ranks,
        "shares are rounded down here: the rows at the end have no owner": [
            whole[rank * small : rank * small + small] for rank in range(ranks)
        ],
        "shares differ by one here: the rule is equal shares, and what is left for the last": list(
            whole.tensor_split(ranks)
        ),
    }


_OPEN = """
saved, each = math.ceil(rows / savers), {each}
start, stop = rank * each, min(rank * each + each, rows)
pieces = []
for file in range(savers):
    first, last = file * saved, min(file * saved + saved, rows)
    if {when}:
        pieces.append({piece})
return torch.cat(pieces){cut}
"""
_READ = {
    "each": "math.ceil(rows / ranks)",
    "when": "max(start, first) < min(stop, last)",
    "piece": "read(file, max(start, first) - first, min(stop, last) - first)",
    "cut": "",
}
opened_by_three.refuses("shares rounded down", "rounded down", _OPEN.format(**_READ | {"each": "rows // ranks"}))
opened_by_three.refuses(
    "everything read, then cut",
    "read no others",
    _OPEN.format(**_READ | {"when": "first < last", "piece": "read(file, 0, last - first)", "cut": "[start:stop]"}),
)
opened_by_three.refuses(
    "whole files read",
    "read no others",
    _OPEN.format(
        **_READ | {"piece": "read(file, 0, last - first)[max(start, first) - first : min(stop, last) - first]"}
    ),
)
opened_by_three.refuses(
    "positions in the whole tensor",
    "you read",
    _OPEN.format(**_READ | {"piece": "read(file, max(start, first), min(stop, last))"}),
)
opened_by_three.refuses(
    "only the file in which it begins", "the tensor", _OPEN.format(**_READ | {"when": "first <= start < last"})
)
opened_by_three.refuses(
    "hard-coded for 10 rows saved by 4",
    "",
    "return [torch.cat([read(0, 0, 3), read(1, 0, 1)]), torch.cat([read(1, 1, 3), read(2, 0, 2)]), "
    "torch.cat([read(2, 2, 3), read(3, 0, 1)])][rank % 3]",
)
