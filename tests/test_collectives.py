"""Seconds of collectives on machines: held to measurements, and to what can pass the adapters."""

import dataclasses
import math

import pytest

from aiscale.errors import ConfigError
from aiscale.plan import cost, machines

A100 = machines.find_machine("dgx-a100")
H100 = machines.find_machine("dgx-h100")
FRONTIER = machines.find_machine("frontier")
KINDS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all", "send")


def seconds(kind, n_bytes, machine, **options):
    return cost.collective_seconds(kind, n_bytes, machine, **options).seconds


def bus_gb_s(n_bytes, machine, ranks):
    return (
        2
        * (ranks - 1)
        / ranks
        * n_bytes
        / seconds("all_reduce", n_bytes, machine, ranks=ranks)
        / 1e9
    )


def test_a_ring_over_whole_nodes_has_all_their_adapters_and_crosses_them_once():
    """4 GiB over 4 nodes of 8 H200 with 8 x 50 GB/s: 364.9 GB/s of bus bandwidth.
    NCCL takes its ring (stas00/ml-engineering@744d01e18b79, network). A rank with an eighth of the
    node and the whole ring's volume would give 50."""
    assert bus_gb_s(2**32, H100, 32) == pytest.approx(364.9, rel=0.05)
    assert cost.collective_seconds("all_reduce", 2**32, H100, ranks=32).algorithm == "ring"


@pytest.mark.parametrize(
    ("n_bytes", "measured", "within"),
    [
        (2**26, 197.8, 1.3),
        (2**28, 283.2, 1.1),
        (2**30, 366.0, 1.1),
        (2**34, 376.7, 1.1),
        (2**24, 71.8, 2.2),
    ],
)
def test_four_nodes_of_b200_take_about_as_long_as_measured(n_bytes, measured, within):
    """stas00/ml-engineering, network/benchmarks/README.md; 16 MiB is predicted too fast by 2."""
    ratio = bus_gb_s(n_bytes, machines.find_machine("dgx-b200"), 32) / measured
    assert 1 / within < ratio < within


def test_no_more_passes_an_adapter_than_it_carries():
    """What each node sends over the time stays below the nodes' adapters.
    It is so in a ring, an all-gather and all-to-all."""
    for kind in KINDS:
        for per_node, groups in ((8, 1), (4, 2), (1, 8)):
            n, S = 4 * per_node, 2**32
            one = seconds(kind, S, A100, ranks=n, per_node=per_node, simultaneous_groups=groups)
            leaving = {
                "all_reduce": 2 * (n - 1) / n,
                "all_to_all": per_node * (n - per_node) / n,
                "broadcast": 1,
                "reduce": 1,
                "send": 1,
            }.get(kind, (n - 1) / n)
            assert groups * leaving * S / one < A100.network.injection_bytes_s


def test_a_measured_curve_decides_inside_a_node():
    for n_bytes, gb_s in A100.node.bus_gb_s:
        assert bus_gb_s(n_bytes, A100, 8) == pytest.approx(gb_s, rel=0.01)
    assert seconds("all_gather", 2**30, A100, ranks=8) == pytest.approx(
        seconds("all_reduce", 2**30, A100, ranks=8) / 2
    )
    smallest = A100.node.bus_gb_s[0][0]
    assert seconds("all_reduce", 8, A100, ranks=8) == pytest.approx(
        seconds("all_reduce", smallest, A100, ranks=8)
    )
    largest, last_gb_s = A100.node.bus_gb_s[-1]
    assert bus_gb_s(8 * largest, A100, 8) == pytest.approx(last_gb_s, rel=0.01)


