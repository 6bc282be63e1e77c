"""Graders of the exercises on planning: a search over intervals, a search over layouts, curves of a known law."""

import random

import numpy as np

from aiscale.lesson.grading import exercise, require, same

# 11.1 ---------------------------------------------------------------------------------------------------------------


def lost(interval: float, fails_s: float, write_s: float, restart_s: float) -> float:
    return write_s / interval + (interval / 2 + restart_s) / fails_s


@exercise(
    "11.1",
    "How often to save",
    "save_every",
    minutes=10,
    hints=[
        "Write the share that is lost as a function of the interval: one term falls with it, one grows, one stays.",
        "A sum of a / t and b t is least where both are equal.",
    ],
)
def how_often_to_save(save_every):
    for _ in range(4):
        nodes, node_hours = random.randint(100, 9000), random.randint(20_000, 200_000)
        write_s, restart_s = random.randint(5, 120), random.randint(60, 900)
        fails_s = 3600 * node_hours / nodes
        grid = [10 ** (i / 4000) for i in range(4000, 24000)]
        best = min(grid, key=lambda interval: lost(interval, fails_s, write_s, restart_s))
        found = save_every(nodes, node_hours, write_s, restart_s)
        require(isinstance(found, (tuple, list)) and len(found) == 2, f"return two numbers, not {str(found)[:60]}")
        where = f"with {nodes} nodes, {node_hours:,} node-hours and {write_s} s"
        interval, share = found
        causes = {
            "this is the time between two interruptions of one node: all nodes together fail more often": best
            * nodes**0.5,
            "is the interval in hours? It should be in seconds": best / 3600,
            "half an interval is lost at an interruption, not a whole one": best / 2**0.5,
        }
        same(interval, best, f"{where}, the interval", causes=causes, rtol=2e-3)
        least = lost(best, fails_s, write_s, restart_s)
        causes = {
            "the time to start again is missing": least - restart_s / fails_s,
            "only what writing costs is here": write_s / best,
            "only what interruptions cost is here": least - write_s / best,
            "this is in percent: return a share": 100 * least,
        }
        same(share, least, f"{where}, the share lost", causes=causes, rtol=2e-3)


_FAILS = "fails_s = 3600 * node_hours / nodes\n"
_INTERVAL = _FAILS + "t = math.sqrt(2 * write_s * fails_s)\n"
how_often_to_save.refuses(
    "failures of one node",
    "all nodes together fail more often",
    "t = math.sqrt(2 * write_s * 3600 * node_hours)\nreturn t, write_s / t + t / 2 / (3600 * node_hours)",
)
how_often_to_save.refuses(
    "a whole interval lost",
    "not a whole one",
    _FAILS + "t = math.sqrt(write_s * fails_s)\nreturn t, write_s / t + (t + restart_s) / fails_s",
)
how_often_to_save.refuses(
    "in hours",
    "in seconds",
    _INTERVAL + "return t / 3600, write_s / t + (t / 2 + restart_s) / fails_s",
)
how_often_to_save.refuses(
    "restart forgotten",
    "time to start again is missing",
    _INTERVAL + "return t, write_s / t + t / 2 / fails_s",
)
how_often_to_save.refuses("writing alone", "only what writing costs", _INTERVAL + "return t, write_s / t")
how_often_to_save.refuses("hard-coded for the shown job", "node-hours", "return 4648, 0.027")


# 11.2 ---------------------------------------------------------------------------------------------------------------


