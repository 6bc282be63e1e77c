"""Graders on compression: our script, numpy's choice, the ranks' whole gradients, a ring hop by hop."""

import random

import numpy
import torch

from aiscale.lesson.gap_grader import Gap
from aiscale.lesson.grading import exercise, require, same


def largest(values: torch.Tensor, k: int, by: torch.Tensor | None = None) -> torch.Tensor:
    """The values in the k places where `by` is largest, zeros elsewhere; by default the largest in size."""
    flat, kept = values.numpy().ravel(), numpy.zeros(values.numel())
    places = numpy.argsort(numpy.abs(flat) if by is None else by.numpy().ravel())[-k:]
    kept[places] = flat[places]
    return torch.from_numpy(kept.reshape(values.shape))


def draw_with_large_negative(shape: tuple[int, ...]) -> torch.Tensor:
    """Its entry of the largest size is negative, so that a choice without sizes shows."""
    values = torch.randn(shape).double()
    values.view(-1)[random.randrange(values.numel())] = -9.0
    return values


# 08.a ---------------------------------------------------------------------------------------------------------------

_ALSO = "--density 0.4 --interval 3"  # steps 0, 3 and 6 are dense
sent_part = Gap(
    "08.a",
    "What is sent, and what waits",
    "train_radius.py",
    minutes=8,
    arguments="--density 1",
    explained={"what is done to it later is not": "does anything arrive that an earlier step has sent?"},
    hints=[
        "One flat tensor of residuals and one of masks, by `torch.cat` over `parameters`. A dense step fills the mask.",
        "Three things follow from the mask and `total`, the gradient and all that has waited: what goes is "
        "`total[mask]`, what waits is `total` with zeros there, and what comes back belongs where the mask is set.",
        "`def unpack(mean): return torch.zeros_like(gradient).masked_scatter_(mask, mean.value()[0])`, and divide "
        "what is sent by `world_size`.",
    ],
    solution="""
        total = gradient + torch.cat([self.residual[p] for p in parameters])
        mask = torch.cat([self.mask[p] for p in parameters])
        if self.step % self.interval == 0:
            mask = torch.ones_like(mask)
        kept = total.masked_fill(mask, 0).split([p.numel() for p in parameters])
        self.residual.update(zip(parameters, kept))

        def unpack(mean):
            return torch.zeros_like(gradient).masked_scatter_(mask, mean.value()[0])

        return dist.all_reduce(total[mask] / world_size, async_op=True).get_future().then(unpack)
    """,
)
sent_part.prints_as_ours(
    _ALSO,
    7,
    {
        2: "step 1 is sparse, and the first of its kind: which entries arrive, divided by what, and at which places?",
        3: "step 2 is sparse, the second in a row: do the entries of step 1 go again, those that wait not yet?",
        4: "step 3 is dense: all that has waited since step 0 must arrive, once",
    },
)
_TOTAL = """
total = gradient + torch.cat([self.residual[p] for p in parameters])
mask = torch.cat([self.mask[p] for p in parameters])
if self.step % self.interval == 0:
    mask = torch.ones_like(mask)
"""
_KEPT = """
kept = total.masked_fill(mask, 0).split([p.numel() for p in parameters])
self.residual.update(zip(parameters, kept))
"""
_SENT = """
def unpack(mean):
    return torch.zeros_like(gradient).masked_scatter_(mask, mean.value()[0])

return dist.all_reduce(total[mask] / world_size, async_op=True).get_future().then(unpack)
"""
sent_part.refuses("no division", "summed over ranks, not averaged", _TOTAL + _KEPT + _SENT.replace(" / world_size", ""))
sent_part.refuses(
    "no residual", "step 3 is dense", _TOTAL.replace("gradient + torch", "gradient + 0 * torch") + _KEPT + _SENT
)
sent_part.refuses("nothing kept", "step 3 is dense", _TOTAL + _SENT)
sent_part.refuses(
    "the residual stays beside",
    "step 3 is dense",
    _TOTAL
    + """
for p, more in zip(parameters, total.masked_fill(mask, 0).split([p.numel() for p in parameters])):
    self.residual[p] += more
"""
    + _SENT,
)
sent_part.refuses(
    "what was sent waits, too",
    "an earlier step has sent",
    _TOTAL + _KEPT.replace("total.masked_fill(mask, 0)", "total") + _SENT,
)
sent_part.refuses(
    "what was sent waits alone", "an earlier step has sent", _TOTAL + _KEPT.replace("(mask, 0)", "(~mask, 0)") + _SENT
)
sent_part.refuses("never dense", "step 3 is dense", _TOTAL.replace("% self.interval == 0", "< 0") + _KEPT + _SENT)
sent_part.refuses("always dense", "bytes in a step", _TOTAL.replace("% self.interval == 0", ">= 0") + _KEPT + _SENT)
sent_part.refuses(
    "its own gradient elsewhere",
    "ranks have different weights",
    _TOTAL + _KEPT + _SENT.replace("torch.zeros_like(gradient)", "gradient.clone()"),
)
sent_part.refuses(
    "everything sent, then masked",
    "bytes in a step",
    _TOTAL
    + _KEPT
    + """
def masked(mean):
    return mean.value()[0] * mask

return dist.all_reduce(total / world_size, async_op=True).get_future().then(masked)
""",
)
sent_part.refuses(
    "divided twice",
    "divided by the number of ranks twice",
    _TOTAL + _KEPT + _SENT.replace("/ world_size", "/ world_size**2"),
)
sent_part.refuses(
    "not unpacked",
    "it stopped: ranks",
    _TOTAL
    + _KEPT
    + """
return dist.all_reduce(total[mask] / world_size, async_op=True).get_future().then(lambda mean: mean.value()[0])
""",
)
sent_part.refuses(
    "no future",
    "must return a torch.futures.Future",
    _TOTAL
    + _KEPT
    + """
packed = total[mask] / world_size
dist.all_reduce(packed)
return torch.zeros_like(gradient).masked_scatter_(mask, packed)
""",
)
sent_part.refuses(
    "nothing sent",
    "never averaged",
    """
future = torch.futures.Future()
future.set_result(gradient)
return future
""",
)

