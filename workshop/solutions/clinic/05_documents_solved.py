"""Means of means."""

from jobs import start
from model import read_documents
from serial import all_steps, equal, ran, sgd, train

RANKS = 2
RIGHT = "b"
REPLIES = {
    "a": "Padding has no loss and no gradient: `losses` gives 0 there, and the tokens are counted without it.",
    "c": "`no_sync` only delays the all-reduce. With --micro-batches 1 it is never entered, and curves still differ.",
    "d": "The curves agree where all documents are of one length, on 2 ranks as on 1: so gradients are averaged.",
}
HINTS = [
    "Print the number of bytes in each part, on each rank. With documents of one length the curves agree.",
    "Two micro-batches with 10 and 90 tokens: how much does a token of each count in the gradient?",
    "(a/10 + b/90) / 2 is not (a + b) / 100: divide by the tokens of the whole step, and only once.",
    "Count the tokens of all parts, all-reduce the count; DDP takes a mean over ranks, so multiply by their number.",
]
EXPLANATION = """\
Each part's loss is a mean over its own tokens, and these means are averaged over parts and ranks. A token in a short
part then counts more than one in a long part, and the gradient depends on how the batch was cut: on the number of
ranks and micro-batches. With windows of one length nobody notices; that is why this stood in several well-known
trainers until 2024.

Sum the losses, and divide by the number of tokens in the whole step, which is known only when all ranks have counted.
DDP divides by the number of ranks, so what goes into `backward` is sum x ranks / tokens. Weighting the parts of one
rank alone repairs one half. With pipeline stages it is the same: the last stage must not average its micro-batches.
"""
_PER_PART = "                tokens = (part[:, 1:] != PAD).sum()\n"
_LOSS = "                loss = model(part).sum() / tokens / len(parts)\n"
_COUNT = "        tokens = sum((part[:, 1:] != PAD).sum() for part in parts)\n"
_ZERO = "        optimizer.zero_grad()\n"
MENDED = [
    (_PER_PART, ""),
    (_LOSS, "                loss = model(part).sum() * size / tokens  # DDP takes the mean over ranks\n"),
    (_ZERO, _COUNT + "        dist.all_reduce(tokens)\n" + _ZERO),
]
WRONG = {
    "weighted within a rank only": (
        [(_PER_PART, ""), (_LOSS, "                loss = model(part).sum() / tokens\n"), (_ZERO, _COUNT + _ZERO)],
        "loss .*depends on the part or the rank",
    ),
    "divided by the ranks twice": (
        [(_PER_PART, ""), (_LOSS, "                loss = model(part).sum() / tokens\n"), MENDED[2]],
        "The first norm is 0.50 times",
    ),
    "divided by what fills up, too": (
        [(_PER_PART, "                tokens = part[:, 1:].numel()\n")],
        "loss .* in one process",
    ),
    "multiplied by the ranks twice": (
        [*MENDED[:1], (_LOSS, "                loss = model(part).sum() * size * size / tokens\n"), MENDED[2]],
        "The first norm is 2.00 times",
    ),
}
SYMPTOM = "loss .* at step \\d, and .* in one process"


def check(program, seed):
    job = ran(start(program, RANKS, steps=10, batch=8, micro_batches=2, seed=seed))
    losses, documents = all_steps(job, 10), read_documents(80)
    right = train(seed, [documents[i : i + 8] for i in range(0, 80, 8)], sgd)
    norms = [norm for _, norm in job.logged("norm")]
    ratio = norms[0] / right[0][1] if norms else 0
    why = "How much a byte counts still depends on the part or the rank that it is in"
    if abs(ratio - 1 / RANKS) < 0.01:
        why = "The first norm is 0.50 times the right one: DDP has divided by the number of ranks already"
    elif abs(ratio - RANKS) < 0.01:
        why = "The first norm is 2.00 times the right one: multiplied by the number of ranks once too often"
    equal(losses, [loss for loss, _ in right], why=why)
    equal(norms, [norm for _, norm in right], "norm", why)