@exercise(
    "11.2",
    "Does it fit?",
    "smallest_job",
    minutes=12,
    core=False,
    hints=[
        "For given tp and pp, the bytes of a device are a fixed part plus a part over dp. Solve for dp, and round up.",
        "If the part that dp does not divide is too large already, no dp helps: skip that layout.",
        "Collect (devices, pp, tp, dp) for all layouts: Python's min takes the first entry, then the next.",
    ],
)
def does_it_fit(smallest_job):
    for i in range(5):
        parameters, layers = random.choice([1, 7, 13, 22, 70, 175, 500]) * 1e9, random.choice([24, 32, 40, 48, 80, 96])
        memory, share = random.choice([40e9, 64e9, 80e9]), random.choice([0.4, 0.5, 0.6])
        per_node, replicas = random.choice([4, 8]), random.randint(1, 6)
        if i == 0:  # a small model fits on one device, but more replicas are asked for
            parameters, replicas = 1e9, random.randint(2, 6)
        while not (smallest := _search(parameters, layers, memory, share, per_node, replicas)):
            parameters /= 2  # no layout holds it
        devices, layout = smallest
        found = smallest_job(parameters, layers, memory, share, per_node, replicas)
        where = f"{parameters / 1e9:g} B parameters, {layers} layers, {share:.0%} of {memory / 1e9:g} GB"
        where += f", {per_node} devices a node, {replicas} replicas"
        require(
            isinstance(found, (tuple, list)) and len(found) == 2 and len(found[1]) == 3,
            f"return (devices, (tp, pp, dp)), not {str(found)[:60]}",
        )
        n, (tp, pp, dp) = found
        require(n == tp * pp * dp, f"{where}: {n} devices, but tp x pp x dp = {tp * pp * dp}")
        require(tp <= per_node and not tp & (tp - 1), f"{where}: tp {tp} is no power of two up to {per_node}")
        require(layers % pp == 0, f"{where}: pp {pp} does not divide {layers} layers")
        require(dp >= replicas, f"{where}: dp {dp}, but {replicas} replicas are asked for")
        holds = 6 * parameters / (tp * pp) + 12 * parameters / (tp * pp * dp)
        require(
            holds <= share * memory * (1 + 1e-9),
            f"{where}: tp {tp}, pp {pp}, dp {dp} holds {holds / 1e9:.1f} GB a device, "
            f"with {share * memory / 1e9:g} to use",
        )
        require(n == devices, f"{where}: {n} devices fit, but {devices} do, too: what does ZeRO-1 divide?")
        require(
            (tp, pp, dp) == layout,
            f"{where}: as few devices, but (tp, pp, dp) should be {layout}, not {tp, pp, dp}: smallest pp, then tp",
        )


def _search(parameters, layers, memory, share, per_node, replicas) -> tuple[int, tuple[int, int, int]]:
    """By counting up dp, one at a time."""
    best = None
    for pp in range(1, layers + 1):
        for tp in (1, 2, 4, 8):
            if layers % pp or tp > per_node or 6 * parameters / (tp * pp) >= share * memory:
                continue
            dp = replicas
            while (6 + 12 / dp) * parameters / (tp * pp) > share * memory:
                dp += 1
                if best and tp * pp * dp > best[0]:
                    break
            else:
                if best is None or tp * pp * dp < best[0]:
                    best = tp * pp * dp, (tp, pp, dp)
    return best


_LOOP = """
found = []
for tp in (2**i for i in range(per_node.bit_length()) if 2**i <= per_node):
    for pp in (p for p in range(1, layers + 1) if layers % p == 0):
"""
_BEST = "\ndevices, pp, tp, dp = min(found)\nreturn devices, (tp, pp, dp)"
does_it_fit.refuses(
    "without ZeRO",
    "B parameters",
    _LOOP
    + """
        if 18 * parameters / (tp * pp) <= share * memory:
            found.append((tp * pp * replicas, pp, tp, replicas))
found = found or [(1, 1, 1, 1)]
"""
    + _BEST,
)
does_it_fit.refuses(
    "everything divided by dp, as ZeRO-3",
    "GB a device, with",
    _LOOP
    + """
        dp = max(replicas, math.ceil(18 * parameters / (tp * pp) / (share * memory)))
        found.append((tp * pp * dp, pp, tp, dp))
"""
    + _BEST,
)
does_it_fit.refuses(
    "any tensor-parallel size",
    "no power of two",
    """
    found = []
    for tp in range(3, per_node + 1, 4):
        for pp in (p for p in range(1, layers + 1) if layers % p == 0):
            room = share * memory - 6 * parameters / (tp * pp)
            if room > 0:
                dp = max(replicas, math.ceil(12 * parameters / (tp * pp) / room))
                found.append((tp * pp * dp, pp, tp, dp))
    """
    + _BEST.replace("\n", "\n    "),
)
does_it_fit.refuses("hard-coded for one model", "B parameters", "return 64, (8, 8, 1)")