# 08.b ---------------------------------------------------------------------------------------------------------------

new_mask = Gap(
    "08.b",
    "The mask",
    "train_radius.py",
    minutes=6,
    arguments="--density 1",
    explained={"what is done to it later is not": "step 1 is sparse, and at density 1 all its masks must be full"},
    hints=[
        "Only after a dense step, and for each p with p.dim() > 1: k = max(int(self.density * p.numel()), 1).",
        "`(mean / (square.sqrt() + 1e-8)).abs().flatten().topk(k).indices` are the places.",
        "`torch.zeros_like(self.mask[p]).index_fill_(0, places, True)` is a mask.",
    ],
    solution="""
        if self.step % self.interval == 0:
            for p in self.mask:
                if p.dim() > 1:  # biases and norms are always sent
                    mean, square = optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]
                    size = (mean / (square.sqrt() + 1e-8)).abs().flatten()  # all scaled alike
                    chosen = size.topk(max(int(self.density * p.numel()), 1)).indices
                    self.mask[p] = torch.zeros_like(self.mask[p]).index_fill_(0, chosen, True)
    """,
)
new_mask.prints_as_ours(
    _ALSO,
    7,
    {
        2: "step 1 sends other entries: after the dense step 0, which are the largest in size of m / (sqrt(v) + 1e-8)?",
        3: "step 2 sends other entries than step 1: a mask stays until the next dense step",
        5: "step 4 sends other entries: after the dense step 3, which are the largest in size of m / (sqrt(v) + 1e-8)?",
    },
)
_CHOICE = """
if self.step % self.interval == 0:
    for p in self.mask:
        if p.dim() > 1:
            mean, square = optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]
            size = (mean / (square.sqrt() + 1e-8)).abs().flatten()
            chosen = size.topk(max(int(self.density * p.numel()), 1)).indices
            self.mask[p] = torch.zeros_like(self.mask[p]).index_fill_(0, chosen, True)
"""
_OTHER = "step 1 sends other entries"
new_mask.refuses("the smallest", _OTHER, _CHOICE.replace(", 1))", ", 1), largest=False)"))
new_mask.refuses("the largest, not in size", _OTHER, _CHOICE.replace(".abs()", ""))
new_mask.refuses(
    "by the mean alone", "step 4 sends other entries", _CHOICE.replace("mean / (square.sqrt() + 1e-8)", "mean")
)
new_mask.refuses("without the root", _OTHER, _CHOICE.replace("square.sqrt()", "square"))
new_mask.refuses(
    "by the last gradient", "step 4 sends other entries", _CHOICE.replace("mean / (square.sqrt() + 1e-8)", "p.grad")
)
new_mask.refuses(
    "by numbers of each rank",
    "ranks have different weights",
    _CHOICE.replace("mean / (square", "(mean + rank * mean.flip(0)) / (square"),
)
new_mask.refuses("after every step", "a mask stays until", _CHOICE.replace("self.step % self.interval == 0", "True"))
new_mask.refuses("after sparse steps", "bytes in a step", _CHOICE.replace("interval == 0", "interval"))
new_mask.refuses("biases chosen, too", _OTHER, _CHOICE.replace("if p.dim() > 1", "if p.dim()"))
new_mask.refuses("biases alone", "bytes in a step", _CHOICE.replace("p.dim() > 1", "p.dim() == 1"))
new_mask.refuses("never", "bytes in a step", "pass")
new_mask.refuses("the rest", "all its masks must be full", _CHOICE.replace("self.density *", "(1 - self.density) *"))
new_mask.refuses(
    "the mask added to", "bytes in a step", _CHOICE.replace("torch.zeros_like(self.mask[p])", "self.mask[p]")
)

