"""Graders of the exercises on messages: what arrives and who sends, drawn latencies, a ring played step by step."""

import random

import numpy as np
import torch

from aiscale.lesson.gap_grader import Gap
from aiscale.lesson.grading import exercise, require, same, same_on_ranks

# 02.a ---------------------------------------------------------------------------------------------------------------

mean_over_ranks = Gap(
    "02.a",
    "The mean over the ranks",
    "train_ranks.py",
    minutes=6,
    hints=[
        "After the micro-batches, `weight.grad` of each of `model.parameters()` comes from this rank's share alone.",
        "`dist.all_reduce(tensor, op)` writes the result into the tensor itself. `dist.ReduceOp.AVG` divides, too. The "
        "loss that is printed needs the same.",
    ],
    solution="""
        for weight in model.parameters():
            dist.all_reduce(weight.grad, dist.ReduceOp.AVG)
        dist.all_reduce(loss, dist.ReduceOp.AVG)  # each rank knows the loss of its own share
    """,
)

mean_over_ranks.refuses(
    "a sum",
    "summed over ranks, not averaged",
    """
    for weight in model.parameters():
        dist.all_reduce(weight.grad)
    dist.all_reduce(loss, dist.ReduceOp.AVG)
    """,
)
mean_over_ranks.refuses("nothing is sent", "never averaged", "pass")
mean_over_ranks.refuses(
    "weights for gradients",
    "never averaged",
    """
    for weight in model.parameters():
        dist.all_reduce(weight.data, dist.ReduceOp.AVG)
    dist.all_reduce(loss, dist.ReduceOp.AVG)
    """,
)
mean_over_ranks.refuses(
    "on rank 0 alone",
    "a condition on the rank",
    """
    if rank == 0:
        for weight in model.parameters():
            dist.all_reduce(weight.grad, dist.ReduceOp.AVG)
    dist.all_reduce(loss, dist.ReduceOp.AVG)
    """,
)
mean_over_ranks.refuses(
    "divided twice",
    "divided by the number of ranks twice",
    """
    for weight in model.parameters():
        dist.all_reduce(weight.grad, dist.ReduceOp.AVG)
        weight.grad /= world_size
    dist.all_reduce(loss, dist.ReduceOp.AVG)
    """,
)
mean_over_ranks.refuses(
    "the loss of rank 0",
    "is the mean",
    """
    for weight in model.parameters():
        dist.all_reduce(weight.grad, dist.ReduceOp.AVG)
    """,
)

# 02.1 ---------------------------------------------------------------------------------------------------------------


@exercise(
    "02.1",
    "A tree of messages",
    "tree_broadcast",
    minutes=8,
    ranks=True,
    inplace=True,
    hints=[
        "Take root 0 first. Round 1: 0 sends to 1. Round 2: 0 sends to 2, and 1 sends to 3. Who is the partner of a "
        "rank, if `have` ranks have the tensor?",
        "Every rank runs the same round: it sends, or receives, or has nothing to do.",
        "Places are counted from the root. Which rank has the place `place + have`? Mind the end of the ring of ranks.",
    ],
)
def tree_of_messages(tree_broadcast):
    n = tree_broadcast.size
    for root in random.sample(range(n), n):
        tensors = [torch.randn(5).double() for _ in range(n)]
        found = tree_broadcast.each(tensors, [root] * n)
        causes = {"nothing has arrived: does recv write into `tensor` itself?": tensors}
        if root:
            causes[f"all have what rank 0 had, but the root is {root}"] = [tensors[0]] * n
        same_on_ranks(found, [tensors[root]] * n, f"the tensor from root {root}", causes=causes, rtol=1e-12)
        others = {op for sent in tree_broadcast.sent for op in sent} - {"send", "recv"}
        require(not others, f"right, but by {', '.join(sorted(others))}: send and recv are asked for")
        calls = [sent.get("send", (0, 0))[0] for sent in tree_broadcast.sent]
        require(
            sum(calls) == n - 1, f"right, but {sum(calls)} messages were sent: {n - 1} ranks must receive, each once"
        )
        require(
            calls[root] < n - 1,
            f"right, but the root alone sends, {n - 1} times in turn: who has the tensor already could pass it on",
        )
        require(
            calls[root] > 1,
            f"right, but the root sends once and is idle: a chain of {n} ranks has {n - 1} rounds, and 2 are enough",
        )


