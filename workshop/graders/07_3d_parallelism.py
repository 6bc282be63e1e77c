"""Graders of the exercises on tensor and 3D parallelism: whole matrices, torch's own loss, numpy's axes."""

import random

import numpy
import torch
from torch.nn import functional

from aiscale.lesson.grading import exercise, require, same_on_ranks

# 07.1 ---------------------------------------------------------------------------------------------------------------


@exercise(
    "07.1",
    "Columns, then rows",
    "parallel_mlp",
    minutes=8,
    ranks=True,
    hints=[
        "A column of A gives one whole number of x A, so GELU may be taken of it at once, without the other ranks.",
        "The rows of B that a rank has are those that multiply its own columns: its product adds to all of y.",
        "Contributions add up. When must they, and by which collective?",
    ],
)
def columns_then_rows(parallel_mlp):
    n = parallel_mlp.size
    for _ in range(2):
        tokens, d, part = random.randint(3, 6), random.randint(3, 6), random.randint(2, 5)
        x, a, b = torch.randn(tokens, d).double(), torch.randn(d, part * n).double(), torch.randn(part * n, d).double()
        y = functional.gelu(x @ a) @ b
        columns, rows = list(a.chunk(n, 1)), list(b.chunk(n, 0))
        own = [functional.gelu(x @ left) @ right for left, right in zip(columns, rows, strict=True)]
        mixed = [functional.gelu(sum(x @ left for left in columns)) @ right for right in rows]
        added = "the sum came before GELU: it adds different columns of A. Add up what the rows of B give"
        late = functional.gelu(sum(x @ left @ right for left, right in zip(columns, rows, strict=True)))
        causes = {
            "this is each rank's own contribution: nothing has arrived from the others": own,
            "GELU was taken at the end, but it belongs between the two products": [late] * n,
            "there is no GELU between the two products": [x @ a @ b] * n,
            added: mixed,
            f"{added}, once": [sum(mixed)] * n,
        }
        scales = {1 / n: "contributions add up: nothing is left to divide by"}
        found = parallel_mlp.each([x] * n, columns, rows)
        same_on_ranks(found, [y] * n, "y", scale=scales, causes=causes, rtol=1e-6)
        sent = sum(nbytes for _, nbytes in parallel_mlp.sent[0].values())
        require(sent <= y.nbytes, f"right, but a rank handed over {sent} bytes, and y has {y.nbytes}: sum only once")


columns_then_rows.refuses("nothing sent", "own contribution", "return gelu(x @ columns) @ rows")
columns_then_rows.refuses(
    "GELU after the sum",
    "belongs between the two products",
    """
    y = x @ columns @ rows
    dist.all_reduce(y)
    return gelu(y)
    """,
)
columns_then_rows.refuses(
    "sum before GELU",
    "came before GELU",
    """
    hidden = x @ columns
    dist.all_reduce(hidden)
    return gelu(hidden) @ rows
    """,
)
columns_then_rows.refuses(
    "no GELU",
    "no GELU between",
    """
    y = x @ columns @ rows
    dist.all_reduce(y)
    return y
    """,
)
columns_then_rows.refuses(
    "hard-coded for 2 ranks",
    "y",
    """
    y = gelu(x @ columns) @ rows
    other = [torch.empty_like(y) for _ in range(world_size)]
    dist.all_gather(other, y)
    return other[0] + other[1]
    """,
)


# 07.2 ---------------------------------------------------------------------------------------------------------------


