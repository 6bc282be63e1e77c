"""A rank that has more to do than the others."""

from jobs import Unmended, start
from model import read_documents
from serial import all_steps, equal, ran, sgd, train

RANKS = 4
RIGHT = "c"
REPLIES = {
    "a": "A slow network delays all ranks alike. Here rank 3 computes nearly all the time: it waits for nobody.",
    "b": "A slow core would be slow in another job too, and after ranks change places. It is always the last rank.",
    "d": "The all-reduce sends the same number of bytes with any documents; the time is lost before it begins.",
}
HINTS = [
    "Which rank computes most, and which waits? Compare the last lines of the log.",
    "Print `batch.shape` on each rank, in one step.",
    "After sorting, the last quarter of the list holds the longest documents. Who gets it?",
    "Let ranks share each run of 384 documents of similar length: documents[rank::size] of the sorted list.",
]
EXPLANATION = """\
Sorting by length saves padding, and cutting the sorted list into four runs gives the last rank all the long documents:
in every step it computes several times what rank 0 does, and the others wait in the all-reduce. The job is as slow as
its slowest rank in each step. In a trace of rank 0 this looks like a slow network; a rank whose own all-reduces are
*short* came last.

Deal the sorted documents out like cards: `documents[rank::size]`. The four batches of a step then have nearly one
length. What counts is the largest share in each step, not the sum over steps: drawing at random balances the sum, and
leaves a long document in nearly every batch. Padding everything to one length
balances too, and computes half as much again.
"""
_MINE = "    mine = documents[rank * len(documents) // size : (rank + 1) * len(documents) // size]\n"
_SORTED = "    documents = sorted(documents, key=len)\n"
MENDED = [(_MINE, "    mine = documents[rank::size]\n")]
WRONG = {
    "dealt out, but not sorted": (
        [*MENDED, (_SORTED, "")],
        "computes .* times as many bytes",
    ),
    "all padded to one length": (
        [
            (
                "        tokens = (batch[:, 1:] != PAD).sum()\n",
                "        batch = torch.nn.functional.pad(batch, (0, 33 - batch.shape[1]))\n"
                "        tokens = (batch[:, 1:] != PAD).sum()\n",
            )
        ],
        "computes .* times as many bytes",
    ),
    "long documents cut short": (
        [(_MINE, _MINE + "    mine = [document[:10] for document in mine]\n")],
        "bytes of the documents are never read",
    ),
    "each rank the same documents": (
        [(_MINE, "    mine = documents[: len(documents) // size]\n")],
        "are never read",
    ),
}
SYMPTOM = "the busiest rank of a step computes .* times the mean"
STEPS, BATCH = 6, 384


def check(program, seed):
    job = ran(start(program, RANKS, steps=STEPS, batch=BATCH, seed=seed))
    losses, documents = all_steps(job, STEPS), read_documents(STEPS * BATCH)
    by_rank = [rank["steps"] for rank in job.ranks]
    batches = [[w for rank in by_rank for w in rank[step]["windows"]] for step in range(STEPS)]
    missing = sum(map(len, documents)) - sum(len(w) for batch in batches for w in batch)
    read = sorted(tuple(w) for batch in batches for w in batch)
    if missing > 0 or read != sorted(tuple(document.tolist()) for document in documents):
        raise Unmended(f"{missing} bytes of the documents are never read: each document is for one rank, in one step")
    work = [[rank[step]["work"] for rank in by_rank] for step in range(STEPS)]
    needed = sum(len(document) - 1 for document in documents)
    total = sum(map(sum, work)) / needed
    uneven = sum(max(step) for step in work) / sum(sum(step) / RANKS for step in work)
    if total > 1.12:
        raise Unmended(f"the job computes {total:.2f} times as many bytes as there are: most of the rest fills up")
    if uneven > 1.15:
        raise Unmended(
            f"the busiest rank of a step computes {uneven:.2f} times the mean of all ranks (counted in bytes, padding "
            "included): the others wait for it"
        )
    right = train(seed, batches, sgd)
    equal(losses, [loss for loss, _ in right], why="The work is even, but each byte of a step should count alike")
