"""Graders of 3D parallelism: the script on one rank, numpy's axes."""

import random
import re

import numpy

from aiscale.lesson.gap_grader import Gap
from aiscale.lesson.grading import exercise, require

# 07.a ---------------------------------------------------------------------------------------------------------------

stage_of_model = Gap(
    "07.a",
    "What a stage computes",
    "train_megatron.py",
    minutes=4,
    arguments="--tp 2 --pp 1",
    against="train_megatron.py",
    against_arguments="--tp 1 --pp 1",
    against_ours=True,
    explained={
        "activation: the model (HybridModel)": "the logits are right, the losses of them and of `labels` are not: "
        "the label of a token is the byte after it",
        "embedding.embedding_dropout": "places are 0 to T - 1 in each sequence: a vector for each is added",
        " 0 are others": "no sample has a gradient: the first loss is the one to go backward from",
        " 16 are others": "the model reads other bytes than the first T of each sequence",
        ": 0.125 times": "the schedule divides by the number of micro-batches itself: divide nothing",
        "outputs of the model agree: the loss": "what you average are no losses: does the model get `labels`?",
        "prints the loss 0.": "an eighth of the mean. The schedule divides by the number of micro-batches, the first "
        "of the two and in place: divide nothing, and report another tensor, by .clone() or a second mean",
        "prints the loss 7": "this is the sum over the 2 x 64 tokens of a micro-batch, not their mean",
        "not callable": "the second thing that forward returns is a function, which the last stage calls",
        "0-d tensor": "the function returns two losses, one to go backward from and one to report",
        "size of tensor a (65)": "the last of T + 1 bytes is no token, only a label",
    },
    hints=[
        "The last of T + 1 bytes has no successor: which T are tokens, and which T are their labels?",
        "A stage returns the model's output as it is. The mean is taken in the function, which the last stage calls.",
        "`return losses, lambda losses: (..., ...)`: two means, the second one with `.detach()`.",
    ],
    solution="""
        batch = next(iterator).to(device)
        places = torch.arange(T, device=device).expand(len(batch), -1)
        losses = model(batch[:, :-1], places, None, labels=batch[:, 1:])  # no mask but the causal one
        return losses, lambda losses: (losses.mean(), losses.mean().detach())
    """,
)


@stage_of_model.demand_with("--tp 1 --pp 2")
def hands_on(tried):
    require(tried.printed, "its two stages print no loss")


_BATCH = """
batch = next(iterator).to(device)
places = torch.arange(T, device=device).expand(len(batch), -1)
"""
_LOSSES = "losses = model(batch[:, :-1], places, None, labels=batch[:, 1:])\n"
_RETURN = "return losses, lambda losses: (losses.mean(), losses.mean().detach())"
stage_of_model.refuses(
    "the mean on each stage",
    "with --tp 1 --pp 2",
    _BATCH
    + _LOSSES
    + """
loss = losses.mean()
return loss, lambda loss: (loss.clone(), loss.detach())
""",
)
stage_of_model.refuses(
    "labels not shifted", "the byte after it", _BATCH + _LOSSES.replace("batch[:, 1:]", "batch[:, :-1]") + _RETURN
)
stage_of_model.refuses(
    "the byte before",
    "reads other bytes",
    _BATCH + "losses = model(batch[:, 1:], places, None, labels=batch[:, :-1])\n" + _RETURN,
)
stage_of_model.refuses(
    "all bytes", "only a label", _BATCH + "losses = model(batch, places, None, labels=batch)\n" + _RETURN
)
stage_of_model.refuses(
    "no labels", "does the model get", _BATCH + "losses = model(batch[:, :-1], places, None)\n" + _RETURN
)
stage_of_model.refuses(
    "one place for all",
    "places are 0 to T",
    _BATCH.replace("arange", "zeros").replace("device=", "dtype=int, device=") + _LOSSES + _RETURN,
)
stage_of_model.refuses("the sum", "this is the sum over", _BATCH + _LOSSES + _RETURN.replace("mean", "sum"))
stage_of_model.refuses(
    "divided here, too", "divide nothing", _BATCH + _LOSSES + _RETURN.replace("losses.mean()", "(losses / 8).mean()")
)
stage_of_model.refuses(
    "the loss for the function", "is a function, which", _BATCH + _LOSSES + "return losses, losses.mean()"
)
stage_of_model.refuses(
    "one loss", "returns two losses", _BATCH + _LOSSES + "return losses, lambda losses: losses.mean()"
)
stage_of_model.refuses(
    "the report is divided, too",
    "in place",
    _BATCH
    + _LOSSES
    + """
def both(losses):
    mean = losses.mean()
    return mean, mean.detach()

return losses, both
""",
)
stage_of_model.refuses(
    "backward from the report",
    "no sample has a gradient",
    _BATCH + _LOSSES + "return losses, lambda losses: (losses.mean().detach(), losses.mean())",
)

