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


@exercise(
    "00.2",
    "Half a ring",
    "ring_all_gather",
    minutes=10,
    ranks=True,
    inplace=True,
    hints=[
        "In step 0 rank r sends its own chunk, r. In the next it sends what has just arrived. Which chunk is that?",
        "In step s rank r sends chunk (r - s) and receives chunk (r - s - 1), both modulo the number of ranks.",
        "Start the send with `dist.isend`, then `dist.recv` into the chunk, then `wait()`, as in the lesson's ring.",
    ],
)
def half_a_ring(ring_all_gather):
    n = ring_all_gather.size
    for _ in range(2):
        length = random.randint(2, 5)
        own = draw(n, length)
        junk = 1000.0 + torch.arange(n * length).double()
        xs = [junk.clone() for _ in range(n)]
        for rank, x in enumerate(xs):
            x.chunk(n)[rank].copy_(own[rank])
        found, notes = watched(ring_all_gather, xs)
        everything = torch.cat(own)
        chunks, steps = range(n), counts(notes, "send")
        for rank in range(n):  # a chunk in another's place first: its own place is then empty too
            for c in chunks:
                mine = found[rank].chunk(n)[c]
                taken = next((k for k in chunks if k != c and torch.equal(mine, own[k])), None)
                require(
                    taken is None,
                    f"on rank {rank}, chunk {c} holds what belongs in chunk {taken}: off by {(taken or 0) - c}",
                )
        for rank in range(n):
            missing = [c for c in chunks if torch.equal(found[rank].chunk(n)[c], junk.chunk(n)[c])]
            never = f"rank {rank} never gets chunk {', '.join(map(str, missing))}"
            require(not missing or steps[rank] >= n - 1, f"{never}: how many steps are needed?")
            require(not missing, f"{never}: does each step send what came in the step before?")
        same_on_ranks(found, [everything] * n, "x")
        peers = {(peer - r) % n for r, own in enumerate(notes) for k, peer in own if k == "send"}
        require(steps == [n - 1] * n, f"x is right, but the ranks send {steps} messages: {n - 1} each would do")
        require(
            len(peers) == 1, "x is right, but a rank sends to several ranks: in a ring it sends to the next one only"
        )


_RING = """
chunks = x.chunk(world_size)
for step in range({steps}):
    sending = dist.isend(chunks[{send} % world_size], dst=(rank + {to}) % world_size)
    dist.recv(chunks[{receive} % world_size], src=(rank - {to}) % world_size)
    sending.wait()
"""
_RIGHT = {"steps": "world_size - 1", "send": "(rank - step)", "receive": "(rank - step - 1)", "to": "1"}
half_a_ring.refuses("one step too few", "how many steps", _RING.format(**_RIGHT | {"steps": "world_size - 2"}))
half_a_ring.refuses("one step too many", "would do", _RING.format(**_RIGHT | {"steps": "world_size"}))
half_a_ring.refuses("own chunk in every step", "what belongs in", _RING.format(**_RIGHT | {"send": "rank"}))
_TURNED = {  # what is received in a place of another chunk, in all steps that are needed
    "received into the wrong place": {"receive": "(rank - step)"},
    "received one place ahead": {"receive": "(rank - step + 1)"},
    "chunks of the other direction": {"to": "-1"},
    "chunks counted the other way": {"send": "(rank + step)", "receive": "(rank + step + 1)"},
}
for name, changed in _TURNED.items():
    half_a_ring.refuses(name, "what belongs in", _RING.format(**_RIGHT | changed))
half_a_ring.refuses(
    "an all_gather",
    "only send and recv",
    "dist.all_gather(list(x.chunk(world_size)), x.chunk(world_size)[rank].clone())",
)
half_a_ring.refuses("hard-coded for the shown chunks", "x", "x.copy_(torch.arange(len(x)) % 4)")