tree_of_messages.refuses(
    "a star",
    "the root alone sends",
    """
    if rank == root:
        for other in range(world_size):
            if other != root:
                dist.send(tensor, other)
    else:
        dist.recv(tensor, root)
    return
    """,
)
tree_of_messages.refuses(
    "a chain",
    "a chain of",
    """
    place = (rank - root) % world_size
    if place > 0:
        dist.recv(tensor, (rank - 1) % world_size)
    if place < world_size - 1:
        dist.send(tensor, (rank + 1) % world_size)
    return
    """,
)
tree_of_messages.refuses("torch's own", "send and recv are asked for", "dist.broadcast(tensor, root)\nreturn")
tree_of_messages.refuses(
    "hard-coded for root 0",
    "all have what rank 0 had",
    """
    if rank == 0:
        dist.send(tensor, 1)
        dist.send(tensor, 2)
    elif rank == 1:
        dist.recv(tensor, 0)
        dist.send(tensor, 3)
    else:
        dist.recv(tensor, rank - 2)
    return
    """,
)


# 02.2 ---------------------------------------------------------------------------------------------------------------


def fitted(counts, nbytes, seconds) -> tuple[float, float]:
    """Latency and bandwidth by numpy's least squares."""
    alpha, byte_s = np.linalg.lstsq(np.column_stack([counts, nbytes]).astype(float), np.array(seconds), rcond=None)[0]
    return alpha, 1 / byte_s


@exercise(
    "02.2",
    "What a message costs",
    "latency_and_bandwidth",
    minutes=8,
    hints=[
        "First make one time of the tries of a pair. Delays are never negative: so which try is the best guess?",
        "Two pairs are two equations with two unknowns. Or take all at once: `np.linalg.lstsq(matrix, times)` with a "
        "column of counts and one of bytes.",
        "The unknowns of the equations are alpha and the seconds of a byte. What is the bandwidth then?",
    ],
)
def what_a_message_costs(latency_and_bandwidth):
    for _ in range(3):
        alpha, bandwidth = 10 ** random.uniform(-5.7, -4.3), 10 ** random.uniform(8.7, 10.3)
        counts = random.sample([1, 4, 20, 90, 400, 1500], 6)
        nbytes = [int(bandwidth * alpha * random.uniform(20, 1500)) for _ in counts]
        truth = [k * alpha + size / bandwidth for k, size in zip(counts, nbytes, strict=True)]
        seconds = []
        for quiet in truth:
            delayed = [quiet * (1 + random.expovariate(2) + 0.05) for _ in range(random.randint(2, 5))]
            seconds.append(random.sample([quiet, *delayed], len(delayed) + 1))
        found_alpha, found_bandwidth = latency_and_bandwidth(counts, nbytes, seconds)
        slow = {
            "the mean over the tries": fitted(counts, nbytes, [np.mean(tries) for tries in seconds]),
            "the median of the tries": fitted(counts, nbytes, [np.median(tries) for tries in seconds]),
            "the first try": fitted(counts, nbytes, [tries[0] for tries in seconds]),
        }
        each = fitted(counts, [k * size for k, size in zip(counts, nbytes, strict=True)], truth)
        causes = {f"this comes from {name}, but delays only add": wrong[0] for name, wrong in slow.items()}
        causes |= {
            "the bytes are those of all messages of a pair together, not of each": each[0],
            "the time of the bytes is missing: this is a fit over the counts alone": np.polyfit(counts, truth, 1)[0],
        }
        same(found_alpha, alpha, "alpha", causes=causes, scale={1e6: "in seconds, not in microseconds"}, rtol=1e-6)
        causes = {"this is the seconds of a byte; the bandwidth is bytes a second": 1 / bandwidth}
        scale = {8: "in bytes, not in bits", 1e-9: "in bytes a second, not in GB/s", 1e-6: "in bytes, not in MB"}
        same(found_bandwidth, bandwidth, "the bandwidth", causes=causes, scale=scale, rtol=1e-6)


_FIT = """
alpha, byte_s = np.linalg.lstsq(np.column_stack([counts, nbytes]).astype(float), np.array(times), rcond=None)[0]
"""
what_a_message_costs.refuses(
    "mean of the tries",
    "delays only add",
    "times = [np.mean(tries) for tries in seconds]" + _FIT + "return alpha, 1 / byte_s",
)
what_a_message_costs.refuses(
    "median of the tries",
    "delays only add",
    "times = [np.median(tries) for tries in seconds]" + _FIT + "return alpha, 1 / byte_s",
)
what_a_message_costs.refuses(
    "seconds of a byte",
    "the seconds of a byte",
    "times = [min(tries) for tries in seconds]" + _FIT + "return alpha, byte_s",
)
what_a_message_costs.refuses(
    "a line through the counts",
    "over the counts alone",
    """
    alpha, rest = np.polyfit(counts, [min(tries) for tries in seconds], 1)
    return alpha, np.mean(nbytes) / rest
    """,
)
what_a_message_costs.refuses("hard-coded for the shown pairs", "alpha", "return 10e-6, 2e9")


