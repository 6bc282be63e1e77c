"""Graders of experts and context: the script on one rank, all tokens on one rank, torch's attention."""

import random

import torch
from torch.nn import functional

from aiscale.lesson.gap_grader import Gap
from aiscale.lesson.grading import exercise, require, same, same_on_ranks

# 15.a ---------------------------------------------------------------------------------------------------------------

dispatch = Gap(
    "15.a",
    "Dispatch",
    "experts.py",
    minutes=5,
    runs="train_experts.py",
    against="train_experts.py",
    against_ours=True,
    explained={
        "out of bounds": "`order` has places of choices, of which a token has K: divide by self.each",
        "gloo": "as many rows come as others send, not as many as a rank sends: exchange the counts first",
        "out of the backward pass": "gradients of rows that leave come back only through Exchange.apply",
    },
    hints=[
        "Sorted by expert, choices are sorted by rank too, because a rank's experts follow each other. "
        "`argsort` says which choice comes first, and `order // self.each` of which token it is.",
        "`dist.all_to_all_single(came, load)` hands rank r the counts for its experts. `came` is as large as `load`.",
        "A rank's rows are the sum over its experts: `load.view(self.ranks, -1).sum(1)`; of `came` as well.",
    ],
    solution="""
        order = chosen.flatten().argsort(stable=True)  # places of the N x K choices, by expert, so by rank
        came = torch.empty_like(load)
        dist.all_to_all_single(came, load)  # rows that come, by rank, and by expert of this rank
        sent, received = (counts.view(self.ranks, -1).sum(1).tolist() for counts in (load, came))
        rows = Exchange.apply(tokens[order // self.each], sent, received)
    """,
)
_ORDER = "order = chosen.flatten().argsort(stable=True)\n"
_COUNTS = """
came = torch.empty_like(load)
dist.all_to_all_single(came, load)
"""
_SUMS = "sent, received = (counts.view(self.ranks, -1).sum(1).tolist() for counts in (load, came))\n"
_ROWS = "rows = Exchange.apply(tokens[order // self.each], sent, received)"
dispatch.refuses(
    "in the order of the tokens",
    "its place in the order",
    "order = torch.arange(chosen.numel(), device=chosen.device)\n" + _COUNTS + _SUMS + _ROWS,
)
dispatch.refuses(
    "the rows of other tokens",
    "its place in the order",
    _ORDER + _COUNTS + _SUMS + _ROWS.replace("order // self.each", "order % len(tokens)"),
)
dispatch.refuses(
    "a choice for a token",
    "divide by self.each",
    _ORDER + _COUNTS + _SUMS + _ROWS.replace("order // self.each", "order"),
)
dispatch.refuses("as many as it sends", "as many as a rank sends", _ORDER + "came = load\n" + _SUMS + _ROWS)
dispatch.refuses(
    "no way back for gradients",
    "only through Exchange.apply",
    _ORDER + _COUNTS + _SUMS + _ROWS.replace("Exchange.apply", "exchange"),
)
dispatch.refuses(
    "sorted by token",
    "its place in the order",
    _ORDER + "order = order.sort().values\n" + _COUNTS + _SUMS + _ROWS,
)

# 15.b ---------------------------------------------------------------------------------------------------------------

combine = Gap(
    "15.b",
    "Combine",
    "experts.py",
    minutes=3,
    runs="train_experts.py",
    against="train_experts.py",
    against_ours=True,
    explained={
        "Split sizes": "these are the lists of the way there: on the way back a rank sends what it received",
        "'NoneType' and 'int'": "experts have no gradient: it reaches them only through Exchange.apply",
    },
    hints=[
        "The way back is the way there, with the two lists exchanged.",
        "What comes back is in the order in which rows left: row j is choice `order[j]`. Which weight is its own?",
        "`index_add` adds both answers of a token, however far apart they lie: `order // self.each` is the token.",
    ],
    solution="""
        back = Exchange.apply(answers, received, sent)
        weighted = back * weight.flatten()[order, None]
        out = torch.zeros_like(tokens).index_add(0, order // self.each, weighted)
    """,
)
_BACK = "back = Exchange.apply(answers, received, sent)\n"
_WEIGHTED = "weighted = back * weight.flatten()[order, None]\n"
_OUT = "out = torch.zeros_like(tokens).index_add(0, order // self.each, weighted)"
combine.refuses(
    "weights in another order", "its weight in the sum", _BACK + _WEIGHTED.replace("[order, None]", "[:, None]") + _OUT
)
combine.refuses("no weights", "its weight in the sum", _BACK + "weighted = back\n" + _OUT)
combine.refuses(
    "there once more",
    "the lists of the way there",
    _BACK.replace("received, sent", "sent, received") + _WEIGHTED + _OUT,
)
combine.refuses(
    "one answer of two",
    "its weight in the sum",
    _BACK + _WEIGHTED + "out = torch.zeros_like(tokens).index_put((order // self.each,), weighted)",
)
combine.refuses(
    "answers as they came",
    "its weight in the sum",
    _BACK + _WEIGHTED + "out = weighted.view(len(tokens), self.each, -1).sum(1)",
)
combine.refuses(
    "no way back for gradients",
    "only through Exchange.apply",
    _BACK.replace("Exchange.apply", "exchange") + _WEIGHTED + _OUT,
)

