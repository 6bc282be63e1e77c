"""Graders of the first exercises: messages between ranks, compared with sums in one process, and counted."""

import random

import torch

from aiscale.lesson.grading import exercise, require, same, same_on_ranks


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


def rounds(notes: list[list]) -> int:
    """How many messages must follow one another, if a rank sends one at a time and each takes one round."""
    clock, waiting, sent = [0] * len(notes), [list(own) for own in notes], {}
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(waiting):
            while own:
                kind, peer = own[0]
                if kind == "send":
                    clock[rank] += 1
                    sent.setdefault((rank, peer), []).append(clock[rank])
                elif sent.get((peer, rank)):
                    clock[rank] = max(clock[rank], sent[peer, rank].pop(0))
                else:
                    break
                own.pop(0)
                moved = True
    return max(clock)


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
        for rank in range(n):
            chunks = range(n)
            missing = [c for c in chunks if torch.equal(found[rank].chunk(n)[c], junk.chunk(n)[c])]
            require(
                not missing, f"rank {rank} never gets chunk {', '.join(map(str, missing))}: how many steps are needed?"
            )
            for c in chunks:
                mine = found[rank].chunk(n)[c]
                taken = [k for k in chunks if k != c and torch.equal(mine, own[k])]
                require(
                    not taken,
                    f"on rank {rank}, chunk {c} holds what belongs in chunk {taken}: off by {(taken or [c])[0] - c}",
                )
        same_on_ranks(found, [everything] * n, "x")
        steps, peers = (
            counts(notes, "send"),
            {(peer - r) % n for r, own in enumerate(notes) for k, peer in own if k == "send"},
        )
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
half_a_ring.refuses("received into the wrong place", "rank", _RING.format(**_RIGHT | {"receive": "(rank - step)"}))
half_a_ring.refuses("chunks of the other direction", "rank", _RING.format(**_RIGHT | {"to": "-1"}))
half_a_ring.refuses(
    "an all_gather",
    "only send and recv",
    "dist.all_gather(list(x.chunk(world_size)), x.chunk(world_size)[rank].clone())",
)
half_a_ring.refuses("hard-coded for the shown chunks", "x", "x.copy_(torch.arange(len(x)) % 4)")


# 00.3 ---------------------------------------------------------------------------------------------------------------


@exercise(
    "00.3",
    "Where latency ends",
    "balance_bytes",
    minutes=6,
    hints=[
        "A ring all-reduce has 2 (n - 1) steps. What does one step cost in latency, and how many bytes does it send?",
        "Both totals have the factor 2 (n - 1). Set them equal, and it goes: alpha = S / (n B).",
    ],
)
def where_latency_ends(balance_bytes):
    for _ in range(5):
        n, latency_s, bandwidth = random.randint(3, 64), random.uniform(1e-6, 1e-4), random.uniform(1e9, 4e11)

        def ring(nbytes, n=n, latency_s=latency_s, bandwidth=bandwidth):
            """(seconds of latency, seconds of sending) of one rank, step by step."""
            chunk, waits, sends = nbytes / n, 0.0, 0.0
            for _ in range(n - 1):  # reduce-scatter, then all-gather
                waits, sends = waits + 2 * latency_s, sends + 2 * chunk / bandwidth
            return waits, sends

        low, high = 1.0, 1e12
        for _ in range(200):
            middle = (low * high) ** 0.5
            waits, sends = ring(middle)
            low, high = (middle, high) if sends < waits else (low, middle)
        scale = {
            1 / n: "a step sends a chunk, a part of the buffer, not all of it",
            2 * (n - 1) / n: "each step pays the latency, and each step sends as well: count both in the same steps",
            8: "the bandwidth is in bytes a second already",
            (n - 1) / n: "how many chunks has the buffer?",
            1 / (n * bandwidth**2): "bytes are seconds times bytes per second",
        }
        same(balance_bytes(n, latency_s, bandwidth), low, "the size", scale=scale, rtol=1e-6)


where_latency_ends.refuses("a whole buffer in each step", "not all of it", "return latency_s * bandwidth_bytes_s")
where_latency_ends.refuses(
    "steps counted for the latency only",
    "count both",
    "return 2 * (n_ranks - 1) * latency_s * bandwidth_bytes_s",
)
where_latency_ends.refuses("bits", "in bytes a second already", "return 8 * n_ranks * latency_s * bandwidth_bytes_s")
where_latency_ends.refuses("divided", "seconds times bytes per second", "return latency_s / bandwidth_bytes_s")
where_latency_ends.refuses(
    "one chunk too few", "how many chunks", "return (n_ranks - 1) * latency_s * bandwidth_bytes_s"
)
where_latency_ends.refuses("hard-coded for the shown link", "the size", "return 4_000_000")


# 00.4 ---------------------------------------------------------------------------------------------------------------


@exercise(
    "00.4",
    "Tell everyone",
    "tell_everyone",
    minutes=12,
    core=False,
    ranks=True,
    inplace=True,
    hints=[
        "After the first message two ranks know. What can both of them do in the second round?",
        "In a round in which ranks 0 to k-1 know, each of them tells the rank k places above: 1, 2, 4, ... know.",
        "Every rank runs the same loop over k = 1, 2, 4, ...: does it send in this round, receive, or do nothing?",
    ],
)
def tell_everyone(tell_everyone):
    n = tell_everyone.size
    fewest = (n - 1).bit_length()
    for _ in range(2):
        xs = draw(n, random.randint(3, 9))
        found, notes = watched(tell_everyone, xs)
        told = [rank for rank in range(n) if torch.equal(found[rank], xs[0])]
        untold = [rank for rank in range(n) if rank not in told]
        require(not untold, f"x of rank 0 does not reach rank {', '.join(map(str, untold))}")
        need, sends = rounds(notes), sum(counts(notes, "send"))
        require(
            sends == n - 1, f"all know, but in {sends} messages: {n - 1} would do, since each rank must hear it once"
        )
        require(need <= fewest, f"all know after {need} rounds, but {fewest} would do: let those who know help")
    same_on_ranks(found, [xs[0]] * n, "x")


tell_everyone.refuses(
    "rank 0 tells each",
    "let those who know help",
    """
    if rank == 0:
        for other in range(1, world_size):
            dist.send(x, dst=other)
    else:
        dist.recv(x, src=0)
    """,
)
tell_everyone.refuses(
    "handed on along a chain",
    "let those who know help",
    """
    if rank > 0:
        dist.recv(x, src=rank - 1)
    if rank < world_size - 1:
        dist.send(x, dst=rank + 1)
    """,
)
tell_everyone.refuses("a broadcast", "only send and recv", "dist.broadcast(x, src=0)")
tell_everyone.refuses("hard-coded for the shown numbers", "does not reach", "x.copy_(torch.full_like(x, 7))")
