"""Graders of the exercises on messages: what arrives and who sends, drawn latencies, a ring played step by step."""

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

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

# 02.b ---------------------------------------------------------------------------------------------------------------

from_mpi = Gap(
    "02.b",
    "Five variables from MPI",
    "with_mpi.py",
    minutes=8,
    said="four processes on two nodes would have become ranks 0 to 3, which meet at rank 0's node",
    hints=[
        "`world = MPI.COMM_WORLD`. `RANK` and `WORLD_SIZE` are its rank and its size, as text: `str(...)`.",
        "The rank in the group that `Split_type` returns is `LOCAL_RANK`.",
        "Two ranks that each find a free port have found two. Rank 0 finds one, and "
        "`address, port = world.bcast(...)` brings it to all.",
    ],
    solution="""
    world = MPI.COMM_WORLD  # all processes that mpiexec has started
    node = world.Split_type(MPI.COMM_TYPE_SHARED)  # those that share this one's memory
    meet = (socket.gethostname(), free_port()) if world.Get_rank() == 0 else None
    address, port = world.bcast(meet)
    os.environ["RANK"] = str(world.Get_rank())
    os.environ["WORLD_SIZE"] = str(world.Get_size())
    os.environ["LOCAL_RANK"] = str(node.Get_rank())
    os.environ["MASTER_ADDR"] = address
    os.environ["MASTER_PORT"] = str(port)
    """,
)

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
#: On each of four processes, which are to believe that they are two on each of two nodes.
AS_ON_TWO_NODES = """
import json, os, socket, sys
import mpi4py
from mpi4py import MPI

class World(type(MPI.COMM_WORLD)):
    def Split_type(self, *args, **kwargs):
        return self.Split(self.Get_rank() // 2)

class Known:
    COMM_WORLD = World(MPI.COMM_WORLD)
    def __getattr__(self, name):
        return getattr(MPI, name)

rank = MPI.COMM_WORLD.Get_rank()
mpi4py.MPI = Known()
names = sys.argv[2:]
for name in names:
    os.environ.pop(name, None)
os.environ.update({name: str(rank % 2) for name in ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK")})
host = f"host{rank // 2}"
socket.gethostname = socket.getfqdn = lambda *name: host
socket.gethostbyname = lambda name: f"10.0.0.{name[-1]}"
sys.path.insert(0, sys.argv[1])
import with_mpi
with_mpi.setup_distributed_env()
with open(f"{sys.argv[1]}/said{rank}", "w") as said:
    json.dump({name: os.environ.get(name) for name in names}, said)
"""
MEANS = {
    "str expected": "`os.environ` takes text: `str(...)`",
    "NoneType": "`bcast` returns what rank 0 has, and leaves its argument as it is",
    "not enough values to unpack": "all ranks call `bcast`, and it returns rank 0's value",
}