# 15.c ---------------------------------------------------------------------------------------------------------------

averaged = Gap(
    "15.c",
    "Sums that are there already",
    "train_experts.py",
    minutes=3,
    against="train_experts.py",
    against_ours=True,
    explained={
        "order of collectives": "the n-th call of a rank meets the n-th of the others, and their experts are others",
    },
    hints=[
        "Which weights are on all ranks, and which on one?",
        "Rows of all ranks came to an expert, and their gradients followed. What is its gradient now: the sum over "
        "the ranks, or their mean?",
        'Two cases: `".experts." in name` divides by world_size; all others are averaged by an all-reduce.',
    ],
    solution="""
        for name, weight in model.named_parameters():
            if ".experts." in name:
                weight.grad /= world_size  # rows of all ranks came here: the sum is there already
            else:
                dist.all_reduce(weight.grad, dist.ReduceOp.AVG)
    """,
)
_AVERAGE = """
for name, weight in model.named_parameters():
    if ".experts." in name:
        weight.grad /= world_size
    else:
        dist.all_reduce(weight.grad, dist.ReduceOp.AVG)
"""
averaged.refuses(
    "all averaged",
    "meets the n-th",
    "for weight in model.parameters():\n    dist.all_reduce(weight.grad, dist.ReduceOp.AVG)",
)
averaged.refuses(
    "experts left as they are", "2 times as large", _AVERAGE.replace("weight.grad /= world_size", "continue")
)
averaged.refuses("experts divided twice", "0.5 times as large", _AVERAGE.replace("/= world_size", "/= world_size**2"))
averaged.refuses(
    "the router, too",
    "never averaged",
    _AVERAGE.replace('".experts." in name', '".experts." in name or "router" in name'),
)
averaged.refuses("sums", "2 times as large", _AVERAGE.replace("ReduceOp.AVG", "ReduceOp.SUM"))
averaged.refuses("nothing averaged", "never averaged", "pass")

# 15.1 ---------------------------------------------------------------------------------------------------------------


def _balance(shares, chosen):
    load = chosen.flatten().bincount(minlength=shares.shape[1]).to(shares)
    return shares.shape[1] * (load / load.sum() * shares.mean(0)).sum()


@exercise(
    "15.1",
    "A balance that is the same on any number of ranks",
    "balance_of_all",
    minutes=8,
    ranks=True,
    hints=[
        "`chosen.flatten().bincount(minlength=E)` counts this rank's choices. Whose counts does $f_e$ need?",
        "One all-reduce of E counts. $P_e$ is a mean of tokens: the mean over equal shares is the mean of all.",
        "With $f_e$ of all ranks and this rank's $P_e$, the mean of the ranks' results is the loss of all tokens.",
    ],
)
def balance_of_all(balance_of_all):
    n = balance_of_all.size
    for experts, each in ((6, 1), (8, 2)):
        tokens = random.randint(5, 9)
        shares = (3 * torch.randn(n * tokens, experts)).double().softmax(-1)
        # Each rank's tokens prefer other experts, so each rank's own counts are far from those of all.
        shares = torch.cat([part.roll(r, 1) for r, part in enumerate(shares.sort(1).values.chunk(n))])
        chosen = shares.topk(each).indices
        parts, choices = list(shares.chunk(n)), list(chosen.chunk(n))
        load = chosen.flatten().bincount(minlength=experts).double()
        of_all = load / load.sum()
        expected = [experts * (of_all * part.mean(0)).sum() for part in parts]
        own = [_balance(part, choice) for part, choice in zip(parts, choices, strict=True)]
        causes = {
            "f is that of this rank's own choices: the ranks' counts are not added up": own,
            "f is the sum of counts over this rank's choices: divide by the choices of all ranks": [
                n * value for value in expected
            ],
            "P is that of all tokens on each rank: its mean over the ranks is right, but no gradient goes through "
            "`all_reduce` to this rank's own scores": [_balance(shares, chosen)] * n,
            "this is the mean of the ranks' own losses: their counts are to be added up, not their losses": [
                sum(own) / n
            ]
            * n,
        }
        found = balance_of_all.each(parts, choices)
        same_on_ranks(found, expected, "the loss", causes=causes, rtol=1e-9)
        found = balance_of_all.on_ranks(_gradients_of, parts, choices)
        same_on_ranks(
            found, [experts * (of_all / tokens).expand_as(part) for part in parts], "the gradient of share", rtol=1e-9
        )