# 11.3 ---------------------------------------------------------------------------------------------------------------


@exercise(
    "11.3",
    "Which model?",
    "best_size",
    minutes=12,
    core=False,
    hints=[
        "For each budget: np.polyfit of the losses over log(parameters), degree 2. Where is a parabola lowest?",
        "For all budgets: np.polyfit of log(best parameters) over log(budget), degree 1. It has two numbers; use both.",
        "np.polyval evaluates such a line; the result is a logarithm.",
    ],
)
def which_model(best_size):
    for _ in range(4):
        slope, at_1e20 = random.uniform(0.4, 0.75), 10 ** random.uniform(8.5, 9.5)
        runs, lowest_points = {}, []
        for exponent in sorted(random.sample(range(17, 22), 3)):
            budget, loss, rise = 10.0**exponent, random.uniform(2, 3), random.uniform(0.05, 0.2)
            best = at_1e20 * (budget / 1e20) ** slope
            # off the best by factors that do not straddle it evenly, so that no measured size is the best one
            sizes = [best * factor for factor in (0.31, 0.57, 1.4, 2.3, 4.4)]
            runs[budget] = [(size, loss + rise * np.log(size / best) ** 2) for size in sizes]
            lowest_points.append(min(runs[budget], key=lambda point: point[1])[0])
        flops = 10.0 ** random.randint(22, 25)
        truth = at_1e20 * (flops / 1e20) ** slope
        budgets = np.log(list(runs))
        nearest = np.exp(np.polyval(np.polyfit(budgets, np.log(lowest_points), 1), np.log(flops)))
        plain = [_lowest([size for size, _ in points], points) for points in runs.values()]
        plain_sizes = np.exp(np.polyval(np.polyfit(budgets, np.log(np.abs(plain)), 1), np.log(flops)))
        causes = {
            "these are the lowest *measured* points: the parabola's lowest point lies between them": nearest,
            "is the parabola one in parameters? It should be one in their logarithm": plain_sizes,
            "this is a logarithm: take its exponential": np.log(truth),
            "the size grows as the square root of the budget: fit the exponent instead": at_1e20
            * (max(runs) / 1e20) ** slope
            * (flops / max(runs)) ** 0.5,
        }
        found = best_size(runs, flops)
        require(np.ndim(found) == 0, f"return one number, the parameters, not {str(found)[:60]}")
        same(float(found), truth, f"with {flops:.0e} FLOPs, the parameters", causes=causes, rtol=1e-3)


def _lowest(at, points) -> float:
    """Where the parabola over `at` through the losses of `points` is lowest."""
    rise, slope, _ = np.polyfit(at, [loss for _, loss in points], 2)
    return -slope / (2 * rise)


_FIT = """
best = []
for points in runs.values():
    sizes, losses = np.array(points).T
    rise, slope, _ = np.polyfit(np.log(sizes), losses, 2)
    best.append(-slope / (2 * rise))
line = np.polyfit(np.log(list(runs)), best, 1)
"""
which_model.refuses(
    "lowest measured points",
    "lies between them",
    """
    best = [np.log(min(points, key=lambda point: point[1])[0]) for points in runs.values()]
    line = np.polyfit(np.log(list(runs)), best, 1)
    return np.exp(np.polyval(line, np.log(flops)))
    """,
)
which_model.refuses("a logarithm", "take its exponential", _FIT + "return np.polyval(line, np.log(flops))")
which_model.refuses(
    "a square root",
    "fit the exponent",
    _FIT + "return np.exp(np.polyval(line, np.log(max(runs)))) * (flops / max(runs)) ** 0.5",
)
which_model.refuses(
    "parabolas in parameters",
    "in their logarithm",
    """
    best = []
    for points in runs.values():
        sizes, losses = np.array(points).T
        rise, slope, _ = np.polyfit(sizes, losses, 2)
        best.append(np.log(abs(-slope / (2 * rise))))
    line = np.polyfit(np.log(list(runs)), best, 1)
    return np.exp(np.polyval(line, np.log(flops)))
    """,
)
which_model.refuses("hard-coded", "the parameters", "return 7e10")
