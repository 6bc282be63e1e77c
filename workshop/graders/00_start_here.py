"""Graders of the first exercises: messages between ranks, compared with sums in one process, and counted."""

import random

import torch

from aiscale.lesson.grading import exercise, require, same_on_ranks


def note_messages() -> None:
    """On a rank: note each message that it sends or receives, in order."""
    import torch.distributed as dist

    def noting(real, kind, word):
        def noted(tensor, *args, **kwargs):
            peer = kwargs.get(word, args[0] if args else None)
            dist.noted.append((kind, peer))
            return real(tensor, *args, **kwargs)

        return noted

    dist.noted = []
    if not hasattr(dist, "without_notes"):
        dist.without_notes = {name: getattr(dist, name) for name in ("send", "isend", "recv", "irecv")}
    for name, real in dist.without_notes.items():
        setattr(dist, name, noting(real, name.removeprefix("i"), "dst" if "send" in name else "src"))


def read_notes() -> list:
    """On a rank: what was noted, and no notes from now on."""
    import torch.distributed as dist

    for name, real in dist.without_notes.items():
        setattr(dist, name, real)
    return dist.noted


def watched(answer, xs: list) -> tuple[list, list[list]]:
    """What the ranks hold afterwards, and the messages of each: [("send", 1), ("recv", 3), ...]."""
    answer.on_ranks(note_messages)
    try:
        found = answer.each(xs)
    finally:
        notes = answer.on_ranks(read_notes)
    others = {op for sent in answer.sent for op in sent} - {"send", "recv"}
    require(
        not others, f"this uses {', '.join(sorted(others))}: only send and recv, or isend and irecv, are allowed here"
    )
    return found, notes


def counts(notes: list[list], kind: str) -> list[int]:
    return [sum(event == kind for event, _ in own) for own in notes]


def draw(ranks: int, length: int) -> list[torch.Tensor]:
    return [torch.randint(-99, 99, (length,)).double() for _ in range(ranks)]


# 00.1 ---------------------------------------------------------------------------------------------------------------


@exercise(
    "00.1",
    "Through one rank",
    "sum_through_root",
    minutes=8,
    ranks=True,
    inplace=True,
    hints=[
        "Two cases, `if rank == 0:` and `else:`. What does each do first: send or receive?",
        "Rank 0 receives into a tensor of its own, `torch.empty_like(x)`, and adds it to x, for each rank in turn.",
        "When rank 0 has all, it sends x to each. The others wait for it: `dist.recv(x, src=0)`.",
    ],
)
def through_one_rank(sum_through_root):
    n = sum_through_root.size
    for _ in range(2):
        xs = draw(n, random.randint(3, 9))
        found, notes = watched(sum_through_root, xs)
        total, others = sum(xs), sum(xs[1:])
        causes = {
            "only rank 0 has the sum: it must send it back": [total, *xs[1:]],
            "rank 0's own numbers are missing in the sum": [others] * n,
            "this is the mean, not the sum": [total / n] * n,
            "rank 0 keeps only what came last: add it up": [xs[-1]] * n,
        }
        same_on_ranks(found, [total] * n, "x", causes=causes)
        sends = counts(notes, "send")
        expected = [n - 1] + [1] * (n - 1)
        require(sends == expected, f"the sums are right, but the ranks send {sends} messages: {expected} would do")


through_one_rank.refuses(
    "nothing is sent back",
    "it must send it back",
    """
    if rank == 0:
        for other in range(1, world_size):
            arriving = torch.empty_like(x)
            dist.recv(arriving, src=other)
            x += arriving
    else:
        dist.send(x, dst=0)
    """,
)
through_one_rank.refuses(
    "mean for sum",
    "this is the mean",
    """
    if rank == 0:
        for other in range(1, world_size):
            arriving = torch.empty_like(x)
            dist.recv(arriving, src=other)
            x += arriving
        x /= world_size
        for other in range(1, world_size):
            dist.send(x, dst=other)
    else:
        dist.send(x, dst=0)
        dist.recv(x, src=0)
    """,
)
through_one_rank.refuses(
    "everybody receives first",
    "it hangs",
    """
    arriving = torch.empty_like(x)
    dist.recv(arriving, src=(rank + 1) % world_size)
    dist.send(x, dst=(rank - 1) % world_size)
    """,
)
through_one_rank.refuses("an all_reduce", "only send and recv", "dist.all_reduce(x)")
through_one_rank.refuses("hard-coded for the shown numbers", "x", "x.copy_(torch.full_like(x, 1111))")