@from_mpi.look
def four_processes(folder):
    mpiexec = shutil.which("mpiexec", path=Path(sys.executable).parent) or shutil.which("mpiexec")
    if not mpiexec:
        raise RuntimeError("there is no mpiexec")
    command = [mpiexec, "-n", "4", sys.executable, "-c", AS_ON_TWO_NODES, folder, *VARIABLES]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        require(False, "after a minute some rank still waits: does every rank call `bcast`?")
    errors = [line for line in done.stderr.splitlines() if "Error: " in line]
    if errors or done.returncode:
        means = [words for part, words in MEANS.items() if errors and part in errors[0]]
        require(False, ". ".join([f"with_mpi.py stopped: {errors[0] if errors else done.stderr[-200:]}", *means]))
    found = [json.loads((folder / f"said{rank}").read_text()) for rank in range(4)]
    for name in VARIABLES:
        lacking = [rank for rank in range(4) if found[rank][name] is None]
        require(not lacking, f"{name} is not in `os.environ` of ranks {lacking}")
    has = {name: [mine[name] for mine in found] for name in VARIABLES}
    require(has["RANK"] == ["0", "1", "2", "3"], f"RANK is {', '.join(has['RANK'])} on the four ranks")
    require(has["WORLD_SIZE"] == 4 * ["4"], f"WORLD_SIZE is {has['WORLD_SIZE'][0]}, and four processes were started")
    local, shared = has["LOCAL_RANK"], "two ranks of a node would take the same GPU"
    if local == 4 * ["0"]:
        shared += " (the slides write 0 because a rank sees one GPU alone there)"
    require(local[0] != local[1], f"LOCAL_RANK is {local[0]} on ranks 0 and 1 of one node: {shared}")
    right = f"LOCAL_RANK is {', '.join(local)}, and each of two nodes has two ranks: it counts those of one node"
    require(local == ["0", "1", "0", "1"], right)
    addresses, ports = set(has["MASTER_ADDR"]), set(has["MASTER_PORT"])
    require(len(addresses) == 1, "MASTER_ADDR is another on each node: all need rank 0's, by `bcast`")
    (address,) = addresses
    local = address == "localhost" or address.startswith("127.")
    require(not local, f"{address} is another machine on each node: take the host name of rank 0")
    require(
        address not in ("host1", "10.0.0.1"), "MASTER_ADDR is the host of the last ranks, and rank 0 opens the store"
    )
    require(len(ports) == 1, "each rank has found a port of its own: all need rank 0's, by `bcast`")
    (port,) = ports
    require(
        port.isdigit() and 1023 < int(port) < 65536, f"MASTER_PORT is {port}: a port that programs may open is meant"
    )


def _set(*changes):
    lines = from_mpi.lines
    for old, new in changes:
        assert old in lines, old
        lines = lines.replace(old, new)
    return lines


from_mpi.refuses("numbers, not text", "`os.environ` takes text", _set(("str(world.Get_rank())", "world.Get_rank()")))
from_mpi.refuses("LOCAL_RANK of the slides", "the same GPU", _set(("str(node.Get_rank())", '"0"')))
from_mpi.refuses(
    "LOCAL_RANK of all", "it counts those of one node", _set(("str(node.Get_rank())", "str(world.Get_rank())"))
)
from_mpi.refuses("RANK of the node", "RANK is 0, 1, 0, 1", _set(("str(world.Get_rank())", "str(node.Get_rank())")))
from_mpi.refuses("WORLD_SIZE of the node", "WORLD_SIZE is 2", _set(("str(world.Get_size())", "str(node.Get_size())")))
from_mpi.refuses("rank for size", "WORLD_SIZE is 0", _set(("str(world.Get_size())", "str(world.Get_rank())")))
from_mpi.refuses("a port for each", "a port of its own", _set(("= str(port)", "= str(free_port())")))
from_mpi.refuses("a host for each", "is another on each node", _set(("= address", "= socket.gethostname()")))
from_mpi.refuses("localhost", "another machine on each node", _set(("socket.gethostname()", '"localhost"')))
from_mpi.refuses("no port", "MASTER_PORT is not in", _set(('os.environ["MASTER_PORT"] = str(port)', "")))
from_mpi.refuses("variables of Python", "RANK is not in", _set(('os.environ["RANK"] =', "RANK =")))
from_mpi.refuses(
    "bcast writes nothing",
    "returns what rank 0 has",
    _set(("address, port = world.bcast(meet)", "world.bcast(meet)\naddress, port = meet")),
)
from_mpi.refuses(
    "rank 0 alone calls bcast",
    "with_mpi.py stopped",
    _set(
        (
            "address, port = world.bcast(meet)",
            "if world.Get_rank() == 0:\n    address, port = world.bcast(meet)",
        )
    ),
)
from_mpi.refuses(
    "the last rank chooses",
    "rank 0 opens the store",
    _set(("Get_rank() == 0 else", "Get_rank() == 3 else"), ("bcast(meet)", "bcast(meet, 3)")),
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
