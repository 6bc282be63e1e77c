"""Graders of the exercises on a script of one's own: torch's sampler, one process with all tokens, planted mistakes."""

import random

import torch
from torch import nn
from torch.utils.data import DistributedSampler

from aiscale.lesson.grading import exercise, require, same_on_ranks

# 09.1 ---------------------------------------------------------------------------------------------------------------


def by_torch(n: int, size: int, rank: int, seed: int, epoch: int, drop: bool = False) -> list[int]:
    sampler = DistributedSampler(range(n), size, rank, shuffle=True, seed=seed, drop_last=drop)
    sampler.set_epoch(epoch)
    return list(sampler)


@exercise(
    "09.1",
    "Whose samples?",
    "my_indices",
    minutes=8,
    hints=[
        "`torch.randperm(n, generator=torch.Generator().manual_seed(number))` is the same order on every rank.",
        "`order[rank::n_ranks]` deals like cards. What must the length of `order` be, so that all get as many?",
        "With 2 samples and 5 ranks the order is needed two and a half times.",
    ],
)
def whose_samples(my_indices):
    sizes = [random.choice((9, 13, 17, 21)), 12, random.choice((2, 3))]
    for n, size in zip(sizes, (4, 4, random.choice((7, 8))), strict=True):
        seed, epoch = random.randint(1, 900), random.randint(1, 9)
        where = f"{n} samples on {size} ranks, seed {seed}, epoch {epoch}"
        expected = [by_torch(n, size, rank, seed, epoch) for rank in range(size)]
        found = [my_indices(n, size, rank, seed, epoch) for rank in range(size)]
        require(
            all(isinstance(mine, (list, tuple)) for mine in found),
            f"{where}: return a list of integers, not {type(found[0]).__name__}",
        )
        found = [[int(i) for i in mine] for mine in found]
        lengths = [len(mine) for mine in found]
        require(
            len(set(lengths)) == 1,
            f"{where}: ranks get {lengths} indices: where one has fewer, the others wait for it for ever",
        )
        seen = {i for mine in found for i in mine}
        require(seen == set(range(n)), f"{where}: {len(seen)} of the samples come up, not all {n}")
        require(lengths[0] == len(expected[0]), f"{where}: each rank gets {lengths[0]} indices, not {len(expected[0])}")
        for why, by in {
            "every epoch has the same order": (seed, 0),
            "every job has the same order: what of the seed?": (0, epoch),
            "it is the order of seed 0 in epoch 0": (0, 0),
        }.items():
            others = [by_torch(n, size, rank, *by) for rank in range(size)]
            require(found == expected or found != others, f"{where}: {why}")
        each = len(expected[0])
        order = [expected[i % size][i // size] for i in range(each * size)]
        pieces = [order[rank * each : (rank + 1) * each] for rank in range(size)]
        require(
            found == expected or found != pieces, f"{where}: each rank has a piece of the order: deal it out one by one"
        )
        for rank, (mine, right) in enumerate(zip(found, expected, strict=True)):
            require(mine == right, f"{where}: rank {rank} has {mine[:5]} ... and should have {right[:5]} ...")


_ORDER = """
order = torch.randperm(n_samples, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
each = -(-n_samples // n_ranks)
"""
_DEAL = "return [order[i % n_samples] for i in range(rank, each * n_ranks, n_ranks)]"
whose_samples.refuses("nothing padded", "wait for it for ever", _ORDER + "return order[rank::n_ranks]")
whose_samples.refuses(
    "the rest dropped",
    "come up, not all",
    _ORDER + "return order[rank : n_samples // n_ranks * n_ranks : n_ranks]",
)
whose_samples.refuses("set_epoch forgotten", "every epoch", _ORDER.replace("seed + epoch", "seed") + _DEAL)
whose_samples.refuses("seed forgotten", "what of the seed", _ORDER.replace("seed + epoch", "epoch") + _DEAL)
whose_samples.refuses(
    "pieces, not cards",
    "one by one",
    _ORDER + "return [order[i % n_samples] for i in range(rank * each, (rank + 1) * each)]",
)
whose_samples.refuses(
    "padded with the last",
    "should have",
    _ORDER + "return (order + [order[-1]] * n_ranks)[: each * n_ranks][rank::n_ranks]",
)
whose_samples.refuses(
    "padded once only",
    "wait for it for ever",
    _ORDER + "return (order + order)[: each * n_ranks][rank::n_ranks]",
)
whose_samples.refuses("hard-coded for the shown order", "come up, not all", "return [4, 2]")


# 09.2 ---------------------------------------------------------------------------------------------------------------


def flat_gradient(model: nn.Module, batches: list, reduction: str = "sum") -> torch.Tensor:
    """The gradient of the loss of these batches in this process: the sum, or the mean, over all their tokens."""
    model.zero_grad()
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    nn.functional.cross_entropy(model(x), y, reduction=reduction).backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


def draw_micro_batches(count: int, width: int, classes: int) -> list:
    """Micro-batches of unequal numbers of tokens, all with some padding."""
    batches = []
    for tokens in random.sample(range(2, 15), count):
        padding = random.randint(1, 4)
        y = torch.cat([torch.randint(classes, (tokens,)), torch.full((padding,), -100)])
        batches.append((torch.randn(tokens + padding, width).double(), y))
    return batches


@exercise(
    "09.2",
    "Every token counts once",
    "token_mean_gradient",
    minutes=12,
    ranks=True,
    hints=[
        "Sums add up, means do not: `cross_entropy(..., reduction='sum')`, and `backward` adds to the gradients.",
        "Two numbers are needed of all ranks: the sum of the gradients, and how many targets are not -100.",
        "`p.grad.reshape(-1)` of all parameters, put together by `torch.cat`, is one message.",
    ],
)
def every_token(token_mean_gradient):
    n = token_mean_gradient.size
    for counts in ([3] * n, [2 + (r % 3) for r in range(n)]):
        width, classes = random.randint(3, 6), random.randint(4, 7)
        model = nn.Linear(width, classes).double()
        tokens = [0] * n
        while len(set(tokens)) < n:  # ranks have unequal shares
            batches = [draw_micro_batches(count, width, classes) for count in counts]
            tokens = [sum(int((y != -100).sum()) for _, y in mine) for mine in batches]
        everything = [batch for mine in batches for batch in mine]
        whole = flat_gradient(model, everything, "mean")
        sums = [flat_gradient(model, mine) for mine in batches]
        means = [torch.stack([flat_gradient(model, [batch], "mean") for batch in mine]) for mine in batches]
        places = sum(len(y) for _, y in everything)
        causes = {
            "this is the mean of the micro-batches' means, where a token of a short one counts more": [
                sum(mine.mean(0) for mine in means) / n
            ]
            * n,
            "this is the sum of the micro-batches' means": [sum(mine.sum(0) for mine in means)] * n,
            "the micro-batches' means are added up, and divided by the ranks alone": [
                sum(mine.sum(0) for mine in means) / n
            ]
            * n,
            "nothing has arrived from the other ranks": [s / t for s, t in zip(sums, tokens, strict=True)],
            "this is the sum of this rank's tokens": sums,
            "each rank divides by its own tokens, not by those of all ranks": [sum(sums) / t for t in tokens],
            "this is the mean of the ranks' means: a token on a rank with few counts more": [
                sum(s / t for s, t in zip(sums, tokens, strict=True)) / n
            ]
            * n,
            "padding is counted as well": [sum(sums) / places] * n,
            "this is the last micro-batch's": [mine[-1] for mine in means],
        }
        scales = {
            sum(tokens): "divide by all tokens",
            1 / n: "the sum over all ranks needs no division but that by the tokens",
            sum(tokens) / n: "this is divided by the number of ranks, not by the tokens of all",
        }
        found = token_mean_gradient.each([model] * n, batches)
        same_on_ranks(found, [whole] * n, "the gradient", scale=scales, causes=causes, rtol=1e-9)
        sent = sum(nbytes for _, nbytes in token_mean_gradient.sent[0].values())
        require(
            sent <= whole.nbytes + 8,
            f"right, but a rank handed over {sent} bytes, and gradient and count have {whole.nbytes + 8}: "
            "send after all micro-batches",
        )


_FLAT = "gradient = torch.cat([p.grad.reshape(-1) for p in model.parameters()])\n"
_SUMMED = (
    """
n_tokens = torch.tensor(0)
for x, y in micro_batches:
    cross_entropy(model(x), y, reduction="sum").backward()
    n_tokens += (y != -100).sum()
"""
    + _FLAT
)
_SENT = "dist.all_reduce(gradient)\ndist.all_reduce(n_tokens)\n"
every_token.refuses(
    "mean of means",
    "the mean of the micro-batches' means",
    "for x, y in micro_batches:\n    (cross_entropy(model(x), y) / len(micro_batches)).backward()\n"
    + _FLAT
    + "dist.all_reduce(gradient)\nreturn gradient / world_size",
)
every_token.refuses(
    "padding counted",
    "padding is counted",
    _SUMMED.replace("(y != -100).sum()", "len(y)") + _SENT + "return gradient / n_tokens",
)
every_token.refuses(
    "its own tokens", "by its own tokens", _SUMMED + "dist.all_reduce(gradient)\nreturn gradient / n_tokens"
)
every_token.refuses("nothing sent", "nothing has arrived", _SUMMED + "return gradient / n_tokens")
every_token.refuses(
    "mean of the ranks' means",
    "the mean of the ranks' means",
    _SUMMED + "gradient /= n_tokens\ndist.all_reduce(gradient)\nreturn gradient / world_size",
)
every_token.refuses("never divided", "divide by all tokens", _SUMMED + _SENT + "return gradient")
every_token.refuses(
    "divided by the ranks as well", "needs no division", _SUMMED + _SENT + "return gradient / n_tokens / world_size"
)
every_token.refuses(
    "every micro-batch sent",
    "send after all micro-batches",
    """
    total, n_tokens = 0, torch.tensor(0)
    for x, y in micro_batches:
        model.zero_grad()
        cross_entropy(model(x), y, reduction="sum").backward()
        gradient = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
        dist.all_reduce(gradient)
        total = total + gradient
        n_tokens += (y != -100).sum()
    dist.all_reduce(n_tokens)
    return total / n_tokens
    """,
)
every_token.refuses(
    "hard-coded for two micro-batches",
    "the gradient",
    _SUMMED.replace("micro_batches:", "micro_batches[:2]:") + _SENT + "return gradient / n_tokens",
)


# 09.3 ---------------------------------------------------------------------------------------------------------------


def job_with(mistake: str, blame: int) -> tuple[list, int, list[int], int]:
    """The dumps of a job where `blame` ranks make a mistake, its number, who made it, the first number in all dumps."""
    n, number = random.randint(5, 9), random.randint(20, 90)
    sizes = random.sample(range(100, 999), 16)
    good = {number - 8 + i: ("all_reduce", size) for i, size in enumerate(sizes)}
    guilty = sorted(random.sample(range(n), blame))
    begins = random.sample([1, 6, *random.choices(range(1, 7), k=n - 2)], n)  # numbers before the mistake
    dumps = []
    for rank in range(n):
        did = dict(good)
        end = number + (2 if mistake == "none" else random.randint(1, 3))
        if rank in guilty and mistake == "never came":
            end = number - 1
        elif rank in guilty and mistake == "another size":
            did[number] = ("all_reduce", did[number][1] + 1)
        elif rank in guilty and mistake == "another operation":
            did[number] = ("all_gather", did[number][1])
        elif rank in guilty and mistake == "one more":
            did = {at: good[at] if at < number else good[at - 1] for at in list(good)[1:]} | {number: ("barrier", 1)}
        dumps.append([(at, *did[at]) for at in range(number - begins[rank], end + 1)])
    return dumps, number, guilty, number - min(begins)


@exercise(
    "09.3",
    "Who is to blame?",
    "culprits",
    minutes=10,
    hints=[
        "Make a dictionary of each dump, from the number to what was done, and go through the numbers in order.",
        "Begin with the first number that *every* dump still has: the largest of the dumps' first numbers.",
        "`Counter(what_each_did).most_common(1)` is what most did; `dictionary.get(number)` is None past the end.",
    ],
)
def who_is_to_blame(culprits):
    kinds = ["never came", "another size", "another operation", "one more", "none"]
    for i, mistake in enumerate(random.sample(kinds, len(kinds))):
        dumps, number, guilty, begins = job_with(mistake, blame=1 + i % 2)
        found, where = culprits(dumps), f"a job of {len(dumps)} ranks"
        named = f"rank {guilty[0]} differs" if len(guilty) == 1 else f"ranks {guilty[0]} and {guilty[1]} differ"
        told = f"at number {number} {named} ({mistake})"
        if found is None:
            require(mistake == "none", f"{where}: you found nothing, but {told}")
            continue
        require(
            isinstance(found, (tuple, list)) and len(found) == 2 and isinstance(found[1], (tuple, list)),
            f"return a number and a list of ranks, not {str(found)[:60]}",
        )
        at, ranks = int(found[0]), list(found[1])
        require(
            at >= begins, f"{where}: you say number {at}, but only from {begins} on do all dumps still have each number"
        )
        require(mistake != "none", f"{where}: you say number {at}, but all did the same: return None")
        require(at <= number, f"{where}: you say number {at}, but {told}: what comes after says nothing")
        require(at == number, f"{where}: you say number {at}, but there all ranks did the same, and {told}")
        others = [rank for rank in range(len(dumps)) if rank not in guilty]
        require(ranks != others, f"{where}: {ranks} are most ranks, and wait: the few others are to blame")
        require(ranks == guilty, f"{where}: number {at} is right, but {told}, and you name {ranks}")


_BY_NUMBER = """
by_number = [{number: tuple(what) for number, *what in dump} for dump in dumps]
first, last = max(map(min, by_number)), max(map(max, by_number))
for number in range(first, last + 1):
    did = [entries.get(number) for entries in by_number]
    most = Counter(did).most_common(1)[0][0]
    odd = [rank for rank, what in enumerate(did) if what != most]
    if odd:
        return number, odd
"""
who_is_to_blame.refuses(
    "by place, not by number",
    "a job of",
    """
    for i in range(max(map(len, dumps))):
        did = [dump[i][1:] if i < len(dump) else None for dump in dumps]
        most = Counter(did).most_common(1)[0][0]
        odd = [rank for rank, what in enumerate(did) if what != most]
        if odd:
            return dumps[0][min(i, len(dumps[0]) - 1)][0], odd
    """,
)
who_is_to_blame.refuses(
    "forgotten entries taken for missing ones",
    "all dumps still have",
    _BY_NUMBER.replace("max(map(min, by_number))", "min(map(min, by_number))"),
)
who_is_to_blame.refuses("sizes left out", "(another size)", _BY_NUMBER.replace("tuple(what)", "what[0]"))
who_is_to_blame.refuses(
    "the ranks that wait",
    "and wait",
    _BY_NUMBER.replace("return number, odd", "return number, [rank for rank in range(len(did)) if rank not in odd]"),
)
who_is_to_blame.refuses(
    "the last difference", "says nothing", _BY_NUMBER.replace("range(first, last + 1)", "range(last, first - 1, -1)")
)
who_is_to_blame.refuses("the lowest rank alone", "you name", _BY_NUMBER.replace("number, odd", "number, odd[:1]"))
who_is_to_blame.refuses("hard-coded for the shown job", "a job of", "return 8, [1]")
