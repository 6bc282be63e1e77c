"""Collectives matched by order, not by name."""

from jobs import start
from model import LM, read_windows
from serial import agree, all_steps, equal, ran, train
from torch import nn, optim

RANKS = 2
RIGHT = "d"
REPLIES = {
    "a": "A router that prefers one expert changes what is learned in one process too. Here the kinds take turns, and "
    "the curve parts from one process with the same batches.",
    "b": "Different seeds would show at step 0. The loss of step 0 is right to the last digit.",
    "c": "Where both ranks' batches are of one kind, the division by 2 is right, and it is the same division.",
}
HINTS = [
    "In a step where the ranks' kinds differ, which parameters have a gradient on rank 0, and which on rank 1?",
    "Write down the all_reduce calls of both ranks in order. How does a call know its partner?",
    "It does not: the n-th call of one meets the n-th of the other. Experts have equal shapes, so nobody complains.",
    "All ranks must make the same calls: a parameter without gradient contributes zeros.",
]
EXPLANATION = """\
The n-th collective of a rank meets the n-th of the others; tensors have no names on the wire. In a step where rank 0
has read kind 0 and rank 1 kind 1, each has gradients for the trunk and for *its* expert. The numbers of calls and the
shapes are equal, so the gradient of expert 0 on rank 0 is added to that of expert 1 on rank 1, and each rank then
changes another expert with the mixture. No error, no hang: the copies of the experts drift apart, and the checkpoint is
rank 0's. Had the experts unequal shapes, the job would abort or hang.

Every rank must make the same calls in the same order, whatever its data: here, zeros for what was not used.
`DistributedDataParallel(..., find_unused_parameters=True)` does that, at the price of a walk through the graph in each
step. What does not help: averaging over those ranks alone that have used an expert. The mean is over the whole batch,
of which the other rank's share has gradient zero.
"""
_SKIP = (
    "        if parameter.grad is not None:\n            dist.all_reduce(parameter.grad)\n"
    "            parameter.grad /= dist.get_world_size()\n"
)
_ALWAYS = "        dist.all_reduce(parameter.grad)\n        parameter.grad /= dist.get_world_size()\n"
_ZEROS = "        if parameter.grad is None:\n            parameter.grad = torch.zeros_like(parameter)\n"
MENDED = [(_SKIP, _ZEROS + _ALWAYS)]
_COUNTED = (
    "        used = torch.tensor(float(parameter.grad is not None))\n        dist.all_reduce(used)\n"
    + _ZEROS
    + "        dist.all_reduce(parameter.grad)\n        parameter.grad /= used.clamp(min=1)\n"
)
WRONG = {
    "the mean over those that have one": ([(_SKIP, _COUNTED)], "twice as fast"),
    "experts not reduced at all": (
        [
            ("in model.parameters():\n", "in model.trunk.parameters():\n"),
            ("parameter.grad is not None", "parameter.grad is not None and parameter.requires_grad"),
        ],
        "rank .* at step",
    ),
    "weights of rank 0 sent to all": (
        [
            (
                "        optimizer.step()\n",
                "        optimizer.step()\n        for p in model.parameters():\n"
                "            dist.broadcast(p.data, 0)\n",
            )
        ],
        "rank .* at step",
    ),
    "unused gradients set to zero, then skipped": (
        [
            (
                _SKIP,
                _ZEROS + "        if parameter.grad.any():\n            dist.all_reduce(parameter.grad)\n"
                "            parameter.grad /= dist.get_world_size()\n",
            )
        ],
        "rank .* at step",
    ),
}
SYMPTOM = "loss of rank .* at step .*same calls"
STEPS = 12


class Experts(nn.Module):
    """What the program trains, in one process."""

    def __init__(self):
        super().__init__()
        self.trunk = LM(32)
        make = lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))  # noqa: E731
        self.experts = nn.ModuleList(make() for _ in range(2))

    def loss(self, share, kind):
        h = self.trunk.through(self.trunk.blocks, self.trunk.embed(share))
        return self.trunk.losses(h + self.experts[kind](h), share).mean()


def check(program, seed):
    job = ran(start(program, RANKS, steps=STEPS, lr=0.2, seed=seed))
    shares = read_windows(STEPS * 8).split(4)
    batches = [
        (shares[2 * step : 2 * step + 2], [(2 * step + r + step // 2) % 2 for r in (0, 1)]) for step in range(STEPS)
    ]

    def sgd(parameters):
        return optim.SGD(parameters, lr=0.2)

    def both(model, batch):
        return sum(model.loss(share, kind) for share, kind in zip(*batch, strict=True)) / 2

    def doubled(model, batch):
        if len(set(batch[1])) == 2:
            for parameter in model.experts.parameters():
                parameter.grad *= 2

    def curve(change=None):
        return [loss for loss, _ in train(seed, batches, sgd, make=Experts, loss_of=both, change=change)]

    losses = all_steps(job, STEPS)
    why = "Do both ranks make the same calls, whatever their data?"
    if agree(losses, curve(doubled)):
        why = "Experts learn twice as fast as they should: the share of a rank that did not use one counts, with zero"
    equal(losses, curve(), "the mean loss of rank 0 and 1 is", why)
