"""Graders of both cuts: the script on one rank, torch's own loss over the whole vocabulary."""

import random

import torch
from torch.nn import functional

from aiscale.lesson.gap_grader import Gap
from aiscale.lesson.grading import exercise, require, same_on_ranks

# 06.a ---------------------------------------------------------------------------------------------------------------

plan = Gap(
    "06.a",
    "How each Linear is cut",
    "train_tp_pp.py",
    minutes=3,
    arguments="--tp 2 --pp 1",
    hints=[
        "Columns of a Linear are outputs: a rank has some of them complete, and goes on alone. Which Linear of "
        "attention, and which of the MLP, comes last before the sum?",
        "Four names by columns, two by rows. A rank that has the columns of query, key and value has whole heads.",
        '`PLAN = {"query": ColwiseParallel(), ..., "down": RowwiseParallel()}`',
    ],
    solution="""
        #: Into a block by columns, out of it by rows. (torch's backward sums q, k and v one by one.)
        PLAN = {name: ColwiseParallel() for name in ("query", "key", "value", "up")}
        PLAN |= {name: RowwiseParallel() for name in ("out", "down")}
    """,
)


@plan.demand
def cuts_all(tried):
    # Counted: 6.9 MB of sums if all is cut, 5.1 for attention alone, 2.8 for the MLP alone.
    require(
        tried.traffic["all_gather"] < 2e6,
        "a rank gathers what the others have computed: by columns and then by rows, nothing is gathered in between",
    )
    require(
        tried.traffic["all_reduce"] > 6e6,
        "each rank computes all of attention or all of the MLP: which names are missing in the plan?",
    )


plan.refuses(
    "all by columns",
    "in the module blocks.0.out",
    'PLAN = {name: ColwiseParallel() for name in ("query", "key", "value", "up", "out", "down")}',
)
plan.refuses(
    "all by rows",
    "in the module blocks.0.query",
    'PLAN = {name: RowwiseParallel() for name in ("query", "key", "value", "up", "out", "down")}',
)
plan.refuses(
    "rows, then columns",
    "in the module blocks.0.query",
    """
    PLAN = {name: RowwiseParallel() for name in ("query", "key", "value", "up")}
    PLAN |= {name: ColwiseParallel() for name in ("out", "down")}
    """,
)
plan.refuses(
    "out forgotten",
    "in the module blocks.0.out",
    """
    PLAN = {name: ColwiseParallel() for name in ("query", "key", "value", "up")}
    PLAN["down"] = RowwiseParallel()
    """,
)
plan.refuses(
    "down forgotten",
    "in the module blocks.0.down",
    """
    PLAN = {name: ColwiseParallel() for name in ("query", "key", "value", "up")}
    PLAN["out"] = RowwiseParallel()
    """,
)
plan.refuses(
    "keys and values whole",
    "in the module blocks.0",
    """
    PLAN = {"query": ColwiseParallel(), "up": ColwiseParallel()}
    PLAN |= {name: RowwiseParallel() for name in ("out", "down")}
    """,
)
plan.refuses("nothing cut", "nothing is gained", "PLAN = {}")
plan.refuses("the MLP alone", "each rank computes all", 'PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}')
plan.refuses(
    "attention alone",
    "each rank computes all",
    """
    PLAN = {name: ColwiseParallel() for name in ("query", "key", "value")}
    PLAN["out"] = RowwiseParallel()
    """,
)
plan.refuses(
    "gathered after each",
    "a rank gathers",
    """
    from torch.distributed.tensor import Replicate
    names = ("query", "key", "value", "up", "out", "down")
    PLAN = {name: ColwiseParallel(output_layouts=Replicate()) for name in names}
    """,
)
plan.refuses(
    "left as sums of parts",
    "a missing sum over ranks",
    """
    from torch.distributed.tensor import Partial
    PLAN = {name: ColwiseParallel() for name in ("query", "key", "value", "up")}
    PLAN |= {name: RowwiseParallel(output_layouts=Partial()) for name in ("out", "down")}
    """,
)

# 06.b ---------------------------------------------------------------------------------------------------------------

