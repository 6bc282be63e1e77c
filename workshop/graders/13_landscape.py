"""Graders of the exercises on the frameworks' ideas: conversions of placements, shares, cuts."""

import random

import torch

from aiscale.lesson.grading import exercise, require, same_on_ranks

# 13.1 ---------------------------------------------------------------------------------------------------------------


@exercise(
    "13.1",
    "One collective",
    "box",
    minutes=10,
    ranks=True,
    hints=[
        "Five cases: equal letters; B to S; S to B; P to B; P to S. Two of them send nothing.",
        "`dist.all_gather` collects parts, `dist.all_reduce` adds up whole tensors. Which adds up and hands out parts?",
        "`dist.reduce_scatter_tensor(mine, tensor)` fills `mine`, a new tensor of this rank's rows.",
    ],
)
def one_collective(box):
    n = box.size
    for start, end in ("BS", "SB", "PB", "PS", "SS", "BB"):
        matrix = torch.randn(n * random.randint(2, 4), n * random.randint(1, 2)).double()
        addends = [torch.randn_like(matrix) for _ in range(n - 1)]
        parts = {"S": list(matrix.chunk(n)), "B": [matrix] * n, "P": [*addends, matrix - sum(addends)]}
        found = box.each(parts[start], [start] * n, [end] * n)
        what = f"from {start} to {end}, the part"
        causes = {
            "this is what the rank had before": parts[start],
            "every rank has the rows of rank 0": [matrix.chunk(n)[0]] * n,
            "this is the whole matrix, and S is a rank's rows": [matrix] * n,
            "these are a rank's rows, and B is the whole matrix": list(matrix.chunk(n)),
            "these are columns: S splits by rows": list(matrix.chunk(n, dim=1)),
            "these are the rank's rows of its own addend: nothing was added up": [
                part.chunk(n)[i] for i, part in enumerate(parts[start]) if len(part) >= n
            ],
            "the parts are put together in another order than that of the ranks": [torch.cat(matrix.chunk(n)[::-1])]
            * n,
        }
        causes = {text: tensors for text, tensors in causes.items() if len(tensors) == n and tensors[0].numel()}
        scale = {1 / n: "P is a sum, not a mean", n: "each rank's copy was added up: B is the matrix, not a part of it"}
        same_on_ranks(found, parts[end], what, scale=scale, causes=causes, rtol=1e-6)
        sent = {op: calls for op, (calls, _) in box.sent[0].items() if calls}
        needed = {"SB": "all_gather", "PB": "all_reduce", "PS": "reduce_scatter"}.get(start + end)
        told = f"from {start} to {end}: right, but it sends {', '.join(sent)}"
        require(not sent or needed, f"{told}, and each rank has its part already")
        require(
            not sent or list(sent.items()) == [(needed, 1)],
            f"{told}; one {needed} is enough, with fewer bytes or messages",
        )


_REST = """
if start == end:
    return tensor
if start == "B":
    return tensor.chunk(world_size)[rank]
parts = [torch.empty_like(tensor) for _ in range(world_size)]
"""
one_collective.refuses(
    "an all-reduce, then its rows",
    "one reduce_scatter is enough",
    _REST
    + """
if start == "S":
    dist.all_gather(parts, tensor)
    return torch.cat(parts)
whole = tensor.clone()
dist.all_reduce(whole)
return whole if end == "B" else whole.chunk(world_size)[rank]
""",
)
one_collective.refuses(
    "P taken for B",
    "nothing was added up",
    _REST
    + """
if start == "P" and end == "S":
    return tensor.chunk(world_size)[rank]
if start == "P":
    dist.all_reduce(tensor)
    return tensor
dist.all_gather(parts, tensor)
return torch.cat(parts)
""",
)
one_collective.refuses(
    "split by columns",
    "from B to S",
    "return tensor if start == end else tensor.chunk(world_size, dim=1)[rank]",
)
one_collective.refuses(
    "hard-coded for the shown 4 rows",
    "from B to S",
    'return tensor[rank : rank + 1] if (start, end) == ("B", "S") else tensor',
)


# 13.2 ---------------------------------------------------------------------------------------------------------------


def shortest_step(batch: int, speeds: list[int]) -> float:
    """The least of all moments at which some device ends a sample, and enough samples are done."""
    moments = sorted(k / speed for speed in speeds for k in range(1, batch + 1))
    return next(s for s in moments if sum(int(s * speed + 1e-9) for speed in speeds) >= batch)