# 00.2 ---------------------------------------------------------------------------------------------------------------


def played(xs: list, begins: int = -1, halves: int = 2, first=torch.add, second=lambda held, came: came) -> list:
    """What a ring leaves on each rank. `begins`: rank r sends chunk r + begins first."""
    n = len(xs)
    held = [list(x.clone().chunk(n)) for x in xs]
    for offset, combined in ((begins, first), (0, second))[:halves]:
        for step in range(n - 1):
            sent = [held[rank][(rank - step + offset) % n] for rank in range(n)]
            for rank in range(n):
                place = (rank - 1 - step + offset) % n
                held[rank][place] = combined(held[rank][place], sent[rank - 1])
    return [torch.cat(chunks) for chunks in held]


@exercise(
    "00.2",
    "A ring",
    "ring_all_reduce",
    minutes=11,
    ranks=True,
    inplace=True,
    hints=[
        "Each half has n - 1 steps. In each step a rank sends the chunk that it has received in the step before.",
        "In step s of the first half rank r sends chunk (r - s - 1) and adds what comes to chunk (r - s - 2), "
        "both modulo the number of ranks.",
        "`pass_on(chunks[...], arriving)`, then `chunks[...].add_(arriving)`. In the second half rank r receives "
        "straight into chunk (r - s - 1).",
    ],
)
def a_ring(ring_all_reduce):
    n = ring_all_reduce.size
    for _ in range(2):
        length = random.randint(2, 5)
        xs = draw(n, n * length)
        found, notes = watched(ring_all_reduce, xs)
        sends, enough = counts(notes, "send"), 2 * (n - 1)
        total = sum(xs)
        one_on = "rank r begins with chunk r, so the sum of chunk r + 1 ends there, and chunk r is its own numbers"
        causes = {
            "one half alone: each rank has a complete chunk, and the others need it": played(xs, halves=1),
            one_on if sends == [enough] * n else "each half has n - 1 steps, not fewer": played(xs, begins=0),
            "what arrives in the first half takes the place of a chunk: add it": played(xs, first=lambda _, came: came),
            "the second half adds as well: what arrives there is the sum already": played(xs, second=torch.add),
            "this is the mean, not the sum": [total / n] * n,
        }
        same_on_ranks(found, [total] * n, "x", causes=causes)
        require(sends == [enough] * n, f"x is right, but the ranks send {sends} messages: {enough} each would do")
        sent_bytes = ring_all_reduce.sent[0]["send"][1]
        most = enough * length * xs[0].itemsize
        require(sent_bytes <= most, f"x is right, but a rank sends {sent_bytes} bytes: {most} would do, a chunk a step")


_FIRST = """
chunks = x.chunk(world_size)
arriving = torch.empty_like(chunks[0])
for step in range(world_size - 1):
    pass_on(chunks[(rank - step - 1) % world_size], arriving)
    chunks[(rank - step - 2) % world_size].add_(arriving)
"""
_SECOND = """
for step in range(world_size - 1):
    pass_on(chunks[(rank - step) % world_size], chunks[(rank - step - 1) % world_size])
"""
a_ring.refuses("the first half alone", "one half alone", _FIRST)
a_ring.refuses(
    "begins with its own chunk",
    "rank r begins with chunk r",
    _FIRST.replace("step - 1)", "step)").replace("step - 2)", "step - 1)") + _SECOND,
)
a_ring.refuses("nothing is added", "add it", _FIRST.replace("add_", "copy_") + _SECOND)
a_ring.refuses(
    "adds in both halves",
    "is the sum already",
    _FIRST
    + """
for step in range(world_size - 1):
    pass_on(chunks[(rank - step) % world_size], arriving)
    chunks[(rank - step - 1) % world_size].add_(arriving)
""",
)
a_ring.refuses("a step too few", "not fewer", _FIRST.replace("world_size - 1)", "world_size - 2)", 1) + _SECOND)
a_ring.refuses(
    "the whole buffer goes around",
    "messages",
    """
going, arriving = x.clone(), torch.empty_like(x)
for step in range(world_size - 1):
    pass_on(going, arriving)
    x.add_(arriving)
    going.copy_(arriving)
""",
)
a_ring.refuses("an all_reduce", "only send and recv", "dist.all_reduce(x)")
a_ring.refuses("hard-coded for the shown rows", "x", "x.copy_(torch.arange(1, len(x) + 1) * 1111.0)")