# 08.1 ---------------------------------------------------------------------------------------------------------------


@exercise(
    "08.1",
    "Nothing is lost",
    "top_k_step",
    minutes=8,
    hints=[
        "What may be sent is the sum of gradient and residual. Which of its entries are largest in size?",
        "`x.abs().flatten().topk(k).indices` are their places in the flattened tensor.",
        "Sent and new residual add up to that sum, in every step.",
    ],
)
def nothing_is_lost(top_k_step):
    for shape in ((random.randint(4, 6), random.randint(5, 8)), (random.randint(30, 40),)):
        k = random.randint(4, 7)
        residual = 2 * torch.randn(shape).double()  # of the steps before
        for step in range(3):
            gradient = draw_with_large_negative(shape)
            waiting = gradient + residual
            expected = largest(waiting, k)
            found = top_k_step(gradient, residual, k)
            require(
                isinstance(found, (tuple, list)) and len(found) == 2, "return two tensors: what is sent, and what waits"
            )
            sent, kept = found
            count = int(torch.count_nonzero(torch.as_tensor(sent)))
            require(count <= k, f"{count} entries are sent, and k is {k}")
            causes = {
                "the largest are chosen, but not the largest in size: what of negative ones?": largest(
                    waiting, k, waiting
                ),
                "the residual is never sent: the gradient alone is here": largest(gradient, k),
                "the places are chosen by the gradient alone, so what waits can wait for ever": largest(
                    waiting, k, gradient.abs()
                ),
                "the gradient of the chosen places goes, what waited there does not": largest(
                    gradient, k, waiting.abs()
                ),
            }
            same(sent, expected, "what is sent", causes=causes, rtol=1e-9)
            left = waiting - expected
            causes = {
                "what waited before is lost": torch.where(expected != 0, 0.0, gradient),
                "what waited before is lost, and what was sent of it is taken off": gradient - expected,
                "what was sent waits as well, so it is sent twice": waiting,
                "it is what it was before: what of this step's gradient?": residual,
            }
            same(kept, left, f"the residual after step {step}", causes=causes, rtol=1e-9)
            residual = left


_CHOSEN = """
waiting = gradient + residual
places = waiting.abs().flatten().topk(k).indices
mask = torch.zeros(waiting.numel(), dtype=torch.bool)
mask[places] = True
mask = mask.view_as(waiting)
sent = torch.where(mask, waiting, 0)
"""
nothing_is_lost.refuses(
    "the older residual lost", "what waited before is lost", _CHOSEN + "return sent, gradient - sent"
)
nothing_is_lost.refuses(
    "only this step's rest kept",
    "what waited before is lost",
    _CHOSEN + "return sent, torch.where(mask, 0, gradient)",
)
nothing_is_lost.refuses("sent and kept", "sent twice", _CHOSEN + "return sent, waiting")
nothing_is_lost.refuses(
    "largest without sizes",
    "not the largest in size",
    _CHOSEN.replace(".abs()", "") + "return sent, waiting - sent",
)
nothing_is_lost.refuses(
    "residual never sent",
    "the residual is never sent",
    _CHOSEN.replace("waiting = gradient + residual", "waiting = gradient") + "return sent, residual + gradient - sent",
)
nothing_is_lost.refuses(
    "chosen by the gradient",
    "wait for ever",
    _CHOSEN.replace("waiting.abs()", "gradient.abs()") + "return sent, waiting - sent",
)
nothing_is_lost.refuses(
    "hard-coded for the shown k of 1",
    "what is sent",
    _CHOSEN.replace("topk(k)", "topk(1)") + "return sent, waiting - sent",
)


