"""Ranks that take unequal numbers of steps."""

from jobs import Unmended, start
from serial import adamw, all_steps, equal, ran, train

RANKS = 2
RIGHT = "c"
REPLIES = {
    "a": "Rank 0 alone saves, but its stack is not in torch.save: it is in backward, waiting for rank 1's gradients.",
    "b": "The network carried nine steps without trouble, and both ranks' stacks stand in torch.distributed: each "
    "waits for a call that the other has not made. A slow network would not stop at the same step in every run.",
    "d": "A deadlock inside DDP would leave both ranks in backward. Rank 1 has left the loop: it stands in barrier.",
}
HINTS = [
    "Take the stack of each rank (`run` prints them). Are both in the same collective?",
    "Rank 0 is in the backward pass of one more batch. How many batches has each rank's loader?",
    "73 windows, every second one: 37 for rank 0, 36 for rank 1; in batches of 4 that is 10 and 9.",
    "All ranks must take the same number of steps, whatever the files hold: cut each share to len(windows) // size.",
]
EXPLANATION = """\
73 windows make 37 for rank 0 and 36 for rank 1: ten batches and nine. In its tenth backward pass rank 0 waits for
rank 1's gradients; rank 1 has finished its epoch and waits in `barrier`. Collectives are matched by order alone, so
neither ever returns. With 72 or 74 windows nothing happens: such a job runs for months, until a file is added.

The number of steps must be the same on all ranks by construction: cut the data to what divides (below), or let
DistributedSampler do it (drop_last, or it repeats some), or, where each rank reads a stream of its own, agree before
each step on whether all still have a batch (DDP's Join does). A longer time-out only makes you wait longer.
"""
MENDED = [
    (
        "    mine = windows[dist.get_rank() :: dist.get_world_size()]\n",
        "    size = dist.get_world_size()\n    mine = windows[dist.get_rank() :: size][: len(windows) // size]\n",
    )
]
WRONG = {
    "the barrier removed": (
        [("        dist.barrier()  # whoever goes on may read the file\n", "")],
        "fails: .*steps begun: rank 0 19, rank 1 18",
    ),
    "a longer time-out": (
        [
            ("import torch\n", "from datetime import timedelta\n\nimport torch\n"),
            ('init_process_group("gloo")', 'init_process_group("gloo", timeout=timedelta(hours=5))'),
        ],
        "it hangs: rank 0 stands in .*; rank 1 stands in",
    ),
    "most of the data dropped": (
        [
            ("        for batch in load(", "        for _, batch in zip(range(5), load("),
            ("args.seed + epoch):", "args.seed + epoch)):"),
        ],
        "read only 40 of 73",
    ),
}
SYMPTOM = "it hangs: rank 0 stands in .*; rank 1 stands in barrier"


def check(program, seed):
    epochs, windows = 2, 73
    job = ran(start(program, RANKS, epochs=epochs, windows=windows, seed=seed))
    took = [len(rank["steps"]) for rank in job.ranks]
    if took[0] != took[1]:
        raise Unmended(f"rank 0 has taken {took[0]} steps and rank 1 {took[1]}: some of them had no partner")
    losses = all_steps(job, took[0])
    steps = [[tuple(w) for rank in job.ranks for w in rank["steps"][step]["windows"]] for step in range(took[0])]
    epoch = [window for step in steps[: took[0] // epochs] for window in step]
    if len(set(epoch)) < windows - 8:
        raise Unmended(
            f"no hang, but an epoch has read only {len(set(epoch))} of {windows} windows: lose a few at most"
        )
    full = next((i for i, step in enumerate(steps) if len(step) < 8), len(steps))
    right = train(seed, steps[:full], adamw)
    equal(losses[:full], [loss for loss, _ in right], why="Each step should use the mean gradient of both ranks")
