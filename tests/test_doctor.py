"""`aiscale doctor`: a yes or a no, and the rank that is to blame by name."""

import itertools
import json
import os
import subprocess
import sys

import pytest
import torch

from aiscale.doctor import Finding, Preflight, preflight
from aiscale.doctor.command import alike
from aiscale.doctor.node import find_plugin, write_rate
from aiscale.doctor.preflight import Seat, _compare_seats, _slow_devices, _slow_links, partners
from aiscale.verify.rungs import find_mpiexec
from ranks import aiscale

FAST, SLOW = 100e6, 20e6


@pytest.mark.alone
def test_a_good_machine_is_told_yes():
    done = aiscale("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "yes: this is ready to train"
    assert "2 on 1 node: an all-reduce of 16 MiB in" in " ".join(done.stdout.split())


def test_what_is_wrong_ends_in_a_no_with_its_remedy(tmp_path):
    command = f"ulimit -n 200; exec {sys.executable} -m aiscale doctor --nproc 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert "200 open files" in done.stdout and "→ ulimit -n " in done.stdout
    assert done.stdout.splitlines()[-1] == "no: what is marked ✗ must be put right first"


@pytest.mark.alone
def test_every_rank_of_a_job_is_measured_and_one_of_them_reports(tmp_path):
    command = [find_mpiexec(), "-n", "3", sys.executable, "-m", "aiscale", "doctor", "--json", "--device", "cpu"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["ready"] and [seat["rank"] for seat in told["preflight"]["seats"]] == [0, 1, 2]
    assert [(a, b) for a, b, _ in told["preflight"]["pairs"]] == [(0, 1), (0, 2), (1, 2)]
    assert all(rate > 0 for _, _, rate in told["preflight"]["pairs"])
    (findings,) = told["nodes"].values()
    assert "packages" in [finding["name"] for finding in findings]


def test_a_number_of_ranks_below_one_is_refused():
    done = aiscale("doctor", "--nproc", "0")
    assert (done.returncode, done.stderr) == (2, "aiscale: --nproc is 0: it must be at least 1\n")


@pytest.mark.parametrize("size", range(2, 10))
def test_everyone_meets_everyone_once_and_nobody_two_at_a_time(size):
    rounds = list(zip(*(partners(rank, size) for rank in range(size)), strict=True))
    for meeting in rounds:
        assert all(partner is None or meeting[partner] == rank for rank, partner in enumerate(meeting))
    met = [frozenset((rank, p)) for meeting in rounds for rank, p in enumerate(meeting) if p is not None and p > rank]
    assert len(met) == len(set(met)) == size * (size - 1) // 2


def measured(rate, hosts) -> Preflight:
    """What ranks on `hosts` would have measured; rate(a, b) bytes a second."""
    seats = [Seat(rank, host, "cpu", [rank]) for rank, host in enumerate(hosts)]
    pairs = [(a, b, rate(a, b)) for a, b in itertools.combinations(range(len(hosts)), 2)]
    return Preflight(seats, pairs=pairs)


@pytest.mark.parametrize("size", [3, 4, 8])
def test_a_slow_rank_is_named_and_not_its_partners(size):
    found = measured(lambda a, b: SLOW if 2 in (a, b) else FAST, [f"node{i}" for i in range(size)])
    (problem,), [] = _slow_links(found)
    assert problem.startswith("rank 2 on node2 sends 19 MiB/s between nodes, the others 95 MiB/s: look at its network")


def test_a_slow_link_is_named_by_both_its_ends():
    found = measured(lambda a, b: SLOW if (a, b) == (1, 3) else FAST, [f"node{i}" for i in range(5)])
    [], (warning,) = _slow_links(found)
    assert warning.startswith("ranks 1 and 3 (node1, node3) exchange 19 MiB/s, pairs like them 95 MiB/s")


def test_links_between_nodes_are_not_held_to_those_within():
    hosts = ["a", "a", "a", "b", "b", "b"]
    assert _slow_links(measured(lambda a, b: FAST if hosts[a] == hosts[b] else SLOW, hosts)) == ([], [])


def test_pairs_that_were_slow_for_a_moment_are_measured_again(monkeypatch):
    module = sys.modules["aiscale.doctor.preflight"]  # the package has a function of this name

    rounds = []

    def time_pairs(world, only=None):
        rounds.append(only)
        pairs = only or set(itertools.combinations(range(4), 2))
        return [(a, b, SLOW if (a, b) == (0, 2) or ((a, b) == (1, 3) and not only) else FAST) for a, b in sorted(pairs)]

    monkeypatch.setattr(module, "_time_pairs", time_pairs)
    monkeypatch.setattr(module, "_time_all_reduce", lambda *_: None)
    monkeypatch.setattr(module, "_time_product", lambda world: 1.0)
    world = type("World", (), {"size": 4, "rank": 0, "device": torch.device("cpu")})()
    seats = [Seat(rank, "a", "cpu", [rank]) for rank in range(4)]
    world.gather = lambda value: list(seats) if isinstance(value, Seat) else [value] * 4
    found = preflight(world)
    assert rounds == [None, {(0, 2), (1, 3)}] and not found.problems
    assert [line.partition(" exchange")[0] for line in found.warnings] == ["ranks 0 and 2 (a, a)"]


def test_ranks_that_share_a_gpu_or_a_core_are_named():
    found = Preflight([Seat(0, "a", "gpu1", [0]), Seat(1, "a", "gpu1", [1]), Seat(2, "b", "gpu1", [0])])
    _compare_seats(found)
    assert found.problems == ["ranks 0, 1 on a share one GPU: srun --gpus-per-task=1 --gpu-bind=closest"]
    found = Preflight([Seat(0, "a", "cpu", [0]), Seat(1, "a", "cpu", [0]), Seat(2, "a", "cpu", [1, 2])])
    _compare_seats(found)
    assert found.problems == ["ranks 0, 1 on a are bound to the one core 0: srun --cpu-bind=cores"]
    found = Preflight([Seat(rank, "a", "cpu", [0, 1]) for rank in range(4)])
    _compare_seats(found)
    assert not found.problems and found.warnings[0].startswith("4 ranks on a share 2 cores and take turns")
    assert found.takes_turns(), "links that look slow are then no reason to stop a job"


def test_a_slow_device_is_named():
    seats = [Seat(rank, "a", "cpu", [rank], product_s=0.03 if rank == 1 else 0.01) for rank in range(4)]
    (warning,) = _slow_devices(seats)
    assert warning.startswith("rank 1 on a multiplies matrices 3.0 times as slowly as the others")


def test_findings_that_nodes_share_are_told_once():
    good, bad = Finding("memory", "ok", "8 GiB"), Finding("memory", "wrong", "1 GiB", "more")
    assert alike({"a": [good], "b": [good], "c": [bad]}) == [(good, "a, b"), (bad, "c")]
    assert alike({"a": [good], "b": [good]}) == [(good, "")]


def test_the_plugin_of_nccl_is_found_on_the_library_path(tmp_path):
    (tmp_path / "librccl-net.so").touch()
    assert find_plugin({"LD_LIBRARY_PATH": f"/nowhere:{tmp_path}"}) == tmp_path / "librccl-net.so"
    assert find_plugin({"LD_LIBRARY_PATH": "/nowhere"}) is None


def test_measuring_a_disk_leaves_nothing_there(tmp_path):
    assert write_rate(tmp_path, 2**20) > 0
    assert list(tmp_path.iterdir()) == []


def test_one_rank_has_nobody_to_talk_to():
    from aiscale.dist import connect

    found = preflight(connect("cpu"))
    assert (found.pairs, found.problems, len(found.seats)) == ([], [], 1)
    assert found.seats[0].product_s > 0
