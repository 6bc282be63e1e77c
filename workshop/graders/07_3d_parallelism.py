"""Grader of the exercise on 3D parallelism: numpy's axes."""

import random

import numpy

from aiscale.lesson.grading import exercise, require


@exercise(
    "07.1",
    "Who talks to whom",
    "groups",
    minutes=8,
    hints=[
        "Find the coordinates first: `rank % tp` is the place among those who share layers.",
        "rank = t + tp * (d + dp * p). A group runs through one of the three and keeps the others.",
    ],
)
def who_talks_to_whom(groups):
    for _ in range(6):
        tp, dp, pp = random.sample((2, 3, 4, 5), 3)
        rank = random.randrange(tp * dp * pp)
        # The first axis of a grid in numpy's order changes slowest: pp, then dp, then tp.
        grid = numpy.arange(tp * dp * pp).reshape(pp, dp, tp)
        p, d, t = (int(place[0]) for place in numpy.where(grid == rank))
        expected = tuple(group.tolist() for group in (grid[p, d, :], grid[p, :, t], grid[:, d, t]))
        found = groups(rank, tp, dp, pp)
        where = f"rank {rank} of tp {tp}, dp {dp}, pp {pp}"
        require(
            isinstance(found, (tuple, list)) and len(found) == 3, f"{where}: return three lists, not {str(found)[:60]}"
        )
        for name, mine, right in zip(("tensor", "data", "pipeline"), map(list, found), expected, strict=True):
            require(rank in mine, f"{where}: the {name} group is {mine}: a rank belongs to its own groups")
            swapped = numpy.arange(tp * dp * pp).reshape(dp, pp, tp)
            q, s, u = (int(place[0]) for place in numpy.where(swapped == rank))
            why = ""
            if mine in (swapped[q, :, u].tolist(), swapped[:, s, u].tolist()):
                why = ": copies are numbered before stages"
            require(mine == right, f"{where}: the {name} group is {mine}, but should be {right}{why}")


who_talks_to_whom.refuses(
    "pp fastest",
    "but should be",
    """
    p, d, t = rank % pp, rank // pp % dp, rank // (pp * dp)
    return ([p + pp * (d + dp * i) for i in range(tp)], [p + pp * (i + dp * t) for i in range(dp)],
            [i + pp * (d + dp * t) for i in range(pp)])
    """,
)
who_talks_to_whom.refuses(
    "data and pipeline groups exchanged",
    "but should be",
    """
    t, d, p = rank % tp, rank // tp % dp, rank // (tp * dp)
    return ([i + tp * (d + dp * p) for i in range(tp)], [t + tp * (d + dp * i) for i in range(pp)],
            [t + tp * (i + dp * p) for i in range(dp)])
    """,
)
who_talks_to_whom.refuses(
    "without the rank itself",
    "belongs to its own groups",
    """
    t, d, p = rank % tp, rank // tp % dp, rank // (tp * dp)
    return ([i + tp * (d + dp * p) for i in range(tp) if i != t], [t + tp * (i + dp * p) for i in range(dp)],
            [t + tp * (d + dp * i) for i in range(pp)])
    """,
)
who_talks_to_whom.refuses("hard-coded for the shown rank 5", "rank", "return [4, 5], [5, 7], [1, 5]")
