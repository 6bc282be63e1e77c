"""Clipping before the reduction."""

from jobs import start
from model import read_windows
from serial import all_steps, equal, ran, sgd, train

RANKS = 2
RIGHT = "a"
REPLIES = {
    "b": "If the sum were not divided, the first update would be twice as large also with --max-norm 1000; but then "
    "the curves agree.",
    "c": "Packing and unpacking in another order would spoil training with any --max-norm; with 1000 it is right.",
    "d": "Sums in another order differ by 1e-6, not by 1e-2, and also with --max-norm 1000.",
}
HINTS = [
    "What does --max-norm 1000 switch off? The two curves then agree: look at what is left.",
    "At which moment does a rank's gradient become that of the whole batch? Which norm is printed?",
    "|mean of gradients| is at most the mean of |gradients|; clipped ones are all of the same length.",
    "Clip what the optimizer will use: after average_gradients.",
]
EXPLANATION = """\
Each rank clips the gradient of its own share by its own norm, and the clipped ones are averaged. A rank with a large
gradient then counts as much as one with a small one, so the direction changes, not only the length; and the mean of
vectors of length 0.5 is shorter than 0.5. The printed norm is a mean of norms, which is larger than the norm of the
mean: the more ranks, the more. On one rank everything is right, and with DDP too, since it has averaged in `backward`.

Clip after the reduction: all ranks then have the same gradient, compute the same norm, and clip alike. Under FSDP or
tensor parallelism a rank has only slices: the squares of their norms must be summed over ranks first.
"""
_CLIP = "        norm = torch.nn.utils.clip_grad_norm_(parameters, args.max_norm)\n"
_AVERAGE = "        average_gradients(parameters)\n"
MENDED = [(_CLIP + _AVERAGE, _AVERAGE + _CLIP)]
WRONG = {
    "clipped before and after": (
        [(_AVERAGE, _AVERAGE + _CLIP)],
        "has been clipped already",
    ),
    "clipped to twice the norm": (
        [("(parameters, args.max_norm)", "(parameters, args.max_norm * size)")],
        "norm .* in one process.*mean of norms",
    ),
    "norms averaged over ranks": (
        [
            (
                _CLIP,
                "        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])\n"
                "        dist.all_reduce(norm, dist.ReduceOp.AVG)\n"
                "        torch.nn.utils.clip_grads_with_norm_(parameters, args.max_norm, norm)\n",
            )
        ],
        "norm .* in one process.*mean of norms",
    ),
    "moved, and the division lost": (
        [*MENDED, ("    buffer /= dist.get_world_size()\n", "")],
        "2.0 times the norm",
    ),
}
SYMPTOM = "norm .* at step 0, and .* in one process"


def check(program, seed):
    job = ran(start(program, RANKS, steps=12, batch=4, seed=seed))
    losses = all_steps(job, 12)
    right = train(seed, read_windows(48).split(4), sgd, max_norm=0.5)
    norms = [norm for _, norm in job.logged("norm")]
    first, wanted = norms[0] if norms else 0, right[0][1]
    why = "It is measured before it is the gradient of the whole batch: a mean of norms is not the norm of the mean"
    if norms and max(norms) < 0.51:
        why = "The printed norm never exceeds --max-norm: what is measured has been clipped already"
    elif abs(first / wanted - RANKS) < 0.01:
        why = "It is 2.0 times the norm in one process: the sum over ranks, not divided"
    equal(norms, [norm for _, norm in right], "norm", why)
    equal(losses, [loss for loss, _ in right], why="The norm is right: what is clipped, and when?")
