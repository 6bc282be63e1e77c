"""Ring attention: each rank has a part of a sequence, and keys and values travel around the ring.

Shapes: B sequences, H heads, T places of this rank, in two pieces of T / 2, W numbers of a head.
"""

import torch
import torch.distributed as dist


def places(length, rank, ranks, zigzag=True):
    """A rank's two pieces of a sequence: an early and a late one, or two neighbours."""
    pieces = torch.arange(length).chunk(2 * ranks)
    return (pieces[rank], pieces[-1 - rank]) if zigzag else pieces[2 * rank : 2 * rank + 2]


def turn(tensors):
    """To the next rank, and from the one before."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    came = [torch.empty_like(tensor) for tensor in tensors]
    messages = []
    for i, (mine, theirs) in enumerate(zip(tensors, came, strict=True)):
        messages.append(dist.P2POp(dist.isend, mine.contiguous(), (rank + 1) % ranks, tag=i))
        messages.append(dist.P2POp(dist.irecv, theirs, (rank - 1) % ranks, tag=i))
    for message in dist.batch_isend_irecv(messages):
        message.wait()
    return came


def blocks(q, k, turned, zigzag):
    """After `turned` turns: pieces of queries and of keys, as slices, and the scores of those that see each other."""
    rank, ranks, half = dist.get_rank(), dist.get_world_size(), q.shape[2] // 2
    pieces = [slice(None, half), slice(half, None)]
    mine = places(2 * half * ranks, rank, ranks, zigzag)
    theirs = places(2 * half * ranks, (rank - turned) % ranks, ranks, zigzag)
    for rows, queries in zip(mine, pieces, strict=True):
        for columns, keys in zip(theirs, pieces, strict=True):
            if rows[-1] >= columns[0]:  # not all keys come later
                scores = q[:, :, queries] @ k[:, :, keys].mT * q.shape[-1] ** -0.5
                yield queries, keys, scores.masked_fill(rows[:, None] < columns, -torch.inf)


def attend(q, k, v, zigzag):
    """Causal attention of this rank's queries over the whole sequence, and the log of each denominator."""
    out, total = torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf)  # total: log of the sum of e^score
    travelling = [k, v]
    for turned in range(dist.get_world_size()):
        for queries, keys, scores in blocks(q, travelling[0], turned, zigzag):
            both = torch.logaddexp(total[:, :, queries], scores.logsumexp(-1))
            old = (total[:, :, queries] - both).exp()[..., None]
            new = (scores - both[..., None]).exp() @ travelling[1][:, :, keys]
            out[:, :, queries], total[:, :, queries] = out[:, :, queries] * old + new, both
        travelling = turn(travelling)
    return out, total


def gradients(q, k, v, out, total, dout, zigzag):
    """Of queries, keys and values of this rank."""
    dq, mean = torch.zeros_like(q), (dout * out).sum(-1)
    travelling = [k, v, torch.zeros_like(k), torch.zeros_like(v)]
    for turned in range(dist.get_world_size()):
        k, v, dk, dv = travelling
        for queries, keys, scores in blocks(q, k, turned, zigzag):
            share = (scores - total[:, :, queries, None]).exp()
            dv[:, :, keys] += share.mT @ dout[:, :, queries]
            dshare = dout[:, :, queries] @ v[:, :, keys].mT
            dscores = share * (dshare - mean[:, :, queries, None]) * q.shape[-1] ** -0.5
            dq[:, :, queries] += dscores @ k[:, :, keys]
            dk[:, :, keys] += dscores.mT @ q[:, :, queries]
        travelling = turn(travelling)  # after a turn for each rank, dk and dv are home
    return dq, *travelling[2:]


class Ring(torch.autograd.Function):
    """Causal attention over the whole sequence, from this rank's (B, H, T, W)."""

    @staticmethod
    def forward(ctx, q, k, v, zigzag=True):
        out, total = attend(q, k, v, zigzag)
        ctx.save_for_backward(q, k, v, out, total)
        ctx.zigzag = zigzag
        return out

    @staticmethod
    def backward(ctx, dout):
        return *gradients(*ctx.saved_tensors, dout, ctx.zigzag), None