def _gradients_of(parts, choices):
    """On a rank: the gradient of its scores, by the participant's function."""
    from IPython import get_ipython

    names = get_ipython().user_ns
    share = parts[names["rank"]].clone().requires_grad_()
    loss = names["balance_of_all"](share, choices[names["rank"]])
    if not loss.requires_grad:
        return share * 0
    loss.backward()
    return share.grad


balance_of_all.refuses(
    "each rank's own",
    "not added up",
    """
    load = chosen.flatten().bincount(minlength=share.shape[1]).double()
    return len(load) * (load / load.sum() * share.mean(0)).sum()
    """,
)
balance_of_all.refuses(
    "losses averaged",
    "not their losses",
    """
    load = chosen.flatten().bincount(minlength=share.shape[1]).double()
    loss = len(load) * (load / load.sum() * share.mean(0)).sum()
    dist.all_reduce(loss, dist.ReduceOp.AVG)
    return loss
    """,
)
balance_of_all.refuses(
    "divided by its own choices",
    "divide by the choices of all",
    """
    load = chosen.flatten().bincount(minlength=share.shape[1])
    dist.all_reduce(load)
    return len(load) * (load / chosen.numel() * share.mean(0)).sum()
    """,
)
balance_of_all.refuses(
    "both of all ranks",
    "no gradient goes through",
    """
    load, mean = chosen.flatten().bincount(minlength=share.shape[1]).double(), share.mean(0)
    dist.all_reduce(load)
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    return len(load) * (load / load.sum() * mean).sum()
    """,
)
balance_of_all.refuses(
    "without a gradient",
    "the gradient of share",
    """
    load = chosen.flatten().bincount(minlength=share.shape[1]).double()
    dist.all_reduce(load)
    return len(load) * (load / load.sum() * share.detach().mean(0)).sum()
    """,
)
balance_of_all.refuses(
    "hard-coded for eight experts",
    "the loss",
    """
    load = chosen.flatten().bincount(minlength=share.shape[1]).double()
    dist.all_reduce(load)
    return 8 * (load / load.sum() * share.mean(0)).sum()
    """,
)

# 15.2 ---------------------------------------------------------------------------------------------------------------


@exercise(
    "15.2",
    "Attention put together from two parts",
    "together",
    minutes=8,
    core=False,
    hints=[
        "A part's output is a mean with weights e^score. The sum of its weights is e^total: its share of both sums is?",
        "The new total is `torch.logaddexp(total, new_total)`, which does not overflow.",
        "`(total - both).exp()[..., None] * out` is what the old part contributes.",
    ],
)
def together(together):
    for size in (1.0, 400.0):
        rows, width = random.randint(3, 6), random.randint(4, 8)
        first, second = random.randint(3, 5), random.randint(6, 9)
        heads = random.randint(2, 3)
        q = size * torch.randn(heads, rows, width).double()
        k, v = torch.randn(2, heads, first + second, width).double()
        scores = q @ k.mT / width**0.5
        parts = []
        for columns in (slice(None, first), slice(first, None)):
            parts += [scores[..., columns].softmax(-1) @ v[:, columns], scores[..., columns].logsumexp(-1)]
        out, total = together(*parts)
        expected = functional.scaled_dot_product_attention(q, k, v)
        require(
            torch.isfinite(torch.as_tensor(out)).all() and torch.isfinite(torch.as_tensor(total)).all(),
            f"not finite with scores of {size:g}: e^total overflows, so take the difference first",
        )
        causes = {
            "this is the mean of both parts: they have not the same weight": [(parts[0] + parts[2]) / 2],
            "this is the sum of both parts: each has its own denominator still": [parts[0] + parts[2]],
        }
        same(out, expected, "the output", causes={words: value[0] for words, value in causes.items()}, rtol=1e-9)
        same(total, scores.logsumexp(-1), "the total", rtol=1e-9)


together.refuses("the mean", "not the same weight", "return (out + new_out) / 2, torch.logaddexp(total, new_total)")
together.refuses("the sum", "its own denominator", "return out + new_out, torch.logaddexp(total, new_total)")
together.refuses(
    "exponentials first",
    "not finite",
    """
    old, new = total.exp()[..., None], new_total.exp()[..., None]
    return (old * out + new * new_out) / (old + new), torch.logaddexp(total, new_total)
    """,
)
together.refuses(
    "totals added",
    "the output",
    """
    both = total + new_total
    return (total - both).exp()[..., None] * out + (new_total - both).exp()[..., None] * new_out, both
    """,
)
together.refuses(
    "the larger part alone",
    "the output",
    """
    both = torch.logaddexp(total, new_total)
    return torch.where((total > new_total)[..., None], out, new_out), both
    """,
)
together.refuses(
    "hard-coded for one head",
    "the output",
    """
    both = torch.logaddexp(total, new_total)
    old, new = (total[:1] - both[:1]).exp()[..., None], (new_total[:1] - both[:1]).exp()[..., None]
    return old * out + new * new_out, both
    """,
)