# 07.b ---------------------------------------------------------------------------------------------------------------

step_of_schedule = Gap(
    "07.b",
    "A step under the schedule",
    "train_megatron.py",
    minutes=7,
    arguments="--tp 1 --pp 1",
    against="train_megatron.py",
    against_arguments="--tp 1 --pp 1",
    against_ours=True,
    explained={
        "step 1, next weights": "the gradients of the step before are still in the buffer: clear both, first",
        "step 0, next weights": "the optimizer has other gradients than the schedule has computed: clear before it",
        "AssertionError, at megatron_checkpoint.py": "the optimizer has no states to save: has it taken a step?",
        "12 of 16 are missing": "the schedule has computed one micro-batch of four: num_microbatches is their number",
        "16 of 16 are missing, 0 are": "no sample has a gradient when the optimizer takes its step: does the schedule "
        "go backward, and before it?",
        "shape mismatch: indexing": "a later stage receives micro_batch_size x seq_length activations; they are to be "
        "as many as its labels, 2 sequences of T",
        ": 4 times (all ranks)": "each call of the schedule divides by its own num_microbatches: call it once, for all",
        "has no attribute 'item'": "return the loss, a tensor with one number, on every rank",
        "is not an iterator": "the schedule calls `next`: iter(micro_batches)",
    },
    hints=[
        "`schedule = get_forward_backward_func()` is the forward and the backward pass of all micro-batches. It stands "
        "between clearing the gradients and the step.",
        "The schedule calls `next` on `data_iterator`; a stage has to know the shape of what it receives: "
        "`micro_batch_size` sequences of `seq_length`.",
        "`losses = schedule(forward_step_func=forward, data_iterator=iter(micro_batches), ...)`.",
        "A stage with no losses has a loss of 0: so a sum along the pipeline brings the last stage's to all. A mean "
        "over the copies is that of the batch.",
    ],
    solution="""
        model.zero_grad_buffer()
        optimizer.zero_grad()
        schedule = get_forward_backward_func()  # 1F1B, if there are stages
        losses = schedule(
            forward_step_func=forward, data_iterator=iter(micro_batches), model=model, forward_only=False,
            num_microbatches=len(micro_batches), micro_batch_size=len(micro_batches[0]), seq_length=T,
        )  # fmt: skip
        optimizer.step()  # clips by the norm of the whole model's gradient
        loss = torch.stack(losses).mean() if losses else torch.zeros((), device=device)
        dist.all_reduce(loss, group=parallel_state.get_pipeline_model_parallel_group())  # only the last stage knows it
        dist.all_reduce(loss, dist.ReduceOp.AVG, group=parallel_state.get_data_parallel_group())
        return loss
    """,
)


@step_of_schedule.demand_with("--tp 1 --pp 2")
def runs_stages(tried):
    require(tried.printed, "its two stages print no loss")
    found = re.findall(r"loss (\S+)", tried.printed)[0]
    told = f"with --tp 1 --pp 2 rank 0, a first stage, prints the loss {found}: the last stage knows it, by pipeline"
    require(abs(float(found)) > 1, told)


