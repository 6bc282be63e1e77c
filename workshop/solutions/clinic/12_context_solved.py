"""Attention that never leaves its rank: torch's context_parallel on a CPU."""

import torch
from jobs import Unmended, start
from model import CONTEXT, read_windows
from serial import agree, all_steps, equal, ran, train
from torch import nn, optim

RANKS = 2
RIGHT = "c"
REPLIES = {
    "a": "`places` is among the buffers, so it is cut as the bytes are: print it. Each byte has its own place.",
    "b": "Both ranks have as many bytes, so the mean of their mean losses is the mean of all. With `--lr 0` nothing is "
    "learned, and the loss of each step is wrong already.",
    "d": "Inputs and targets are cut alike, so each byte keeps its next one: print both.",
}
HINTS = [
    "The loss of step 0 is wrong, before anything was learned. So it is in the forward pass. Which of its operations "
    "needs bytes of the other rank?",
    "Print `k.shape` where attention is called, and count what is sent in a forward pass: no byte.",
    "Rank 0 has places 0 to 7 and 24 to 31. Its byte 24 should see 25 bytes. How many does it see?",
    "Gather keys, values and places of all ranks before attention, with a gather through which gradients flow "
    "(`all_gather_tensor_autograd` of `torch.distributed._functional_collectives`), and give attention a mask: a query "
    "sees keys of no later place.",
]
EXPLANATION = """\
`context_parallel` does two things: it cuts the buffers, and where torch's attention has a kernel for GPUs it replaces
the call by a ring. On a CPU (torch 2.13) it cuts, and replaces nothing. Attention runs as it always does, over the
bytes that are there: rank 0's byte 24 stands right behind byte 7, and sees 9 bytes in place of 25. Shapes fit, the loss
falls, no warning. On GPUs the same lines are right, which is why a test on a CPU must be compared with one rank.

Keys and values of all ranks, and a mask by places, make it right anywhere; a ring does the same with less memory
(lesson 15). The gather must have a gradient: `dist.all_gather` has none, and then a rank's keys learn from its own
queries only.
"""
_CALL = "        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)"
_IMPORT = "from torch.distributed.device_mesh import init_device_mesh\n"
_GATHER = "from torch.distributed._functional_collectives import all_gather_tensor_autograd\n"
_KEYS = """\
        k, v = (all_gather_tensor_autograd(part.contiguous(), 2, dist.group.WORLD) for part in (k, v))
"""
_MASK = """\
        everywhere = [torch.empty_like(places) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, places.contiguous())
        seen = places[:, None] >= torch.cat(everywhere)
"""
_SEEN = "        mixed = scaled_dot_product_attention(q, k, v, attn_mask=seen)"
MENDED = [(_IMPORT, _GATHER + _IMPORT), (_CALL, _KEYS + _MASK + _SEEN)]
_NO_GRADIENT = """\
        mine, parts = (k, v), []
        for part in mine:
            came = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
            dist.all_gather(came, part.contiguous())
            came[dist.get_rank()] = part
            parts.append(torch.cat(came, 2))
        k, v = parts
"""
_CONTEXT = "with context_parallel(mesh, buffers=[inputs, targets, places], buffer_seq_dims=[1, 1, 0]):"
WRONG = {
    "no mask": (
        [(_IMPORT, _GATHER + _IMPORT), (_CALL, _KEYS + _CALL.replace("is_causal=True", "is_causal=False"))],
        "bytes that come later",
    ),
    "a gather without gradient": ([(_CALL, _NO_GRADIENT + _MASK + _SEEN)], "own queries only"),
    "nothing cut": ([(_CONTEXT, "if True:")], "all bytes of a sequence"),
}
SYMPTOM = "loss .* at step .*sees the bytes of its own rank only"
STEPS = 12


class Reader(nn.Module):
    """What the program trains, in one process, with a mask of what each byte sees."""

    def __init__(self):
        super().__init__()
        self.token, self.place = nn.Embedding(256, 32), nn.Embedding(CONTEXT, 32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.head = nn.Linear(32, 256, bias=False)
        nn.init.normal_(self.out.weight, std=0.4)

    def losses(self, windows, seen, own=None):
        """(B, T). Keys and values of bytes that are not `own` to a query get no gradient from it."""
        h = self.token(windows[:, :-1]) + self.place.weight
        q, k, v = (part.unflatten(-1, (2, 16)).transpose(1, 2) for part in self.qkv(h).chunk(3, -1))
        scores = q @ k.mT / 4
        if own is not None:
            scores = torch.where(own, scores, q @ k.detach().mT / 4)
        share = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        mixed = share @ v
        if own is not None:
            mixed = (share * own) @ v + (share * ~own) @ v.detach()
        logits = self.head(h + self.out(mixed.transpose(1, 2).flatten(2)))
        return nn.functional.cross_entropy(logits.mT, windows[:, 1:], reduction="none")


def check(program, seed):
    job = ran(start(program, RANKS, steps=STEPS, seed=seed))
    places = torch.arange(CONTEXT)
    earlier = places[:, None] >= places
    piece = places // (CONTEXT // (2 * RANKS))
    holder = torch.minimum(piece, 2 * RANKS - 1 - piece)  # zig-zag: an early and a late piece
    own = holder[:, None] == holder

    def curve(seen=earlier, own=None):
        losses = []

        def mean(model, batch):
            loss = model.losses(batch, seen, own).mean()
            losses.append(loss.item())
            return loss

        batches = read_windows(STEPS * 4).split(4)
        train(seed, batches, lambda p: optim.SGD(p, lr=0.05), make=Reader, loss_of=mean)
        return losses

    losses = all_steps(job, STEPS)
    causes = {
        "A byte sees the bytes of its own rank only": curve(seen=earlier & own),
        "A byte sees bytes that come later": curve(seen=torch.ones_like(earlier)),
        "Keys and values learn from their rank's own queries only": curve(own=own),
    }
    why = next((words for words, spoilt in causes.items() if agree(losses, spoilt)), "")
    equal(losses, curve(), "the mean loss of the ranks is", why)
    share = 4 * CONTEXT // RANKS
    if any(read != share for _, read in job.logged("bytes")):
        raise Unmended(f"rank 0 computes all bytes of a sequence: its share is {share} a step")