stage_of_model = Gap(
    "06.b",
    "A stage's part of the model",
    "train_tp_pp.py",
    minutes=5,
    ranks=3,
    arguments="--tp 1 --pp 3",
    hints=[
        "Which stage needs the embedding, and which one the head? The others' become `nn.Identity()`.",
        "Block `i` of `n` goes to one stage, and blocks of a stage follow each other: `i * stages // n` is 0, 0, 1, 2 "
        "for four blocks on three stages.",
        "`model.blocks[i] = nn.Identity()` replaces a block in its list.",
    ],
    solution="""
        if stage > 0:
            model.embed = nn.Identity()
        if stage < stages - 1:
            model.head = nn.Identity()
        for i in range(len(model.blocks)):
            if i * stages // len(model.blocks) != stage:
                model.blocks[i] = nn.Identity()
    """,
)
_ENDS = """
if stage > 0:
    model.embed = nn.Identity()
if stage < stages - 1:
    model.head = nn.Identity()
"""
_MINE = """
for i in range(len(model.blocks)):
    if i * stages // len(model.blocks) != stage:
        model.blocks[i] = nn.Identity()
"""
stage_of_model.refuses(
    "blocks dealt out in turn",
    "they run in another order",
    _ENDS
    + """
for i in range(len(model.blocks)):
    if i % stages != stage:
        model.blocks[i] = nn.Identity()
""",
)
stage_of_model.refuses(
    "the remainder lost",
    "blocks.3",
    _ENDS
    + """
share = len(model.blocks) // stages
for i in range(len(model.blocks)):
    if not stage * share <= i < (stage + 1) * share:
        model.blocks[i] = nn.Identity()
""",
)
stage_of_model.refuses("the embedding on all", "in the module embed.token", _ENDS.replace("stage > 0", "False") + _MINE)
stage_of_model.refuses(
    "the head on all", "in the module blocks.2.norm1", _ENDS.replace("stage < stages - 1", "False") + _MINE
)
stage_of_model.refuses(
    "the embedding on none", "in the module blocks.0.norm1", _ENDS.replace("stage > 0", "True") + _MINE
)
stage_of_model.refuses("the head on none", "out of bounds", _ENDS.replace("stage < stages - 1", "True") + _MINE)
stage_of_model.refuses(
    "stages counted from 1", "no rank has blocks.3", _ENDS + _MINE.replace("!= stage", "+ 1 != stage")
)
stage_of_model.refuses("the other stages' blocks", "different stages", _ENDS + _MINE.replace("!= stage", "== stage"))
stage_of_model.refuses("all blocks on all stages", "different stages", _ENDS)
stage_of_model.refuses(
    "in the wrong order",
    "what blocks.0.norm1 computes does not",
    _ENDS + _MINE.replace("!= stage", "!= stages - 1 - stage"),
)
stage_of_model.refuses("nothing cut", "in the module embed.token", "pass")

# 06.c ---------------------------------------------------------------------------------------------------------------

scheduled = Gap(
    "06.c",
    "The grid and the schedule",
    "train_tp_pp.py",
    minutes=7,
    ranks=4,
    arguments="--tp 1 --pp 2",
    explained={
        "name 'data' is not defined": "the lines below average gradients over the group `data`, along dp",
        "name 'pipeline' is not defined": "the lines below add up losses over the group `pipeline`, along pp",
        "name 'mesh' is not defined": "the lines below read this rank's place along dp from `mesh`",
        "one of the following scalar types": "a later stage gets activations, and its model wants bytes: `cut` has not "
        "replaced its embedding",
        "_StageBackwardMeta": "a stage's neighbours are not those of its copy: look at the group, and at the order of "
        "names and sizes in the grid",
        "never averaged": "`data` is the group along dp, of those that have the same part of the model",
        "should have different stages": "a rank's stage is its place along pp: get_local_rank",
    },
    hints=[
        'The grid has `(dp, args.pp, args.tp)` ranks. `mesh.get_group("dp")` and `mesh.get_group("pp")` are the '
        'groups, and `mesh.get_local_rank("pp")` is the number of this rank\'s stage.',
        'First `cut(model, my_stage, args.pp)`; then `parallelize_module(block, mesh["tp"], plan)` for each block that '
        "that is no `nn.Identity`.",
        "`PipelineStage(model, my_stage, args.pp, device, group=pipeline)`: its group has a rank of each stage.",
        "A copy has `args.batch // dp` sequences of a step. How many micro-batches are that? The schedule computes the "
        "loss: `Schedule1F1B(stage, n_microbatches, loss_fn=...)`.",
    ],
    solution="""
        mesh = init_device_mesh(device.type, (dp, args.pp, args.tp), mesh_dim_names=("dp", "pp", "tp"))
        data, pipeline, my_stage = mesh.get_group("dp"), mesh.get_group("pp"), mesh.get_local_rank("pp")
        cut(model, my_stage, args.pp)
        for block in model.blocks:
            if not isinstance(block, nn.Identity):
                parallelize_module(block, mesh["tp"], plan)
        stage = PipelineStage(model, my_stage, args.pp, device, group=pipeline)
        schedule = Schedule1F1B(stage, args.batch // dp // args.micro_batch, loss_fn=loss_of)
    """,
)