# 02.3 ---------------------------------------------------------------------------------------------------------------


def play_ring(n: int, nbytes: float, alpha: float, bandwidth: float, *, halves: int = 2, chunks: int = 0) -> float:
    """Seconds until all chunks have gone around a ring: each step begins when its ranks have the chunk before."""
    ready = [0.0] * n
    for _ in range(halves * (n - 1)):
        arrived = [start + alpha + nbytes / (chunks or n) / bandwidth for start in ready]
        ready = [max(ready[rank], arrived[rank - 1]) for rank in range(n)]
    return max(ready)


@exercise(
    "02.3",
    "When more ranks are slower",
    "best_ranks",
    minutes=8,
    core=False,
    hints=[
        "Write the time of a step as a function of n first. What does n = 1 send?",
        "There is no need for calculus: try every n from 1 to `most`, and take the smallest time.",
        "The speed-up compares the step on one rank with the step at its best: both have the fixed part.",
    ],
)
def more_ranks_are_slower(best_ranks):
    most = 64
    for _ in range(3):
        alpha, bandwidth, about = 10 ** random.uniform(-5, -3.5), 10 ** random.uniform(9, 10.5), random.uniform(24, 40)
        sending = 2 * alpha * about**2 * random.uniform(0.2, 0.6)  # seconds of the bytes, on many ranks
        nbytes, work = sending / 2 * bandwidth, 2 * alpha * about**2 + sending
        fixed = work * random.uniform(0.03, 0.08)

        def best(alpha=alpha, fixed=fixed, work=work, nbytes=nbytes, bandwidth=bandwidth, **ring):
            times = {n: fixed + work / n + play_ring(n, nbytes, alpha, bandwidth, **ring) for n in range(1, most + 1)}
            fastest = min(times, key=times.get)
            return fastest, times[1] / times[fastest], times

        right, gain, times = best()
        found, found_gain = best_ranks(work, fixed, nbytes, alpha, bandwidth, most)
        causes = {
            "as many ranks as there are: does every message of the ring cost alpha?": most,
            "a ring goes around twice: n - 1 steps collect, and n - 1 more spread": best(halves=1)[0],
            "each message has 1/n of the bytes, not all of them": best(chunks=1)[0],
        }
        same(found, right, "the number of ranks", causes={t: v for t, v in causes.items() if v != right}, rtol=1e-9)
        causes = {
            "the fixed part does not shrink: both steps have it": work / (times[right] - fixed),
            "the step at its best has messages, too": times[1] / (fixed + work / right),
            "this is the number of ranks: the speed-up is a quotient of two times": right,
            "this is the inverse: the time on one rank stands above": 1 / gain,
            "the fixed part is missing in the step on one rank": work / times[right],
            "this is the efficiency, the speed-up over the ranks": gain / right,
            "this is the time of a step at its best": times[right],
        }
        same(found_gain, gain, "the speed-up", causes=causes, rtol=1e-6)


_BEST = """
best = min(range(1, most + 1), key=step_s)
"""
_STEP = """
def step_s(n):
    return fixed_s + work_s / n + 2 * (n - 1) * (alpha + nbytes / n / bandwidth)
"""
more_ranks_are_slower.refuses(
    "Amdahl alone",
    "does every message",
    """
    return most, (work_s + fixed_s) / (fixed_s + work_s / most)
    """,
)
more_ranks_are_slower.refuses(
    "once around",
    "a ring goes around twice",
    _STEP.replace("2 * (n - 1)", "(n - 1)") + _BEST + "return best, step_s(1) / step_s(best)",
)
more_ranks_are_slower.refuses(
    "all bytes in each message",
    "each message has 1/n",
    _STEP.replace("nbytes / n", "nbytes") + _BEST + "return best, step_s(1) / step_s(best)",
)
more_ranks_are_slower.refuses(
    "speed-up without the fixed part",
    "both steps have it",
    _STEP + _BEST + "return best, work_s / (step_s(best) - fixed_s)",
)
more_ranks_are_slower.refuses("ranks for speed-up", "a quotient of two times", _STEP + _BEST + "return best, best")
more_ranks_are_slower.refuses("hard-coded for the shown step", "the number of ranks", "return 20, 3.2012")
