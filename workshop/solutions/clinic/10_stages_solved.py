"""Tied weights cut in two."""

from jobs import start
from model import LM, read_windows
from serial import agree, all_steps, equal, ran, train
from torch import optim

RANKS = 2
RIGHT = "d"
REPLIES = {
    "a": "A wrong order of micro-batches would change the loss of step 0. It is right to the last digit.",
    "b": "Both stages divide rightly: with an untied head the curve is that of one process.",
    "c": "The sends carry the activations of the right micro-batch, or step 0 would be wrong; and gradients flow back, "
    "or the first stage would not learn at all.",
}
HINTS = [
    "Step 0 is right, step 1 is not: the forward pass is right, an update is not. Of which parameters?",
    "How many copies of the embedding are there? Compare their norms after a few steps.",
    "In one process the tied matrix gets two gradients, one as embedding and one as head. What does each copy get?",
    "Sum the gradients of the two copies over the two ranks before the step.",
]
EXPLANATION = """\
The first stage embeds with the matrix, the last predicts with it, so each rank has a copy, made from the same seed. In
one process autograd adds both gradients. Cut in two, each copy gets only its own: from the first update on they are two
different matrices, and the model has untied its weights without saying so. The loss still falls.

Before the step the copies' gradients are summed over the two ranks: a *sum*, since each is a part of one gradient; the
mean would halve it, which AdamW hides, being blind to the scale of gradients, and SGD does not. Copying the weights
from one stage to the other keeps them equal and loses one of the two gradients. Megatron-Core keeps a group of first
and last stage for this; and a norm of all gradients must count the matrix once.
"""
_STEP = "        optimizer.step()\n"
_SUM = "        dist.all_reduce(model.token.weight.grad)  # rank 0's as embedding, rank 1's as head\n"
MENDED = [(_STEP, _SUM + _STEP)]
WRONG = {
    "the mean of both": (
        [(_STEP, "        dist.all_reduce(model.token.weight.grad, dist.ReduceOp.AVG)\n" + _STEP)],
        "half the rate",
    ),
    "weights copied to the last stage": (
        [(_STEP, _STEP + "        dist.broadcast(model.token.weight.data, 0)\n")],
        "loss .* at step 1",
    ),
    "weights averaged": (
        [(_STEP, _STEP + "        dist.all_reduce(model.token.weight.data, dist.ReduceOp.AVG)\n")],
        "loss .* at step 1",
    ),
    "untied": ([("LM(WIDTH, tied=True)", "LM(WIDTH)")], "another model"),
}
SYMPTOM = "loss .* at step 1, and .* in one process"
STEPS = 12


def check(program, seed):
    job = ran(start(program, RANKS, steps=STEPS, seed=seed))

    def curve(change=None):
        make, batches = lambda: LM(32, tied=True), read_windows(STEPS * 8).split(8)
        return [loss for loss, _ in train(seed, batches, lambda p: optim.SGD(p, lr=0.1), make=make, change=change)]

    def halved(model, batch):
        model.token.weight.grad /= 2

    losses = all_steps(job, STEPS, rank=1)
    why = "Step 0 is the model that was agreed on; which update is not that of one process?"
    if agree(losses, curve(halved)):
        why = "The matrix learns at half the rate: it has two gradients, and they add up. A mean halves them"
    elif abs(losses[0] - curve()[0]) > 1e-3:
        why = "This is another model: what is agreed on is one matrix for both"
    equal(losses, curve(), why=why)
