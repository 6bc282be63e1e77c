"""Dropout that differs where tensor-parallel ranks hold the same."""

from jobs import Unmended, start
from model import LM, read_windows
from serial import all_steps, equal, ran, sgd, train
from torch import nn

RANKS = 2
RIGHT = "b"
REPLIES = {
    "a": "With --dropout 0 both ranks print the same losses, and those of one process: the halves are cut, and summed, "
    "rightly.",
    "c": "The order of the sum may change the last digit. The ranks' losses differ in the third, from step 0 on.",
    "d": "Both ranks read the whole batch, as they should: tensor parallelism divides layers, not data. With "
    "--dropout 0 the losses are equal.",
}
HINTS = [
    "Run it with --dropout 0. What remains to look at?",
    "Which activations are the same on both ranks by design, and which are halves? Print the sum of each mask.",
    "After Leave all ranks hold the same `out`. What must be true of the mask that is applied to it? And of hidden's?",
    "Two generators: one of the same seed on all ranks, for what all hold; one of a rank's own, for what is divided.",
]
EXPLANATION = """\
Tensor parallelism keeps two kinds of activations. The residual stream is the same on all ranks; hidden units are
divided. Dropout on the first must draw the *same* mask everywhere, or each rank goes on with another network: the
copies of norms and embeddings get different gradients and drift apart, while each loss looks plausible. Dropout on the
second must draw *different* masks: with one seed for all, unit k of rank 0 and unit k of rank 1 always fall together,
and half of the randomness is gone.

So there are two streams of random numbers: Megatron-Core forks one named "model-parallel-rng" for what is divided, and
leaves the default one, seeded alike, for the rest. With activation checkpointing both states must be restored for the
second forward pass. Averaging the copies' gradients hides the drift, and not its cause.
"""
_DROP = "def dropout(x, p):\n    return x * (torch.rand(x.shape) >= p) / (1 - p) if p else x\n"
_TWO = "def dropout(x, p, draws):\n    return x * (torch.rand(x.shape, generator=draws) >= p) / (1 - p) if p else x\n"
_SEEDS = "    torch.manual_seed(args.seed + 1 + dist.get_rank())  # each rank has random numbers of its own\n"
MENDED = [
    ("D, H = 32, 128\n", "D, H = 32, 128\nshared, own = torch.Generator(), torch.Generator()\n"),
    (_DROP, _TWO),
    ("dropout(hidden, self.p)", "dropout(hidden, self.p, own)"),
    ("dropout(out, self.p)", "dropout(out, self.p, shared)"),
    (_SEEDS, "    shared.manual_seed(args.seed + 1)\n    own.manual_seed(args.seed + 2 + dist.get_rank())\n"),
]
WRONG = {
    "one seed for all": (
        [(" + dist.get_rank())  # each rank has random numbers of its own", ")")],
        "hidden units .* same mask",
    ),
    "no dropout on the residual": ([("dropout(out, self.p)", "out")], "no dropout is drawn .*residual"),
    "no dropout at all": (
        [("LM(D, layers=0)", "LM(D, layers=0).eval()"), (" if p else x", " if p < 0 else x")],
        "no dropout is drawn",
    ),
    "gradients of the copies averaged": (
        [
            (
                "        optimizer.step()\n",
                "        for p in model.parameters():\n            dist.all_reduce(p.grad, dist.ReduceOp.AVG)\n"
                "        optimizer.step()\n",
            )
        ],
        "another loss",
    ),
    "the printed loss averaged": (
        [
            (
                "        loss.backward()\n        optimizer",
                "        loss.backward()\n        dist.all_reduce(loss.detach(), dist.ReduceOp.AVG)\n        optimizer",
            )
        ],
        "different masks",
    ),
}
SYMPTOM = "rank 1 has another loss than rank 0 at step 0"
STEPS = 12


class Serial(LM):
    """The same network, whole; its parameters are made in the same order."""

    def __init__(self):
        super().__init__(32, layers=0)
        self.norms, self.ups, self.downs = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for _ in range(2):
            self.norms.append(nn.LayerNorm(32))
            self.ups.append(nn.Linear(32, 128, bias=False))
            self.downs.append(nn.Linear(128, 32, bias=False))

    def loss(self, windows):
        h = self.embed(windows)
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            h = h + down(nn.functional.gelu(up(norm(h))))
        return self.losses(h, windows).mean()


def check(program, seed):
    plain = ran(start(program, RANKS, steps=STEPS, dropout=0, seed=seed))
    batches = read_windows(STEPS * 8).split(8)
    right = train(seed, batches, sgd, make=Serial, loss_of=lambda model, batch: model.loss(batch))
    for rank in range(RANKS):
        equal(all_steps(plain, STEPS, rank), [loss for loss, _ in right], why=f"(Rank {rank}, with --dropout 0)")
    job = ran(start(program, RANKS, steps=STEPS, dropout=0.2, seed=seed))
    losses = [all_steps(job, STEPS, rank) for rank in range(RANKS)]
    draws = [rank["draws"] for rank in job.ranks]
    wide, half = ([[tuple(d[1:]) for d in mine if d[0][-1] == n] for mine in draws] for n in (32, 64))
    if not wide[0] or not half[0]:
        where = "of the residual" if half[0] else "of the hidden units" if wide[0] else "at all"
        raise Unmended(f"no dropout is drawn {where}: with --dropout 0.2 both places should have it, by torch.rand")
    for step, (mine, other) in enumerate(zip(*losses, strict=True)):
        if mine != other:
            raise Unmended(
                f"rank 1 has another loss than rank 0 at step {step} ({other:.6f}, {mine:.6f}): what both should hold "
                "alike differs"
            )
    if wide[0] != wide[1]:
        raise Unmended("ranks draw different masks for the residual stream, of which both hold the same")
    if half[0] == half[1]:
        raise Unmended(
            "the losses agree, but the hidden units of both ranks get the same mask: unit k of one half always falls "
            "with unit k of the other. Halves need random numbers of their own"
        )