def test_one_figure_and_nccls_latencies_give_about_the_measured_curve():
    """8 x H200 up to 1 MiB, where NCCL takes a ring with the protocol LL; 4 x A100 of Stanage.
    The latter have an older NCCL."""
    ring_only = dataclasses.replace(H100, node=dataclasses.replace(H100.node, in_switch_gb_s=None))
    for n_bytes, measured in ((2**15, 3.15), (2**18, 24.68), (2**20, 74.57)):
        assert 0.7 < bus_gb_s(n_bytes, ring_only, 8) / measured < 1.4
    stanage = machines.find_machine("stanage-a100")
    one_figure = dataclasses.replace(stanage.node, bus_gb_s=((2**27, 206.5),))
    for n_bytes, measured_s in (
        (8, 15.29e-6),
        (2**18, 35.04e-6),
        (2**24, 188.7e-6),
        (2**27, 974.9e-6),
    ):
        predicted = seconds(
            "all_reduce", n_bytes, dataclasses.replace(stanage, node=one_figure), ranks=4
        )
        assert 0.39 < predicted / measured_s < 1.4


def test_switches_that_add_up_beat_every_ring_and_only_for_an_all_reduce():
    whole = cost.collective_seconds("all_reduce", 2**33, H100, ranks=8)
    assert whole.algorithm == "in-switch"
    assert bus_gb_s(2**33, H100, 8) > H100.node.ring_gb_s
    assert cost.collective_seconds("all_gather", 2**33, H100, ranks=8).algorithm == "ring"
    assert cost.collective_seconds("all_reduce", 2**33, H100, ranks=4).algorithm == "ring"


def test_between_two_nodes_switches_beat_the_ring_and_between_four_they_do_not():
    """2 nodes of 8 H100 with 8 x 400 Gb/s: about 470 GB/s.
    Sources: NVIDIA/nccl#2409, after NVIDIA/nccl-tests#309. 4 nodes of 8 H200: the ring 365,
    switches and a tree 310 (ml-engineering)."""
    two, four = (cost.collective_seconds("all_reduce", 2**33, H100, ranks=n) for n in (16, 32))
    assert (two.algorithm, four.algorithm) == ("in-switch", "ring")
    assert bus_gb_s(2**33, H100, 16) == pytest.approx(470, rel=0.1)


def test_small_messages_on_many_nodes_take_the_tree_and_large_ones_the_ring():
    small, large = (
        cost.collective_seconds("all_reduce", n, A100, ranks=256) for n in (2**16, 2**33)
    )
    assert (small.algorithm, small.bottleneck) == ("tree", "latency")
    assert (large.algorithm, large.bottleneck) == ("ring", "network adapters")


def test_two_devices_of_a_package_exchange_faster_than_strangers_and_direct_links_are_counted():
    mates, eight = (cost.collective_seconds("all_gather", 2**30, FRONTIER, ranks=n) for n in (2, 8))
    assert mates.seconds < eight.seconds / 4
    # 2 GPUs: 47.7 GB/s measured, 8: 312.9 (ml-engineering)
    mi300x = machines.find_machine("cosma8-mi300x")
    assert bus_gb_s(2**32, mi300x, 2) == pytest.approx(47.7, rel=0.05)
    assert bus_gb_s(2**32, mi300x, 8) == pytest.approx(312.9, rel=0.01)


def test_time_grows_with_bytes_and_one_rank_takes_none():
    for machine in (A100, H100, FRONTIER):
        for kind in KINDS:
            for n in (2, 8, 64):
                if kind == "send" and n > 2:
                    continue
                times = [seconds(kind, 2**k, machine, ranks=n) for k in range(10, 34)]
                assert times[-1] > times[0] > 0
                assert all(b >= 0.99 * a for a, b in zip(times, times[1:], strict=False))
            assert seconds(kind, 2**30, machine, ranks=1) == seconds(kind, 0, machine, ranks=2) == 0


def test_a_missing_figure_is_named_in_one_line():
    with pytest.raises(
        ConfigError, match=r"^no source of aurora tells node.bus_gb_s .*: measure it and add it to"
    ):
        seconds("all_reduce", 1e9, machines.find_machine("aurora"), ranks=12)
    with pytest.raises(ConfigError, match=r"^no source of jade2 tells network.nics: measure it"):
        seconds("all_reduce", 1e9, machines.find_machine("jade2"), ranks=64)
    assert math.isfinite(
        seconds("all_reduce", 1e9, machines.find_machine("aurora"), ranks=16, per_node=1)
    )
