"""A load that each rank counts alone."""

import torch
from jobs import start
from model import LM, read_windows
from serial import agree, all_steps, equal, ran, train
from torch import nn, optim

RANKS = 4
RIGHT = "c"
REPLIES = {
    "a": "An expert without bytes on a rank has the gradient 0 there, and the mean with it is right: with `weight=0` "
    "the losses are those of one process.",
    "b": "Other routers would choose other experts: the loss of step 0 would differ. It is right to the last digit.",
    "d": "All bytes are routed, and none is dropped: an expert takes as many as choose it.",
}
HINTS = [
    "With `run 11 weight=0` the losses are those of one process. So it is in the balance. Which of its parts is a mean "
    "over bytes, and of which bytes?",
    "Write down the balance of two ranks for two experts: rank 0's bytes all choose expert 0, rank 1's all expert 1.",
    "Each rank alone is as uneven as can be, both together are even. A mean of products is not a product of means.",
    "Let `load` be that of all ranks. It has no gradient, so an all-reduce does not break one. `share.mean` may stay.",
]
EXPLANATION = """\
The balance multiplies two means over bytes: the share of bytes that chose an expert, and the mean of its scores. The
loss of a batch is the mean of its ranks' losses, and so are gradients; but the mean of products is not the product of
means. Each rank pushes the router away from the experts that its own few bytes prefer, even where the other rank's
bytes prefer the others. The balance that is printed is too large, and it grows with the number of ranks: fewer bytes a
rank are never as even as all together.

With the load of all ranks, each rank's product has the right first factor. The second is a mean of equal shares, which
the mean of gradients completes. To average the scores as well breaks the gradient: what an all-reduce returns has
none. To average the balance itself changes a number that is printed, and nothing that is learned. Megatron-Core's
`aux_loss` counts what a rank computes at once, `global_aux_loss` the whole batch.
"""
_LOAD = "        balance = len(load) *"
_ALL = "        dist.all_reduce(load, dist.ReduceOp.AVG)\n"
MENDED = [(_LOAD, _ALL + _LOAD)]
WRONG = {
    "the balance averaged": (
        [
            (
                "        return self.trunk.losses(h, windows)",
                "        mean = balance.detach().clone()\n        dist.all_reduce(mean, dist.ReduceOp.AVG)\n"
                "        balance = balance + mean - balance.detach()\n"
                "        return self.trunk.losses(h, windows)",
            )
        ],
        "of its own bytes",
    ),
    "summed, not averaged": ([(_LOAD, "        dist.all_reduce(load)\n" + _LOAD)], "too strong"),
    "scores averaged, too": (
        [
            (
                _LOAD,
                _ALL
                + "        scores = share.mean((0, 1)).detach()\n        dist.all_reduce(scores, dist.ReduceOp.AVG)\n"
                + _LOAD,
            ),
            ("load * share.mean((0, 1))", "load * scores"),
        ],
        "no gradient",
    ),
    "no balance": ([("loss + args.weight * balance", "loss + 0 * balance")], "no gradient"),
}
SYMPTOM = "loss .* at step .*of its own bytes"
STEPS = 12


class Mixture(nn.Module):
    """What the program trains, in one process."""

    def __init__(self):
        super().__init__()
        self.trunk, self.router = LM(32), nn.Linear(32, 8, bias=False)
        nn.init.normal_(self.router.weight)
        make = lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))  # noqa: E731
        self.experts = nn.ModuleList(make() for _ in range(8))

    def parts(self, windows):
        h = self.trunk.through(self.trunk.blocks, self.trunk.embed(windows))
        share = self.router(h).softmax(-1)
        chosen = share.argmax(-1)
        for i, expert in enumerate(self.experts):
            h = h + ((chosen == i) * share[..., i])[..., None] * expert(h)
        load = torch.bincount(chosen.flatten(), minlength=8) / chosen.numel()
        return self.trunk.losses(h, windows).mean(), load, share.mean((0, 1))


def check(program, seed):
    job = ran(start(program, RANKS, steps=STEPS, lr=0.1, seed=seed))

    def curve(weight=2.0, own=False):
        """Losses without the balance. `own`: each rank's sequence counts its own load."""
        losses = []

        def both(model, batch):
            parts = [model.parts(half) for half in batch.split(1)] if own else [model.parts(batch)]
            losses.append(sum(loss.item() for loss, _, _ in parts) / len(parts))
            return sum(loss + weight * 8 * (load * scores).sum() for loss, load, scores in parts) / len(parts)

        batches = read_windows(STEPS * 4).split(4)
        train(seed, batches, lambda p: optim.SGD(p, lr=0.1), make=Mixture, loss_of=both)
        return losses

    losses = all_steps(job, STEPS)
    causes = {
        "Each rank judges the load by that of its own bytes": curve(own=True),
        "The balance has no gradient": curve(weight=0.0),
        "The balance is too strong: shares add up to 1": curve(weight=2.0 * RANKS),
    }
    first = slice(4)  # later a byte between two experts may go to the other one
    why = next((words for words, spoilt in causes.items() if agree(losses[first], spoilt[first])), "")
    equal(losses, curve(), "the mean loss of the ranks is", why)
