"""Sends that wait for each other."""

from jobs import Unmended, start
from model import LM, read_windows
from serial import adamw, all_steps, equal, ran, train

RANKS = 2
RIGHT = "b"
REPLIES = {
    "a": "A mismatch of shapes would be reported by gloo, or lead to wrong numbers. Here no message has arrived at "
    "all since the first: both ranks stand in send, neither in recv.",
    "c": "A lost rank would end the job with 'connection closed by peer'. Both processes live: they have a stack.",
    "d": "In `send` a rank waits for the *receiver*, not for its own autograd: the stack has no backward in it.",
}
HINTS = [
    "Take both stacks. Which call is each rank in, and which call of the other would let it return?",
    "Write down each rank's first calls, one below the other: rank 0 send, send, recv, ...; rank 1 recv, send, ...",
    "A send returns when the other has posted its recv (MPI calls that synchronous; small messages may be buffered).",
    "Start the receive of the gradient before, or together with, the send: dist.isend, then recv, then wait.",
]
EXPLANATION = """\
Rank 0 sends activations of micro-batch 1 while rank 1 sends the gradient of micro-batch 0. Each send returns when the
other side has posted its receive, and neither does, since each is busy sending. GPipe never meets this (all activations
go one way, then all gradients the other); 1F1B sends both ways at once. MPI buffers small messages: there the same
program runs until the messages grow.

The remedy is to send without waiting (`isend`, and wait for it later), or both directions as one operation
(`batch_isend_irecv`; Megatron-Core's send_forward_recv_backward). Sorting the calls on one side by hand, so that one
stage receives before it sends, works for two stages, and is easily broken by the next change.
"""
MENDED = [
    (
        "        dist.send(tensor.detach().contiguous(), self.other)\n",
        "        self.sending.append((dist.isend(tensor := tensor.detach().contiguous(), self.other), tensor))\n",
    ),
    ("        self.other = 1 - self.rank\n", "        self.other, self.sending = 1 - self.rank, []\n"),
    (
        "        optimizer.step()\n",
        "        for work, _ in stage.sending:\n            work.wait()\n        stage.sending.clear()\n"
        "        optimizer.step()\n",
    ),
]
_BOTH_RECEIVE = [
    (
        "            held.append(stage.model.through(stage.blocks, stage.model.embed(parts[i])))\n"
        "            stage.send(held[-1])\n        if i > 0:\n            h = held.pop(0)\n"
        "            torch.autograd.backward(h, stage.receive(h))\n",
        "            held.append(stage.model.through(stage.blocks, stage.model.embed(parts[i])))\n        if i > 0:\n"
        "            h = held.pop(0)\n            torch.autograd.backward(h, stage.receive(h))\n"
        "        if i < len(parts):\n            stage.send(held[-1])\n",
    ),
    (
        "        stage.send(h.grad)\n        if i + 1 < len(parts):\n            h = stage.receive(like)\n",
        "        gradient = h.grad\n        if i + 1 < len(parts):\n            h = stage.receive(like)\n"
        "        stage.send(gradient)\n",
    ),
]
WRONG = {
    "both stages receive first": (_BOTH_RECEIVE, "it hangs: rank 0 stands in .*recv.*; rank 1 stands in .*recv"),
    "a barrier before each send": (
        [("        dist.send(", "        dist.barrier()\n        dist.send(")],
        "it hangs",
    ),
    "all forward passes first": (
        [
            (
                "    for i in range(len(parts) + 1):\n        if i < len(parts):\n",
                "    for i in range(len(parts)):\n        if i < len(parts):\n",
            ),
            (
                "        if i > 0:\n            h = held.pop(0)\n            torch",
                "    for h in held:\n        if True:\n            torch",
            ),
            (
                "        stage.send(h.grad)\n        if i + 1 < len(parts):\n            h = stage.receive(like)\n",
                "        held.append(h.grad)\n        if i + 1 < len(parts):\n            h = stage.receive(like)\n"
                "    for gradient in held:\n        stage.send(gradient)\n",
            ),
            ("    total = 0\n", "    total, held = 0, []\n"),
        ],
        "holds 4 micro-batches",
    ),
}
SYMPTOM = "it hangs: rank 0 stands in send.*; rank 1 stands in send"


def check(program, seed):
    job = ran(start(program, RANKS, steps=6, micro_batches=4, seed=seed))
    right = train(seed, read_windows(48).split(8), adamw, make=lambda: LM(64))
    equal(
        all_steps(job, 6, rank=1), [loss for loss, _ in right], why="Was a message overwritten, or taken for another?"
    )
    held = job.ranks[0]["in_flight"]
    if held > 2:
        raise Unmended(
            f"the losses are right, but the first stage holds {held} micro-batches at once: that is GPipe. 1F1B "
            "promises two: keep the order of the passes, and change how messages are sent"
        )