@scheduled.demand
def has_the_micro_batches(tried):
    asked = "a copy has 8 sequences, and --micro-batch is 2, so the schedule needs 4 micro-batches"
    require(tried.calls == 4, f"{asked}, not {tried.calls}")


@scheduled.demand_with("--tp 2")
def cuts_blocks_along_tp(tried):
    require(
        tried.traffic["all_reduce"] > 2e6,
        "with --tp 2 the ranks of a stage add nothing up: each computes whole blocks. Cut each by the plan, along tp",
    )


_MESH = 'mesh = init_device_mesh(device.type, (dp, args.pp, args.tp), mesh_dim_names=("dp", "pp", "tp"))\n'
_GROUPS = 'data, pipeline, my_stage = mesh.get_group("dp"), mesh.get_group("pp"), mesh.get_local_rank("pp")\n'
_CUT = "cut(model, my_stage, args.pp)\n"
_BLOCKS = """for block in model.blocks:
    if not isinstance(block, nn.Identity):
        parallelize_module(block, mesh["tp"], plan)
"""
_LINE = "stage = PipelineStage(model, my_stage, args.pp, device, group=pipeline)\n"
_STAGE = _MESH + _GROUPS + _CUT + _BLOCKS + _LINE
_SCHEDULE = "schedule = Schedule1F1B(stage, args.batch // dp // args.micro_batch, loss_fn=loss_of)"
scheduled.refuses(
    "micro-batches of all copies",
    "micro-batches",
    _STAGE + _SCHEDULE.replace("args.batch // dp", "args.batch"),
)
scheduled.refuses(
    "the size for the number",
    "micro-batches",
    _STAGE + _SCHEDULE.replace("args.batch // dp // args.micro_batch", "args.micro_batch"),
)
scheduled.refuses(
    "one micro-batch", "Number of microbatches", _STAGE + _SCHEDULE.replace("args.batch // dp // args.micro_batch", "1")
)
scheduled.refuses(
    "a share of each rank",
    "micro-batches",
    _STAGE + _SCHEDULE.replace("// dp", "// world_size"),
)
scheduled.refuses(
    "ranks for stages",
    "stopped",
    _MESH + _GROUPS + _CUT + _BLOCKS + _LINE.replace("my_stage, args.pp", "rank, world_size") + _SCHEDULE,
)
scheduled.refuses(
    "blocks not cut",
    "each computes whole blocks",
    _MESH + _GROUPS + _CUT + _LINE + _SCHEDULE,
)
scheduled.refuses(
    "the whole model on each stage",
    "has not replaced its embedding",
    _MESH + _GROUPS + _BLOCKS + _LINE + _SCHEDULE,
)
scheduled.refuses(
    "axes named the other way",
    "the order of names and sizes",
    _MESH.replace('"dp", "pp", "tp"', '"pp", "dp", "tp"') + _GROUPS + _CUT + _BLOCKS + _LINE + _SCHEDULE,
)
scheduled.refuses(
    "gradients averaged along tp",
    "`data` is the group along dp",
    _MESH + _GROUPS.replace('mesh.get_group("dp")', 'mesh.get_group("tp")') + _CUT + _BLOCKS + _LINE + _SCHEDULE,
)
scheduled.refuses("the group of all ranks", "group size 4", _STAGE.replace(", group=pipeline", "") + _SCHEDULE)
scheduled.refuses("the group of the copies", "stopped", _STAGE.replace("group=pipeline", "group=data") + _SCHEDULE)
scheduled.refuses("no loss", "losses but got 0", _STAGE + _SCHEDULE.replace(", loss_fn=loss_of", ""))
scheduled.refuses(
    "gradients not divided",
    "not divided by their number",
    _STAGE + _SCHEDULE.replace("loss_of)", "loss_of, scale_grads=False)"),
)
scheduled.refuses(
    "a stage before",
    "in the module blocks.2",
    _STAGE.replace(_LINE, _LINE.replace("my_stage", "(my_stage + 1) % args.pp")) + _SCHEDULE,
)