@exercise(
    "13.2",
    "Shares for unequal devices",
    "shares",
    minutes=10,
    hints=[
        "In proportion to the speeds is right, but for rounding: some samples are left over. Who should get them?",
        "Give out one sample at a time, each to the device that would then be ready first.",
    ],
)
def unequal_devices(shares):
    for i in range(6):
        speeds = [random.randint(1, 9) for _ in range(random.randint(3, 7))]
        speeds[0] = random.randint(12, 19)  # one is far faster
        batch = random.randint(30, 90) if i else sum(speeds) * random.randint(1, 3)
        while i and batch % sum(speeds) == 0:
            batch += 1
        found = list(shares(batch, list(speeds)))
        where = f"{batch} samples, speeds {speeds}"
        require(len(found) == len(speeds), f"{where}: {len(found)} shares for {len(speeds)} devices")
        require(
            all(isinstance(share, int) and share >= 0 for share in found), f"{where}: {found} are not whole samples"
        )
        require(sum(found) == batch, f"{where}: your shares add up to {sum(found)}")
        best, step = shortest_step(batch, speeds), max(a / b for a, b in zip(found, speeds, strict=True))
        told = f"{where}: {found} takes {step:.3f} s, and {best:.3f} s is possible"
        require(max(found) - min(found) > 1, f"{told}: the shares are equal, the speeds are not")
        slow, fast = speeds.index(min(speeds)), speeds.index(max(speeds))
        require(found[fast] >= found[slow], f"{told}: the slowest device has more than the fastest")
        require(step <= best * (1 + 1e-9), f"{told}: who has got what rounding left over?")


unequal_devices.refuses(
    "equal shares",
    "the shares are equal",
    "n = len(speeds)\nreturn [batch // n + (i < batch % n) for i in range(n)]",
)
unequal_devices.refuses(
    "rounded in proportion",
    "rounding left over",
    """
    found = [batch * s // sum(speeds) for s in speeds]
    found[speeds.index(min(speeds))] += batch - sum(found)
    return found
    """,
)
unequal_devices.refuses(
    "not all samples given out", "add up to", "return [batch * s // (sum(speeds) + 1) for s in speeds]"
)
unequal_devices.refuses("not whole samples", "not whole samples", "return [batch * s / sum(speeds) for s in speeds]")
unequal_devices.refuses("hard-coded for the shown devices", "shares for", "return [6, 2]")


# 13.3 ---------------------------------------------------------------------------------------------------------------


def least_slowest(costs: list[int], stages: int) -> int:
    """The smallest room in which the blocks, filled in from the left, need no more stages."""

    def needed(room: int) -> int:
        count, used = 1, 0
        for one in costs:
            count, used = (count, used + one) if used + one <= room else (count + 1, one)
        return count

    return next(room for room in range(max(costs), sum(costs) + 1) if needed(room) <= stages)


@exercise(
    "13.3",
    "Cut by cost",
    "cut",
    minutes=12,
    core=False,
    hints=[
        "If you knew the best cuts of the first c blocks into one stage fewer, for every c, which c would you take?",
        "Or guess the largest sum that is allowed, fill stages from the left, and halve the interval of guesses. "
        "Do all stages have a block then?",
    ],
)
def cut_by_cost(cut):
    for i in range(6):
        blocks, stages = (60, 8) if i == 5 else (random.randint(9, 16), random.randint(3, 5))
        costs = [random.randint(1, 9) for _ in range(blocks)]
        costs[-1] += random.randint(15, 25)  # a head over a large vocabulary
        found = list(cut(list(costs), stages))
        where = f"costs {costs}, {stages} stages" if blocks < 20 else f"{blocks} blocks, {stages} stages"
        require(len(found) == stages - 1, f"{where}: {len(found)} cuts, but {stages} stages need {stages - 1}")
        edges = [0, *found, blocks]
        require(
            all(a < b for a, b in zip(edges, edges[1:], strict=False)),
            f"{where}: cuts {found} leave a stage without blocks, or are not in order",
        )
        slowest = max(sum(costs[a:b]) for a, b in zip(edges, edges[1:], strict=False))
        best = least_slowest(costs, stages)
        even = max(b - a for a, b in zip(edges, edges[1:], strict=False)) - min(
            b - a for a, b in zip(edges, edges[1:], strict=False)
        )
        why = ": the stages have equally many blocks, not equal costs" if even <= 1 else ""
        require(slowest == best, f"{where}: the slowest stage costs {slowest}, and {best} is possible{why}")


cut_by_cost.refuses(
    "equal numbers of blocks", "equally many blocks", "return [len(costs) * k // stages for k in range(1, stages)]"
)
cut_by_cost.refuses("last blocks alone", "is possible", "return [len(costs) - stages + k for k in range(1, stages)]")
cut_by_cost.refuses(
    "filled up to the mean",
    "stage",
    """
    found, used = [], 0
    for i, one in enumerate(costs):
        if used and used + one > sum(costs) / stages and len(found) < stages - 1:
            found.append(i)
            used = 0
        used += one
    return found
    """,
)
cut_by_cost.refuses(
    "the last block of each stage",
    "stage",
    "return [len(costs) * k // stages - 1 for k in range(1, stages + 1)]",
)
cut_by_cost.refuses("hard-coded for the shown costs", "stages need", "return [4]")
