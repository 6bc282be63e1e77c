"""The same data on every rank."""

from jobs import Unmended, start
from serial import adamw, all_steps, equal, ran, train

RANKS = 4
RIGHT = "d"
REPLIES = {
    "a": "DDP does average: weights stay equal. The mean of four equal gradients is that gradient, so nothing is seen.",
    "b": "The seed of the *weights* must be the same on all ranks, or DDP would have to overwrite them (it does so).",
    "c": "A larger batch does allow a larger learning rate, but the curve of 4 ranks with batch 16 would then still be "
    "smoother than that of 1 rank with batch 4. Here they agree to the last digit.",
}
HINTS = [
    "The loss that is printed is a mean over ranks. Print each rank's own before the all-reduce.",
    "If four ranks' losses are equal to the last digit, what did they read? Print `batch[0]` on each rank.",
    "The loader's order depends on seed and epoch, and on nothing that differs between ranks.",
    "One order for all, from which each rank takes its share: DistributedSampler, with set_epoch in each epoch.",
]
EXPLANATION = """\
Every rank draws the same order, so every rank reads the same batch: four ranks do one rank's work four times. Nothing
fails, the loss falls, and tokens/s, counted as batch x ranks, look splendid. What shows it: each rank's own loss before
it is averaged, or the comparison with one process at the same *global* batch.

A seed of its own for each rank is no remedy: orders drawn independently overlap, so that some windows are read several
times in an epoch and a third never. One order is needed, of which each rank takes every fourth: DistributedSampler. It
shuffles by seed + epoch, so without `set_epoch` every epoch repeats the first one.
"""
MENDED = [
    ("from torch.utils.data import DataLoader\n", "from torch.utils.data import DataLoader, DistributedSampler\n"),
    (
        "        order = torch.Generator().manual_seed(args.seed + epoch)  # a new order in each epoch\n"
        "        loader = DataLoader(windows, args.batch // size, shuffle=True, generator=order)\n",
        "        sampler.set_epoch(epoch)  # a new order in each epoch\n"
        "        loader = DataLoader(windows, args.batch // size, sampler=sampler)\n",
    ),
    (
        "    steps_per_epoch =",
        "    sampler = DistributedSampler(windows, seed=args.seed, drop_last=True)\n    steps_per_epoch =",
    ),
]
WRONG = {
    "another seed on each rank": (
        [("manual_seed(args.seed + epoch)", "manual_seed(args.seed + epoch + 1000 * rank)")],
        "are read twice or more in epoch 0.*drew an order of its own",
    ),
    "no set_epoch": (
        [*MENDED, ("        sampler.set_epoch(epoch)  # a new order in each epoch\n", "")],
        "epoch 1 repeats the order of epoch 0",
    ),
    "each rank a quarter, always in the same order": (
        [
            (
                "DataLoader(windows, args.batch // size, shuffle=True, generator=order)",
                "DataLoader(windows[rank::size], args.batch // size)",
            ),
        ],
        "epoch 1 repeats the order of epoch 0",
    ),
    "a larger batch": (
        [("DataLoader(windows, args.batch // size,", "DataLoader(windows, args.batch,")],
        "64 windows in a step",
    ),
}
SYMPTOM = "all 4 ranks read the same 4 windows in step 0"


def check(program, seed):
    epochs, steps = 2, 6
    job = ran(start(program, RANKS, epochs=epochs, windows=96, batch=16, seed=seed))
    losses = all_steps(job, epochs * steps)
    by_rank = [[[tuple(w) for w in step["windows"]] for step in rank["steps"]] for rank in job.ranks]
    if len(by_rank[0]) != epochs * steps:
        raise Unmended(f"an epoch of 96 windows has 6 steps of 16, but rank 0 took {len(by_rank[0])} in two epochs")
    batches = [[w for rank in by_rank for w in rank[step]] for step in range(epochs * steps)]
    if len(batches[0]) != 16:
        raise Unmended(f"{len(batches[0])} windows in a step, but --batch 16 is that of all ranks together")
    if all(rank[0] == by_rank[0][0] for rank in by_rank):
        raise Unmended("all 4 ranks read the same 4 windows in step 0: more ranks, no more data")
    for epoch in range(epochs):
        read = [w for batch in batches[epoch * steps : (epoch + 1) * steps] for w in batch]
        if again := len(read) - len(set(read)):
            raise Unmended(
                f"{again} of 96 windows are read twice or more in epoch {epoch}, and as many never: each rank drew an "
                "order of its own; they should share one"
            )
    if batches[:steps] == batches[steps:]:
        raise Unmended("each window is read once in an epoch, but epoch 1 repeats the order of epoch 0")
    right = train(seed, batches, adamw)
    equal(losses, [loss for loss, _ in right], why="Are gradients averaged over ranks?")
