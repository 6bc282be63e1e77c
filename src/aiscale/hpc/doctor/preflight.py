"""Checks the ranks of a job before they train: do they reach each other, how fast, and which one is a straggler?

    world = connect()
    found = preflight(world)          # the same on every rank
    found.problems                    # one line each, with the rank and the remedy; empty: none

It measures an all-reduce of all ranks (and checks the result), a message both ways between every pair, and the same
matrix product on every rank. A pair between nodes is compared with the other pairs between nodes, a pair of GPUs inside
a node with the same pair on other nodes: by design GPUs of one node may be joined by links of different width. Slow
pairs are measured again, since congestion may pass. A rank that is slow with most of its partners is a problem, and is
named instead of its pairs; a single slow pair is a warning. Two ranks on one GPU or core are reported first: that
explains the rest.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from aiscale.cost import wire_bytes
from aiscale.distributed import World
from aiscale.hpc.doctor.node import machine, node_cores
from aiscale.processes import usable_cores

ALL_REDUCE_BYTES = 16 * 2**20
MESSAGE_BYTES = {"cpu": 2 * 2**20, "cuda": 64 * 2**20}  #: large enough that latency is a small part
ROUNDS = 3
SLOW = 0.5  #: times the usual rate
LANES = 4  #: the widest link inside a node has so many times the lanes of the narrowest: 4 on an MI250X
MAX_PARTNERS = 64  #: in a large job, a rank exchanges messages with this many others only


@dataclass
class Seat:
    """Where a rank runs."""

    rank: int
    host: str
    device: str  #: a GPU's UUID, or cpu
    cores: list[int]  #: that this rank is bound to
    node_cores: int  #: that it could use unbound
    product_s: float = 0.0  #: time of one matrix product
    machine: str = ""  #: the kernel's boot id: virtual nodes and containers may share one; empty: unknown


@dataclass
class Preflight:
    """The measurements, the same on every rank."""

    seats: list[Seat]
    all_reduce_bytes: int = ALL_REDUCE_BYTES
    all_reduce_s: float = 0.0
    bus_bytes_s: float = 0.0  #: bytes per second that each rank sends and receives in it
    pairs: list[tuple[int, int, float]] = field(default_factory=list)  #: (rank, rank, bytes per second each way)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def is_inside(self, a: int, b: int) -> bool:
        return self.seats[a].host == self.seats[b].host

    def takes_turns(self) -> bool:
        """Whether a machine has more ranks than cores."""
        machines: dict[str, list[Seat]] = {}
        for seat in self.seats:
            machines.setdefault(seat.machine or seat.host, []).append(seat)
        return any(_cores_of(seats) < len(seats) for seats in machines.values())


def preflight(world: World) -> Preflight:
    """Measure, compare, and name problems. All ranks call it."""
    device = str(torch.cuda.get_device_properties(world.device).uuid) if world.device.type == "cuda" else "cpu"
    # Slurm's name for the node: virtual nodes, and containers, may share a host name.
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    seat = Seat(world.rank, host, device, usable_cores(), node_cores(), machine=machine())
    found = Preflight(world.gather(seat))
    compare_seats(found)
    if world.size > 1:
        _time_all_reduce(world, found)
        found.pairs = _time_pairs(world)
        usual = _usual(found)
        if suspects := {(a, b) for a, b, rate in found.pairs if rate < SLOW * usual[a, b]}:
            again = {(a, b): rate for a, b, rate in _time_pairs(world, only=suspects)}
            found.pairs = [(a, b, max(rate, again.get((a, b), 0.0))) for a, b, rate in found.pairs]
        ranks, pairs = slow_links(found)
        # Ranks that share a core make good links look slow: no reason to stop a job.
        (found.warnings if found.takes_turns() else found.problems).extend(ranks)
        found.warnings += pairs
    for seat, product_s in zip(found.seats, world.gather(_time_product(world)), strict=True):
        seat.product_s = product_s
    found.warnings += slow_devices(found.seats)
    return found


def _cores_of(seats: list[Seat]) -> int:
    """A machine's cores for these ranks: those they are bound to, or the node's if that is more."""
    return max(len({core for seat in seats for core in seat.cores}), *(seat.node_cores for seat in seats))


def compare_seats(found: Preflight) -> None:
    """Report ranks that share a GPU, or a core although the node has one for each."""
    for host in dict.fromkeys(seat.host for seat in found.seats):
        here = [seat for seat in found.seats if seat.host == host]
        for device in dict.fromkeys(seat.device for seat in here if seat.device != "cpu"):
            sharing = [str(seat.rank) for seat in here if seat.device == device]
            if len(sharing) > 1:
                found.problems.append(
                    f"ranks {', '.join(sharing)} on {host} share one GPU: srun --gpus-per-task=1 --gpu-bind=closest"
                )
        if crowd := _crowd(here):
            ranks, cores = ", ".join(str(seat.rank) for seat in crowd), {core for seat in crowd for core in seat.cores}
            taken = f"{len(cores)} core{'s' * (len(cores) > 1)}"
            if here[0].node_cores < len(here):
                found.warnings.append(f"{len(here)} ranks on {host} share {taken} and take turns: start fewer")
            else:
                found.problems.append(
                    f"ranks {ranks} on {host} are bound to {taken} of its {here[0].node_cores} and take turns: "
                    "srun --cpus-per-task=... --cpu-bind=cores"
                )


def _crowd(here: list[Seat]) -> list[Seat]:
    """The largest set of ranks of a node that share fewer cores than ranks; empty if there is none."""
    places = [set(seat.cores) for seat in here]
    crowds = []
    for place in [set().union(*places), *places]:
        crowd = [seat for seat, cores in zip(here, places, strict=True) if cores <= place]
        crowds += [crowd] if len(crowd) > len(place) else []
    return max(crowds, key=len, default=[])


def _time_all_reduce(world: World, found: Preflight) -> None:
    ones = torch.ones(ALL_REDUCE_BYTES // 4, device=world.device)
    times = []
    for _ in range(ROUNDS + 1):
        values = ones.clone()
        world.barrier()
        began = time.perf_counter()
        with world.control():
            dist.all_reduce(values)
        _finish(world)
        times.append(time.perf_counter() - began)
    if not world.sum(float((values == world.size).all())) == world.size:
        found.problems.append("an all-reduce of ones did not give the number of ranks: the network corrupts data")
    found.all_reduce_s = max(world.gather(statistics.median(times[1:])))  # the first one opens connections
    sent = wire_bytes("all_reduce", ALL_REDUCE_BYTES, world.size)
    found.bus_bytes_s = sent / found.all_reduce_s


def _time_pairs(world: World, only: set[tuple[int, int]] | None = None) -> list[tuple[int, int, float]]:
    """(rank, rank, bytes per second each way) of all pairs, or of those in `only`; the same on every rank."""
    rates = []
    for partner in partners(world.rank, world.size):
        world.barrier()  # rounds must not overlap, or two messages would share a rank's link
        if partner is not None and (only is None or _pair(world.rank, partner) in only):
            rates.append((world.rank, partner, _exchange(world, partner)))
    slower: dict[tuple[int, int], float] = {}
    for mine in world.gather(rates):
        for a, b, rate in mine:
            pair = _pair(a, b)
            slower[pair] = min(rate, slower.get(pair, rate))
    return [(a, b, rate) for (a, b), rate in sorted(slower.items())]


def _pair(a: int, b: int) -> tuple[int, int]:
    return min(a, b), max(a, b)


def partners(rank: int, size: int) -> Iterator[int | None]:
    """A rank's partner in each round of a round-robin tournament, None in a pause. It meets all others, up to
    MAX_PARTNERS."""
    seats = size + size % 2
    for turn in range(min(seats - 1, MAX_PARTNERS)):
        order = [0, *((place + turn) % (seats - 1) + 1 for place in range(seats - 1))]
        at = order.index(rank)
        partner = order[seats - 1 - at]
        yield partner if partner < size else None


def _exchange(world: World, partner: int) -> float:
    """Bytes per second each way, both ways at once."""
    nbytes = MESSAGE_BYTES[world.device.type]
    out = torch.zeros(nbytes, dtype=torch.uint8, device=world.device)
    back = torch.empty_like(out)
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        with world.control():
            both = [dist.P2POp(dist.isend, out, partner), dist.P2POp(dist.irecv, back, partner)]
            for work in dist.batch_isend_irecv(both):
                work.wait()
        _finish(world)
        times.append(time.perf_counter() - began)
    return nbytes / min(times)  # the first one opens a connection


def _usual(found: Preflight) -> dict[tuple[int, int], float]:
    """The usual bytes per second of each pair: of those like it; 0: there is nothing to compare it with."""
    count: Counter[str] = Counter()
    places = []  # each rank's number on its node
    for seat in found.seats:
        places.append(count[seat.host])
        count[seat.host] += 1
    alike: dict[object, dict[tuple[int, int], float]] = defaultdict(dict)
    for a, b, rate in found.pairs:
        inside = found.is_inside(a, b)
        on_gpus = inside and found.seats[a].device != "cpu"
        alike[(places[a], places[b]) if on_gpus else inside][a, b] = rate
    usual = {}
    for kind, rates in alike.items():
        most = _upper_quartile(rates.values())
        if isinstance(kind, tuple) and len(rates) == 2:  # two nodes: the faster one
            most = max(rates.values())
        elif isinstance(kind, tuple) and len(rates) == 1:  # a node alone: what its narrowest link would not explain
            most = _upper_quartile([rate for a, b, rate in found.pairs if found.is_inside(a, b)]) / LANES
        usual |= dict.fromkeys(rates, most)
    return usual


def _upper_quartile(rates: Collection[float]) -> float:
    """Not the median, because one slow rank may make half of all pairs slow; 0 for fewer than three."""
    return statistics.quantiles(rates, n=4)[2] if len(rates) > 2 else 0.0


def slow_links(found: Preflight) -> tuple[list[str], list[str]]:
    """(a line for each rank that is slow with most of its partners, a line for each other slow pair)"""
    ranks, pairs, usual = [], [], _usual(found)
    for inside in (True, False):
        rates = {(a, b): rate for a, b, rate in found.pairs if found.is_inside(a, b) == inside}
        slow = [pair for pair, rate in rates.items() if rate < SLOW * usual[pair]]
        where, named = "inside its node" if inside else "between nodes", set()
        for seat in found.seats:
            mine = {pair: rate for pair, rate in rates.items() if seat.rank in pair}
            if len(mine) > 1 and len(mine.keys() & set(slow)) > len(mine) / 2:
                named.add(seat.rank)
                others = statistics.median(usual[pair] for pair in mine)
                ranks.append(
                    f"rank {seat.rank} on {seat.host} sends {_rate(statistics.median(mine.values()))} {where}, the "
                    f"others {_rate(others)}: look at its network interface and binding, or leave the node out "
                    f"(sbatch --exclude={seat.host})"
                )
        pairs += [
            f"ranks {a} and {b} ({found.seats[a].host}, {found.seats[b].host}) exchange {_rate(rates[a, b])}, pairs "
            f"like them {_rate(usual[a, b])}: the link between them is slow"
            for a, b in slow
            if not {a, b} & named
        ]
    return ranks, pairs


def _time_product(world: World) -> float:
    """Seconds of a matrix product, the best of a few."""
    width = 4096 if world.device.type == "cuda" else 512
    matrix = torch.ones(width, width, device=world.device)
    world.barrier()
    times = []
    for _ in range(4):
        began = time.perf_counter()
        matrix @ matrix
        _finish(world)
        times.append(time.perf_counter() - began)
    return min(times)


def slow_devices(seats: list[Seat]) -> Iterator[str]:
    median = statistics.median(seat.product_s for seat in seats)
    for seat in seats:
        if len(seats) > 2 and seat.product_s * SLOW > median:
            yield (
                f"rank {seat.rank} on {seat.host} multiplies matrices {seat.product_s / median:.1f} times as slowly as "
                "the others: something else uses its device or cores"
            )


def _finish(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize()


def _rate(bytes_s: float) -> str:
    return f"{bytes_s / 2**20:,.0f} MiB/s"
