"""What a rank has begun: groups by a short label, gloo's calls, NCCL's by torch's record."""

from __future__ import annotations

import time

from aiscale.measure.distributed.counter import Group, Progress, latest, members, message


def test_a_group_has_the_same_short_label_on_all_its_ranks():
    groups = {
        "dp 0-3": (0, 1, 2, 3),
        "dp 0-8/4": (0, 4, 8),
        "dp 0,3": (0, 3),
        "dp 5": (5,),
        "dp 1,9,10": (1, 9, 10),
    }
    for label, ranks in groups.items():
        assert Group("dp", ranks).label == label and members(label) == list(ranks)
    assert members(Group("a name", tuple(range(1000))).label) == list(range(1000))
    assert members(message(3, 5)) == [3, 5]


def test_progress_counts_by_group():
    progress = Progress()
    for _ in range(3):
        progress.begin("all_reduce", "w 0,1", 8)
    progress.begin("barrier", "w 0,1", 0)
    ((group, (number, op, nbytes, age_s, step)),) = progress.table().items()
    assert (group, number, op, nbytes, step) == ("w 0,1", 4, "barrier", 0, 0) and 0 <= age_s < 60


def test_nccls_started_collectives_are_read_from_its_flight_recorder():
    def record(number, name, group, seq, at_s, **more):
        sizes = {
            "input_sizes": [[1000]],
            "input_dtypes": ["Float"],
            "output_sizes": [[1000]],
            "output_dtypes": ["Float"],
        }
        what = {
            "record_id": number,
            "profiling_name": name,
            "process_group": group,
            "collective_seq_id": seq,
        }
        return {
            **what,
            **sizes,
            "time_created_ns": int((time.time() - at_s) * 1e9),
            "is_p2p": False,
            **more,
        }

    world, dp, twin = ("0", "default_pg"), ("1", "mesh_dp"), ("2", "mesh_dp")
    ranks = {"0": {"ranks": "[0, 1, 2, 3]"}, "1": {"ranks": "[1, 3]"}, "2": {"ranks": "[1, 3]"}}
    entries = [
        record(0, "nccl:all_reduce", world, 1, 900),
        record(1, "nccl:reduce_scatter", dp, 4, 500),
        record(2, "nccl:all_reduce", twin, 2, 400),
        record(3, "nccl:barrier", world, 2, 300),
        record(4, "nccl:send 1->3", world, 3, 200, is_p2p=True),
    ]
    found = latest({"pg_config": ranks, "entries": entries})
    assert {group: what[:3] for group, what in found.items()} == {
        "world 0-3": (2, "barrier", 0),
        "dp 1,3": (6, "all_reduce", 4000),
    }
    assert 299 < found["world 0-3"][3] < 360
    progress = Progress()
    progress.pull = lambda: found
    progress.begin("broadcast", "w 0,1", 8)
    assert set(progress.table()) == {"w 0,1", "world 0-3", "dp 1,3"}
    assert progress.table()["dp 1,3"][:3] == [
        6,
        "all_reduce",
        4000,
    ]