# 06.d ---------------------------------------------------------------------------------------------------------------

heads_of_a_rank = Gap(
    "06.d",
    "Heads of one rank",
    "llama_heads.py",
    minutes=4,
    runs="train_tp_pp.py",
    arguments="--llama --tp 2 --pp 1",
    against="train_tp_pp.py",
    against_arguments="--llama --tp 1 --pp 1",
    against_ours=True,
    hints=[
        "`self.query(h)` has 64 numbers for each byte on one rank, and 32 on each of two: two heads of width 16.",
        "Block.forward of your model.py does it.",
        "`unflatten(-1, (-1, self.head_width))`: the number of heads follows. Then heads come before bytes: "
        "`transpose(1, 2)`.",
    ],
    solution="""
        h = self.norm1(x)
        numbers = self.query(h), self.key(h), self.value(h)  # under tensor parallelism, of this rank's heads
        q, k, v = (each.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for each in numbers)
    """,
)
_NUMBERS = """
h = self.norm1(x)
numbers = self.query(h), self.key(h), self.value(h)
"""
_HEADS = "q, k, v = (each.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for each in numbers)"
heads_of_a_rank.refuses(
    "the heads of all ranks",
    "counts the heads of all ranks",
    _NUMBERS
    + """
q, k, v = (
    each.unflatten(-1, (heads, -1)).transpose(1, 2) for each, heads in zip(numbers, (QUERIES, PAIRS, PAIRS))
)
""",
)
heads_of_a_rank.refuses("no norm", "mine", _NUMBERS.replace("self.norm1(x)", "x") + _HEADS)
heads_of_a_rank.refuses("keys and values exchanged", "blocks.0.out", _NUMBERS + _HEADS.replace("q, k, v", "q, v, k"))
heads_of_a_rank.refuses(
    "heads after bytes", "in the module blocks.0", _NUMBERS + _HEADS.replace(".transpose(1, 2)", "")
)
heads_of_a_rank.refuses(
    "interleaved heads",
    "blocks.0.out",
    _NUMBERS + "q, k, v = (each.unflatten(-1, (self.head_width, -1)).permute(0, 3, 1, 2) for each in numbers)",
)
heads_of_a_rank.refuses("the other norm", "mine", _NUMBERS.replace("norm1", "norm2") + _HEADS)
heads_of_a_rank.refuses(
    "keys for queries", "in the module blocks.0.out", _NUMBERS.replace("self.query", "self.key") + _HEADS
)
heads_of_a_rank.refuses("rotated here, too", "blocks.0.out", _NUMBERS + _HEADS + "\nq, k = rotated(q), rotated(k)")

# 06.1 ---------------------------------------------------------------------------------------------------------------


