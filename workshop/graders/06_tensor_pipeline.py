"""Grader of the exercise on tensor parallelism: torch's own loss, over the whole vocabulary."""

import random

import torch
from torch.nn import functional

from aiscale.lesson.grading import exercise, require, same_on_ranks


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
