"""`aiscale doctor`: a clear verdict, which names the rank at fault."""

import itertools
import json
import os
import subprocess
import sys

import pytest
import torch

from aiscale.cluster.local import find_mpiexec
from aiscale.hpc.doctor.node import find_plugin, node_cores
from aiscale.hpc.doctor.preflight import (
    Preflight,
    Seat,
    compare_seats,
    partners,
    preflight,
    slow_devices,
    slow_links,
)
from aiscale.processes import usable_cores
from ranks import aiscale

FAST, SLOW = 100e6, 20e6
#: `aiscale` with a library that prints a greeting on stdout as ranks connect, as gloo does up to torch 2.12
GREETED = """
import os, torch.distributed as dist
meet = dist.init_process_group
dist.init_process_group = lambda *args, **options: (os.write(1, b"[Gloo] connected\\n"), meet(*args, **options))
from aiscale.cli import main
raise SystemExit(main())
"""


@pytest.mark.alone
def test_a_healthy_machine_passes():
    done = aiscale("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "yes: this is ready to train"
    assert "2 on 1 node: an all-reduce of 16 MiB in" in " ".join(done.stdout.split())


def test_a_problem_fails_with_its_remedy(tmp_path):
    command = f"ulimit -n 200; exec {sys.executable} -m aiscale doctor --nproc 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert "200 open files" in done.stdout and "→ ulimit -n " in done.stdout
    assert done.stdout.splitlines()[-1] == "no: what is marked ✗ must be put right first"


@pytest.mark.extended
@pytest.mark.alone
def test_every_rank_of_a_job_is_measured_and_one_of_them_reports(tmp_path):
    command = [find_mpiexec(), "-n", "3", sys.executable, "-c", GREETED, "doctor", "--json", "--device", "cpu"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["ready"] and [seat["rank"] for seat in told["preflight"]["seats"]] == [0, 1, 2]
    assert [(a, b) for a, b, _ in told["preflight"]["pairs"]] == [(0, 1), (0, 2), (1, 2)]
    assert all(rate > 0 for _, _, rate in told["preflight"]["pairs"])
    (findings,) = told["nodes"].values()
    assert "packages" in [finding["name"] for finding in findings]


@pytest.mark.parametrize("size", range(2, 10))
def test_each_pair_of_ranks_meets_once_and_no_rank_has_two_partners_at_once(size):
    rounds = list(zip(*(partners(rank, size) for rank in range(size)), strict=True))
    for meeting in rounds:
        assert all(partner is None or meeting[partner] == rank for rank, partner in enumerate(meeting))
    met = [frozenset((rank, p)) for meeting in rounds for rank, p in enumerate(meeting) if p is not None and p > rank]
    assert len(met) == len(set(met)) == size * (size - 1) // 2


def measured(rate, hosts) -> Preflight:
    """The measurements of ranks on `hosts`; rate(a, b) in bytes per second."""
    seats = [Seat(rank, host, "cpu", [rank], 8) for rank, host in enumerate(hosts)]
    pairs = [(a, b, rate(a, b)) for a, b in itertools.combinations(range(len(hosts)), 2)]
    return Preflight(seats, pairs=pairs)


@pytest.mark.parametrize("size", [3, 4, 8])
def test_a_slow_rank_is_named_and_not_its_partners(size):
    found = measured(lambda a, b: SLOW if 2 in (a, b) else FAST, [f"node{i}" for i in range(size)])
    (problem,), [] = slow_links(found)
    assert problem.startswith("rank 2 on node2 sends 19 MiB/s between nodes, the others 95 MiB/s: look at its network")


def test_a_slow_link_is_reported_with_both_ends():
    found = measured(lambda a, b: SLOW if (a, b) == (1, 3) else FAST, [f"node{i}" for i in range(5)])
    [], (warning,) = slow_links(found)
    assert warning.startswith("ranks 1 and 3 (node1, node3) exchange 19 MiB/s, pairs like them 95 MiB/s")


def test_links_between_nodes_are_not_compared_with_links_within_a_node():
    hosts = ["a", "a", "a", "b", "b", "b"]
    assert slow_links(measured(lambda a, b: FAST if hosts[a] == hosts[b] else SLOW, hosts)) == ([], [])


#: GB/s between the GCDs of a node with MI250X by design: four links within a package, one or two to some others, and
#: two hops to the rest (OLCF's guide: 200, 50 to 100)
MI250X = {(0, 1): 200, (2, 3): 200, (4, 5): 200, (6, 7): 200, (0, 6): 100, (1, 7): 50, (2, 4): 100, (3, 5): 50}
MI250X |= {(0, 2): 50, (1, 3): 100, (4, 6): 50, (5, 7): 100, (1, 5): 50, (3, 7): 50}


def on_frontier(nodes: int, broken: tuple[int, int] = (-1, -1)) -> Preflight:
    """Nodes of 8 GCDs; the link between the ranks `broken` has lost three quarters of its rate."""

    def rate(a: int, b: int) -> float:
        inside = MI250X.get((a % 8, b % 8), 25) if a // 8 == b // 8 else 20
        return inside * 1e9 * (0.25 if (a, b) == broken else 1)

    found = measured(rate, [f"node{rank // 8}" for rank in range(8 * nodes)])
    for seat in found.seats:
        seat.device = f"gpu{seat.rank % 8}"
    return found


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_a_healthy_node_whose_gpus_have_links_of_different_width_passes(nodes):
    assert slow_links(on_frontier(nodes)) == ([], [])


@pytest.mark.parametrize("nodes", [2, 4])
@pytest.mark.parametrize("pair, rate", [((8, 9), "47,684"), ((9, 15), "11,921"), ((8, 11), "5,960")])
def test_one_bad_link_inside_a_node_is_named_by_comparing_it_with_other_nodes(nodes, pair, rate):
    [], (warning,) = slow_links(on_frontier(nodes, pair))
    a, b = pair
    assert warning.startswith(f"ranks {a} and {b} (node1, node1) exchange {rate} MiB/s, pairs like them ")


def test_pairs_that_were_briefly_slow_are_measured_again(monkeypatch):
    module = sys.modules["aiscale.hpc.doctor.preflight"]
    rounds = []

    def time_pairs(world, only=None):
        rounds.append(only)
        pairs = only or set(itertools.combinations(range(4), 2))
        return [(a, b, SLOW if (a, b) == (0, 2) or ((a, b) == (1, 3) and not only) else FAST) for a, b in sorted(pairs)]

    monkeypatch.setattr(module, "_time_pairs", time_pairs)
    monkeypatch.setattr(module, "_time_all_reduce", lambda *_: None)
    monkeypatch.setattr(module, "_time_product", lambda world: 1.0)
    world = type("World", (), {"size": 4, "rank": 0, "device": torch.device("cpu")})()
    seats = [Seat(rank, "a", "cpu", [rank], 8) for rank in range(4)]
    world.gather = lambda value: list(seats) if isinstance(value, Seat) else [value] * 4
    found = preflight(world)
    assert rounds == [None, {(0, 2), (1, 3)}] and not found.problems
    assert [line.partition(" exchange")[0] for line in found.warnings] == ["ranks 0 and 2 (a, a)"]


def test_ranks_that_share_a_gpu_are_named():
    seats = [("a", "gpu1", [0]), ("a", "gpu1", [1]), ("b", "gpu1", [0])]
    found = Preflight([Seat(rank, *seat, 8) for rank, seat in enumerate(seats)])
    compare_seats(found)
    assert found.problems == ["ranks 0, 1 on a share one GPU: srun --gpus-per-task=1 --gpu-bind=closest"]


@pytest.mark.parametrize(
    "cores, told",
    [
        ([[0], [0], [1, 2]], "ranks 0, 1 on a are bound to 1 core of its 4"),
        ([[0, 1]] * 3 + [[0, 1, 2, 3]], "ranks 0, 1, 2 on a are bound to 2 cores of its 4"),
        ([[0, 1, 2]] * 3, ""),
    ],
)
def test_ranks_bound_to_fewer_cores_than_there_are_for_them_are_a_problem(cores, told):
    found = Preflight([Seat(rank, "a", "cpu", own, 4) for rank, own in enumerate(cores)])
    compare_seats(found)
    assert [line.partition(" and take turns")[0] for line in found.problems] == [told] * bool(told)
    assert not found.warnings and not found.takes_turns(), "then slow links are a problem too"


def test_fewer_cores_than_ranks_on_a_node_is_a_warning():
    found = Preflight([Seat(rank, "a", "cpu", [0, 1], 2) for rank in range(4)])
    compare_seats(found)
    assert not found.problems and found.warnings == ["4 ranks on a share 2 cores and take turns: start fewer"]
    assert found.takes_turns(), "links that look slow are then no reason to stop a job"


def test_virtual_nodes_that_share_a_machine_share_its_cores():
    def takes_turns(machines, cores) -> bool:
        seats = [
            Seat(rank, f"node{rank // 4}", "cpu", own, 4, machine=machines[rank // 4]) for rank, own in enumerate(cores)
        ]
        return Preflight(seats).takes_turns()

    every, bound = [list(range(4))] * 8, [[rank] for rank in range(8)]
    assert takes_turns(["one", "one"], every)
    assert not takes_turns(["one", "other"], every) and not takes_turns(["", ""], every)
    assert not takes_turns(["one", "one"], bound), "containers that share no core"


def test_a_slow_device_is_named():
    seats = [Seat(rank, "a", "cpu", [rank], 8, product_s=0.03 if rank == 1 else 0.01) for rank in range(4)]
    (warning,) = slow_devices(seats)
    assert warning.startswith("rank 1 on a multiplies matrices 3.0 times as slowly as the others")


def test_nccls_plugin_is_found_on_the_library_path(tmp_path):
    (tmp_path / "librccl-net.so").touch()
    assert find_plugin({"LD_LIBRARY_PATH": f"/nowhere:{tmp_path}"}) == tmp_path / "librccl-net.so"
    assert find_plugin({"LD_LIBRARY_PATH": "/nowhere"}) is None


def test_the_cores_of_a_node_are_those_of_the_container(monkeypatch):
    module = sys.modules["aiscale.hpc.doctor.node"]
    monkeypatch.setattr(module, "_read", lambda path: "0-3,8,10-11" if "cpuset" in str(path) else "")
    assert node_cores() == 7
    monkeypatch.setattr(module, "_read", lambda path: "")
    assert node_cores() == os.cpu_count() >= len(usable_cores())


def test_a_single_rank_skips_the_link_checks():
    from aiscale.distributed import connect

    found = preflight(connect("cpu"))
    assert (found.pairs, found.problems, len(found.seats)) == ([], [], 1)
    assert found.seats[0].product_s > 0