@exercise(
    "06.1",
    "A loss over a cut vocabulary",
    "cut_cross_entropy",
    minutes=8,
    ranks=True,
    hints=[
        "Three all-reduces of one number a token: the largest (`dist.ReduceOp.MAX`), the sum, the target's logit.",
        "`logits.max(1).values` is this rank's largest of each row; after its all-reduce it is that of the whole row.",
        "All ranks but one have 0 in `picked`, so its sum over the ranks is the target's logit.",
    ],
)
def cut_loss(cut_cross_entropy):
    n = cut_cross_entropy.size
    for size in (1.0, 900.0):
        tokens, width = random.randint(7, 9), random.randint(5, 8)
        logits = (size * torch.randn(tokens, width * n)).double()
        targets = torch.randint(width * n, (tokens,))
        # Targets of all ranks come up, the first and the last token of the vocabulary among them.
        targets[: n + 1] = torch.tensor([*(width * r for r in range(n)), width * n - 1])
        loss = functional.cross_entropy(logits, targets)
        parts, rows = list(logits.chunk(n, 1)), torch.arange(tokens)
        here = [torch.where(targets // width == r, logits[rows, targets], 0) for r in range(n)]
        tops = [part.max(1).values for part in parts]
        sums = sum((part - top[:, None]).exp().sum(1) for part, top in zip(parts, tops, strict=True))
        causes = {
            "each rank has the loss of its own columns: has the sum of all ranks arrived?": [
                (part.logsumexp(1) - mine).mean() for part, mine in zip(parts, here, strict=True)
            ],
            "this is the sum over the tokens, not their mean": [loss * tokens] * n,
            "one rank knows the logit of a target, the others have 0: add up `picked`, too": [
                (logits.logsumexp(1) - mine).mean() for mine in here
            ],
            "each rank takes off the largest of its own columns, so the ranks' sums are not of one scale": [
                (top + sums.log() - sum(here)).mean() for top in tops
            ],
            "the largest logit was taken off inside the sum and not added outside": [
                (logits.logsumexp(1) - logits.max(1).values - sum(here)).mean()
            ]
            * n,
        }
        found = cut_cross_entropy.each(parts, here)
        require(
            all(torch.isfinite(torch.as_tensor(value)).all() for value in found),
            f"not finite with logits of {size:g}: take off the largest logit of the whole row before exp",
        )
        same_on_ranks(found, [loss] * n, "the loss", causes=causes, rtol=1e-6)
        sent = sum(nbytes for _, nbytes in cut_cross_entropy.sent[0].values())
        most = 4 * 8 * tokens
        require(
            sent <= most,
            f"right, but a rank handed over {sent} bytes for {tokens} tokens: four numbers each are {most}. "
            "Were the logits gathered?",
        )


_SUMS = """
largest = logits.max(1).values
dist.all_reduce(largest, dist.ReduceOp.MAX)
sums = (logits - largest[:, None]).exp().sum(1)
dist.all_reduce(sums)
"""
cut_loss.refuses(
    "logits gathered",
    "Were the logits gathered",
    """
    parts = [torch.empty_like(logits) for _ in range(world_size)]
    dist.all_gather(parts, logits.contiguous())
    dist.all_reduce(picked)
    return (torch.cat(parts, 1).logsumexp(1) - picked).mean()
    """,
)
cut_loss.refuses("nothing sent", "has the sum of all ranks arrived", "return (logits.logsumexp(1) - picked).mean()")
cut_loss.refuses(
    "largest of its own columns only",
    "not of one scale",
    """
    largest = logits.max(1).values
    sums = (logits - largest[:, None]).exp().sum(1)
    dist.all_reduce(sums)
    dist.all_reduce(picked)
    return (largest + sums.log() - picked).mean()
    """,
)
cut_loss.refuses(
    "nothing taken off",
    "take off the largest logit",
    """
    sums = logits.exp().sum(1)
    dist.all_reduce(sums)
    dist.all_reduce(picked)
    return (sums.log() - picked).mean()
    """,
)
cut_loss.refuses("picked not added up", "add up `picked`", _SUMS + "return (largest + sums.log() - picked).mean()")
cut_loss.refuses(
    "largest not added again",
    "not added outside",
    _SUMS + "dist.all_reduce(picked)\nreturn (sums.log() - picked).mean()",
)
cut_loss.refuses("hard-coded for two ranks", "the loss", _SUMS + "return (largest + sums.log() - 2 * picked).mean()")