@exercise(
    "07.2",
    "A loss over a cut vocabulary",
    "cut_cross_entropy",
    minutes=15,
    ranks=True,
    hints=[
        "Three all-reduces of one number a token: the largest (`dist.ReduceOp.MAX`), the sum, the target's logit.",
        "Rank r has the tokens from r * width to (r + 1) * width - 1. A rank that lacks a target adds 0.",
        "`logits.gather(1, own[:, None])` picks one logit a row; clamp the index first, then zero what is not yours.",
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
        parts = list(logits.chunk(n, 1))
        own = [torch.stack([functional.cross_entropy(part, targets % width)]).sum() for part in parts]
        largest = logits.max(1).values
        later = targets - width
        picked_later = torch.where(later >= 0, logits.gather(1, later.clamp(0)[:, None])[:, 0] - largest, 0) + largest
        everywhere = sum(part.gather(1, (targets % width)[:, None])[:, 0] - largest for part in parts) + largest
        tops = [part.max(1).values for part in parts]
        sums = sum((part - top[:, None]).exp().sum(1) for part, top in zip(parts, tops, strict=True))
        rows = torch.arange(tokens)
        chosen = logits[rows, targets] - torch.stack(tops)[targets // width, rows]
        own_scale = [(sums.log() - chosen).mean()] * n
        causes = {
            "each rank has the loss of its own columns: has the sum of all ranks arrived?": own,
            "this is the sum over the tokens, not their mean": [loss * tokens] * n,
            "the targets' logits are missing: only the logarithm of the sum is here": [
                torch.logsumexp(logits, 1).mean()
            ]
            * n,
            "the first token of a rank's part is not its number times their width: are you off by one rank?": [
                (torch.logsumexp(logits, 1) - picked_later).mean()
            ]
            * n,
            "every rank adds the logit at the target's place in its own part: only one rank has the target": [
                (torch.logsumexp(logits, 1) - everywhere).mean()
            ]
            * n,
            "each rank takes off the largest of its own columns, so the ranks' sums are not of one scale": own_scale,
        }
        found = cut_cross_entropy.each(parts, [targets] * n)
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
largest = logits.max(-1).values
dist.all_reduce(largest, dist.ReduceOp.MAX)
logits = logits - largest[:, None]
sums = logits.exp().sum(-1)
dist.all_reduce(sums)
width = logits.shape[1]
"""
cut_loss.refuses(
    "logits gathered",
    "Were the logits gathered",
    """
    parts = [torch.empty_like(logits) for _ in range(world_size)]
    dist.all_gather(parts, logits.contiguous())
    return torch.nn.functional.cross_entropy(torch.cat(parts, 1), targets)
    """,
)
cut_loss.refuses(
    "largest of its own columns only",
    "not of one scale",
    """
    logits = logits - logits.max(-1).values[:, None]
    sums = logits.exp().sum(-1)
    dist.all_reduce(sums)
    own = targets - rank * logits.shape[1]
    mine = (own >= 0) & (own < logits.shape[1])
    picked = torch.where(mine, logits.gather(1, own.clamp(0, logits.shape[1] - 1)[:, None])[:, 0], 0)
    dist.all_reduce(picked)
    return (sums.log() - picked).mean()
    """,
)
cut_loss.refuses(
    "nothing taken off",
    "take off the largest logit",
    """
    sums = logits.exp().sum(-1)
    dist.all_reduce(sums)
    own = targets - rank * logits.shape[1]
    mine = (own >= 0) & (own < logits.shape[1])
    picked = torch.where(mine, logits.gather(1, own.clamp(0, logits.shape[1] - 1)[:, None])[:, 0], 0)
    dist.all_reduce(picked)
    return (sums.log() - picked).mean()
    """,
)
cut_loss.refuses(
    "every rank's token of the same place picked",
    "only one rank has the target",
    _SUMS
    + """
picked = logits.gather(1, (targets % width)[:, None])[:, 0]
dist.all_reduce(picked)
return (sums.log() - picked).mean()
""",
)
cut_loss.refuses(
    "hard-coded for a vocabulary of 4 a rank",
    "the loss",
    _SUMS
    + """
own = targets - rank * 4
mine = (own >= 0) & (own < 4)
picked = torch.where(mine, logits.gather(1, own.clamp(0, 3)[:, None])[:, 0], 0)
dist.all_reduce(picked)
return (sums.log() - picked).mean()
""",
)


# 07.3 ---------------------------------------------------------------------------------------------------------------


@exercise(
    "07.3",
    "Who talks to whom",
    "groups",
    minutes=10,
    core=False,
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