# 08.3 ---------------------------------------------------------------------------------------------------------------


def reduced_s(buffer: float, n: int, rate: float) -> float:
    """A ring all-reduce: n - 1 hops that add up, n - 1 that hand out, each of an nth of the buffer."""
    return sum(buffer / n / rate for _ in range(2) for _ in range(n - 1))


def gathered_s(piece: float, n: int, rate: float) -> float:
    """An all-gather: n - 1 hops of a whole piece."""
    return sum(piece / rate for _ in range(n - 1))


def level(whole_s: float, compressing_s: float, seconds_at) -> float:
    """The density at which compressing takes as long as sending everything, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if compressing_s + seconds_at(middle) < whole_s else (low, middle)
    return low


@exercise(
    "08.3",
    "When does it pay?",
    "densities_that_pay",
    minutes=12,
    core=False,
    hints=[
        "What is left of dense's seconds after compressing is what the sparse exchange may take.",
        "At density 1, how long would top-k's all-gather take, and Radius's all-reduce? Both grow evenly with density.",
    ],
)
def when_it_pays(densities_that_pay):
    kinds = random.sample((True, True, True, False), 4)
    for n, pays in zip(random.sample((2, 8, 16, 64), 4), kinds, strict=True):
        numbers, rate = random.randint(1, 90) * 10**7, random.uniform(2, 90) * 1e9
        whole_s = reduced_s(4 * numbers, n, rate)
        compressing_s = whole_s * (random.uniform(0.1, 0.8) if pays else random.uniform(1.1, 3))
        top_k = level(whole_s, compressing_s, lambda d: gathered_s(8 * d * numbers, n, rate))  # noqa: B023
        radius = level(whole_s, compressing_s, lambda d: reduced_s(4 * d * numbers, n, rate))  # noqa: B023
        where = f"on {n} ranks"
        found = densities_that_pay(n, numbers, rate, compressing_s)
        require(isinstance(found, (tuple, list)) and len(found) == 2, f"return a pair, not {str(found)[:60]}")
        if not pays:
            require(
                max(map(abs, found)) < 1e-9,
                f"{where}: compressing takes {compressing_s:.3g} s and dense {whole_s:.3g} s, so no density pays: "
                f"return 0, not {found[0]:.3g} and {found[1]:.3g}",
            )
            continue
        one = whole_s / gathered_s(8 * numbers, n, rate)
        causes = {"compressing takes time, too": one}
        scales = {
            2: "do the indices travel for free?",
            n / 2: "an all-gather hands this piece to each of the n - 1 others",
            n: "an all-gather hands this piece to each of the n - 1 others",
            n - 1: "an all-gather hands this piece to each of the n - 1 others",
        }
        if n == 2:
            scales = {2: "do the indices travel for free?"}
        same(found[0], top_k, f"{where}, top-k's density", scale=scales, causes=causes, rtol=1e-6)
        causes = {"compressing takes time, too": 1.0}
        scales = {0.5: "Radius sends no indices"}
        same(found[1], radius, f"{where}, Radius's density", scale=scales, causes=causes, rtol=1e-6)


_DENSE = """
dense_s = 2 * (n_ranks - 1) / n_ranks * 4 * n_numbers / bytes_per_s
top_k_s = (n_ranks - 1) * 8 * n_numbers / bytes_per_s
left_s = max(dense_s - compressing_s, 0)
"""
_BOTH = "return left_s / top_k_s, left_s / dense_s"
when_it_pays.refuses("indices for free", "travel for free", _DENSE.replace("8 *", "4 *") + _BOTH)
when_it_pays.refuses(
    "top-k by all-reduce",
    "top-k's density",
    _DENSE.replace("(n_ranks - 1) * 8", "2 * (n_ranks - 1) / n_ranks * 8") + _BOTH,
)
when_it_pays.refuses(
    "Radius with indices", "sends no indices", _DENSE + "return left_s / top_k_s, left_s / dense_s / 2"
)
when_it_pays.refuses(
    "compressing forgotten", "compressing takes", _DENSE.replace("max(dense_s - compressing_s, 0)", "dense_s") + _BOTH
)
when_it_pays.refuses(
    "below zero",
    "no density pays",
    _DENSE.replace("max(dense_s - compressing_s, 0)", "dense_s - compressing_s") + _BOTH,
)
when_it_pays.refuses("hard-coded for the shown job", "on ", "return 0.225, 0.9")