_CLEAR = """
model.zero_grad_buffer()
optimizer.zero_grad()
"""
_SCHEDULE = """
losses = get_forward_backward_func()(
    forward_step_func=forward, data_iterator=iter(micro_batches), model=model, forward_only=False,
    num_microbatches=len(micro_batches), micro_batch_size=len(micro_batches[0]), seq_length=T,
)
"""
_STEP = "optimizer.step()\n"
_BACK = """
loss = torch.stack(losses).mean() if losses else torch.zeros((), device=device)
dist.all_reduce(loss, group=parallel_state.get_pipeline_model_parallel_group())
dist.all_reduce(loss, dist.ReduceOp.AVG, group=parallel_state.get_data_parallel_group())
return loss
"""
step_of_schedule.refuses(
    "the buffer not cleared", "still in the buffer", "optimizer.zero_grad()\n" + _SCHEDULE + _STEP + _BACK
)
step_of_schedule.refuses("cleared before the step", "clear before it", _SCHEDULE + _CLEAR + _STEP + _BACK)
step_of_schedule.refuses("no step", "has it taken a step", _CLEAR + _SCHEDULE + _BACK)
step_of_schedule.refuses("the step first", "and before it", _CLEAR + _STEP + _SCHEDULE + _BACK)
step_of_schedule.refuses(
    "forward only",
    "does the schedule go backward",
    _CLEAR + _SCHEDULE.replace("forward_only=False", "forward_only=True") + _STEP + _BACK,
)
step_of_schedule.refuses(
    "one micro-batch",
    "num_microbatches is their number",
    _CLEAR + _SCHEDULE.replace("=len(micro_batches),", "=1,") + _STEP + _BACK,
)
step_of_schedule.refuses(
    "no iterator",
    "iter(micro_batches)",
    _CLEAR + _SCHEDULE.replace("iter(micro_batches)", "micro_batches") + _STEP + _BACK,
)
step_of_schedule.refuses(
    "the number for the size",
    "as many as its labels",
    _CLEAR + _SCHEDULE.replace("len(micro_batches[0])", "len(micro_batches)") + _STEP + _BACK,
)
step_of_schedule.refuses(
    "a byte too many",
    "as many as its labels",
    _CLEAR + _SCHEDULE.replace("seq_length=T", "seq_length=T + 1") + _STEP + _BACK,
)
step_of_schedule.refuses(
    "a schedule for each micro-batch",
    "call it once",
    _CLEAR
    + """
schedule, losses = get_forward_backward_func(), []
for each in micro_batches:
    losses += schedule(
        forward_step_func=forward, data_iterator=iter([each]), model=model, forward_only=False,
        num_microbatches=1, micro_batch_size=len(each), seq_length=T,
    )
"""
    + _STEP
    + _BACK,
)
step_of_schedule.refuses("nothing returned", "return the loss", _CLEAR + _SCHEDULE + _STEP)
step_of_schedule.refuses("the list of losses", "return the loss", _CLEAR + _SCHEDULE + _STEP + "return losses\n")
step_of_schedule.refuses(
    "the loss of one copy",
    "is the mean",
    _CLEAR + _SCHEDULE + _STEP + "".join(line for line in _BACK.splitlines(True) if "data_parallel" not in line),
)
step_of_schedule.refuses(
    "the loss on the last stage alone",
    "with --tp 1 --pp 2",
    _CLEAR + _SCHEDULE + _STEP + "".join(line for line in _BACK.splitlines(True) if "pipeline" not in line),
)

# 07.1 ---------------------------------------------------------------------------------------------------------------


@exercise(
    "07.1",
    "Who talks to whom",
    "groups",
    minutes=8,
    hints=[
        "Find the coordinates first: `rank % tp` is the place among those who share layers.",
        "rank = t + tp * (d + dp * p). A group runs through one of the three and keeps the others.",
    ],
)
def who_talks_to_whom(groups):
    for _ in range(6):
        tp, dp, pp = random.sample((2, 3, 4, 5), 3)
        rank = random.randrange(tp * dp * pp)
        # The first axis of a grid in numpy's order changes slowest: pp, then dp, then tp.
        grid = numpy.arange(tp * dp * pp).reshape(pp, dp, tp)
        p, d, t = (int(place[0]) for place in numpy.where(grid == rank))
        expected = tuple(group.tolist() for group in (grid[p, d, :], grid[p, :, t], grid[:, d, t]))
        found = groups(rank, tp, dp, pp)
        where = f"rank {rank} of tp {tp}, dp {dp}, pp {pp}"
        require(
            isinstance(found, (tuple, list)) and len(found) == 3, f"{where}: return three lists, not {str(found)[:60]}"
        )
        for name, mine, right in zip(("tensor", "data", "pipeline"), map(list, found), expected, strict=True):
            require(rank in mine, f"{where}: the {name} group is {mine}: a rank belongs to its own groups")
            swapped = numpy.arange(tp * dp * pp).reshape(dp, pp, tp)
            q, s, u = (int(place[0]) for place in numpy.where(swapped == rank))
            why = ""
            if mine in (swapped[q, :, u].tolist(), swapped[:, s, u].tolist()):
                why = ": copies are numbered before stages"
            require(mine == right, f"{where}: the {name} group is {mine}, but should be {right}{why}")


who_talks_to_whom.refuses(
    "pp fastest",
    "but should be",
    """
    p, d, t = rank % pp, rank // pp % dp, rank // (pp * dp)
    return ([p + pp * (d + dp * i) for i in range(tp)], [p + pp * (i + dp * t) for i in range(dp)],
            [i + pp * (d + dp * t) for i in range(pp)])
    """,
)
who_talks_to_whom.refuses(
    "data and pipeline groups exchanged",
    "but should be",
    """
    t, d, p = rank % tp, rank // tp % dp, rank // (tp * dp)
    return ([i + tp * (d + dp * p) for i in range(tp)], [t + tp * (d + dp * i) for i in range(pp)],
            [t + tp * (i + dp * p) for i in range(dp)])
    """,
)
who_talks_to_whom.refuses(
    "without the rank itself",
    "belongs to its own groups",
    """
    t, d, p = rank % tp, rank // tp % dp, rank // (tp * dp)
    return ([i + tp * (d + dp * p) for i in range(tp) if i != t], [t + tp * (i + dp * p) for i in range(dp)],
            [t + tp * (d + dp * i) for i in range(pp)])
    """,
)
who_talks_to_whom.refuses("hard-coded for the shown rank 5", "rank", "return [4, 5], [5, 7], [1, 5]")
