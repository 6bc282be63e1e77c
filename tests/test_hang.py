"""A collective that hangs ends the job in time, and names the collective, the missing ranks and where each rank is."""

import json
import os
import signal
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import psutil
import pytest

from aiscale.distributed.counter import Group, Progress, latest, members, message
from aiscale.distributed.hangs import RankState, find
from aiscale.launch import HANG_STATUS
from ranks import begun, run_ranks, without_greetings

T = 6  #: seconds; a busy machine must not look like a hang
#: what ranks do after a few all-reduces; each scene ends in a wait for a rank that never comes
SCENES = {
    "sleeps": """
        if world.rank == 1:
            time.sleep(1000)
        dist.all_reduce(ones)
    """,
    "skips": """
        if world.rank != 2:
            dist.all_reduce(ones)
        dist.broadcast(ones, src=0)
    """,
    "chain": """
        pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
        world.barrier()
        if world.rank == 2:
            time.sleep(1000)
        if world.rank == 1:
            dist.recv(ones, src=2)
        dist.all_reduce(ones, group=pairs[0])
    """,
    "leaves": """
        stuck_s = 1000
        if world.rank == 1:
            watch.close()
            time.sleep(1000)
        dist.all_reduce(ones)
    """,
}
SCRIPT = f"""
import contextlib, time
from aiscale.distributed import watching
ones = torch.ones(1000)
stuck_s = 0
watch = contextlib.ExitStack()
watch.enter_context(watching(world, {T}, tell=lambda line: time.sleep(stuck_s)))
world.traffic.progress.step = 7
for i in range(3):
    dist.all_reduce(ones)
"""


def play(name, folder):
    done = run_ranks(SCRIPT + textwrap.dedent(SCENES[name]), 3, folder, timeout=100, strategy="ddp")
    return done.returncode, done.stderr


def train(folder):
    """A running training with short steps: (process, process ids of its ranks)."""
    settings = ("loop.steps=100000", "loop.eval_every=0", "parallel.strategy=ddp", "model.n_layer=1")
    options = ("--note-saved", folder / "saved")
    return begun(folder, "run", 2, *settings, f"loop.hang_timeout_s={T}", steps=2, options=options)


def stop_a_rank(victim, folder):
    job, pids = train(folder)
    os.kill(pids[victim], signal.SIGSTOP)
    _, err = job.communicate(timeout=100)
    return job.returncode, err + "a rank is left\n" * any(map(psutil.pid_exists, pids))


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """Scenes mostly wait, so several run at once."""
    jobs = {name: partial(play, name) for name in SCENES if name != "sleeps"}
    jobs |= {f"stops {victim}": partial(stop_a_rank, victim) for victim in (0, 1)}
    folders = {name: tmp_path_factory.mktemp(name.replace(" ", "_")) for name in jobs}
    with ThreadPoolExecutor(4) as lanes:
        ended = dict(zip(jobs, lanes.map(lambda name: jobs[name](folders[name]), jobs), strict=True))
    return ended, folders


def only_line(status, err) -> str:
    """The line that names the cause; one for each rank follows it."""
    line, *ranks = without_greetings(err).strip().splitlines()
    assert status == HANG_STATUS and [words.split()[:3] for words in ranks] == [
        ["aiscale:", "rank", str(rank)] for rank in range(len(ranks))
    ], (status, err)
    return line


def line_of(scene, played) -> str:
    return only_line(*played[0][scene])


def test_a_sleeping_rank_is_named_with_its_position_in_the_code(tmp_path):
    line = only_line(*play("sleeps", tmp_path))
    assert line.startswith("aiscale: all_reduce of 4,000 bytes in group world 0-2, number "), line
    assert f"begun in step 7, was not finished within {T} s: rank 1 did not come to it; rank 1 is in step 7 at " in line
    assert "ranks.py:" in line and "in <module>, its last one there was number" in line
    assert line.endswith(f"raise loop.hang_timeout_s above {T}")


@pytest.mark.extended
def test_a_rank_that_skips_a_collective_is_distinguished_from_a_slow_one(played):
    line = line_of("skips", played)
    assert "all_reduce of 4,000 bytes in group world 0-2" in line
    assert ": rank 2 did not come to it; rank 2 is in step 7" in line and ", broadcast; the job ends here" in line


@pytest.mark.extended
def test_in_a_chain_of_waiting_ranks_the_one_at_its_end_is_named(played):
    line = line_of("chain", played)
    assert "recv of 4,000 bytes from rank 2 to rank 1, number 1, begun in step 7" in line and ": rank 2 did" in line


@pytest.mark.extended
def test_a_rank_that_left_training_is_reported_even_if_no_file_can_be_written(played):
    assert "rank 1 did not come to it; rank 1 trains no more, its last one there was" in line_of("leaves", played)


@pytest.mark.extended
@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_rank_is_named_and_no_process_is_left(victim, played):
    line = line_of(f"stops {victim}", played)
    assert f": rank {victim} no longer answers: stopped, out of memory, or the node is gone; the job ends" in line
    assert "number" in line and f"was not finished within {T} s" in line


@pytest.mark.extended
def test_run_json_says_why_the_run_ended(played):
    note = json.loads((played[1]["stops 1"] / "run/run.json").read_text())
    assert note["status"] == "failed" and "rank 1 no longer answers" in note["error"]


@pytest.mark.extended
@pytest.mark.parametrize("victim", [0, 1])
def test_a_hang_is_noted_for_the_launcher_whichever_rank_is_missing(victim, played):
    """Slurm may report the status of the rank that it had to kill."""
    assert (played[1][f"stops {victim}"] / "saved").read_text() == "hung\n"


def entry(number, op="all_reduce", nbytes=8, age_s=100.0):
    return [number, op, nbytes, age_s, 3]


def test_a_group_has_the_same_short_label_on_all_its_ranks():
    groups = {"dp 0-3": (0, 1, 2, 3), "dp 0-8/4": (0, 4, 8), "dp 0,3": (0, 3), "dp 5": (5,), "dp 1,9,10": (1, 9, 10)}
    for label, ranks in groups.items():
        assert Group("dp", ranks).label == label and members(label) == list(ranks)
    assert members(Group("a name", tuple(range(1000))).label) == list(range(1000))
    assert members(message(3, 5)) == [3, 5]


def test_a_straggler_is_no_hang_before_the_time_out_and_equal_counts_never_are():
    ahead, behind = {"w 0,1": entry(2, age_s=9)}, {"w 0,1": entry(1, age_s=50)}
    assert find({0: RankState(begun=ahead), 1: RankState(begun=behind)}, timeout_s=10) is None
    assert find({0: RankState(begun=behind), 1: RankState(begun=behind)}, timeout_s=10) is None
    late = find({0: RankState(begun={"w 0,1": entry(2, age_s=11)}), 1: RankState(begun=behind)}, timeout_s=10)
    assert (late.waiting, late.missing) == ([0], [1])


def test_a_rank_that_began_to_wait_a_little_later_is_not_named():
    ranks = {
        0: RankState(begun={"w 0,1": entry(2, age_s=10.1)}),
        1: RankState(begun={"2>1": entry(1, "recv", age_s=9.7)}),
        2: RankState(),
    }
    hang = find(ranks, timeout_s=10)
    assert (hang.waiting, hang.missing) == ([1], [2]) and hang.text.startswith("recv of 8 bytes from rank 2 to rank 1")


def test_a_briefly_delayed_rank_is_neither_late_nor_dead():
    def found(**of_rank_1):
        late = RankState(begun={"w 0,1": entry(1)}, **of_rank_1)
        hang = find({0: RankState(begun={"w 0,1": entry(2)}), 1: late}, timeout_s=6)
        return hang and hang.text

    assert "rank 1 did not come to it" in found(age_s=1)
    assert found(age_s=5) is None
    assert "rank 1 no longer answers" in found(age_s=13)
    assert "rank 1 did not come to it; rank 1 trains no more" in found(age_s=13, left=True)


def test_a_rank_that_gives_other_bytes_than_most_is_named_where_all_must_give_the_same():
    def found(op, group, *nbytes):
        states = [RankState(begun={group: entry(2, op, each)}) for each in nbytes]
        return find(dict(enumerate(states)), timeout_s=10)

    assert found("all_reduce", "w 0-2", 8, 16, 8).missing == [1]
    assert found("all_to_all", "w 0-2", 8, 16, 8) is None  # ranks may send different amounts
    assert found("send", "0>1", 8, 16) is None


def test_of_a_silent_rank_and_a_late_one_the_silent_one_is_named():
    ranks = {rank: RankState(begun={"w 0-2": entry(1)}) for rank in range(3)}
    ranks[0] = RankState(begun={"w 0-2": entry(2)})
    ranks[1] = replace(ranks[1], age_s=100)
    hang = find(ranks, timeout_s=10)
    assert hang.missing == [1] and ": rank 1 no longer answers" in hang.text


def test_of_many_missing_ranks_eight_are_named_and_the_others_counted():
    behind = {rank: RankState(begun={"w 0-20": entry(1)}) for rank in range(1, 21)}
    hang = find({0: RankState(begun={"w 0-20": entry(2)}), **behind}, timeout_s=10)
    assert hang.missing == list(range(1, 21))
    assert ": ranks 1, 2, 3, 4, 5, 6, 7, 8 and 12 more did not come to it" in hang.text


def test_a_rank_receiving_from_any_source_is_not_considered_late():
    sender, receiver = {"0>1": entry(4, "send")}, {"*>1": entry(4, "recv")}
    assert find({0: RankState(begun=sender), 1: RankState(begun=receiver)}, timeout_s=10) is None


def test_no_rank_is_named_while_one_is_computing():
    ahead = RankState(begun={"w 0,1": entry(2)})
    assert find({0: ahead, 1: RankState(busy=True)}, timeout_s=10) is None
    assert find({0: ahead, 1: RankState(busy=True, age_s=100)}, timeout_s=10).missing == [1]


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
        what = {"record_id": number, "profiling_name": name, "process_group": group, "collective_seq_id": seq}
        return {**what, **sizes, "time_created_ns": int((time.time() - at_s) * 1e9), "is_p2p": False, **more}

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
    assert set(progress.table()) == {"w 0,1", "world 0-3", "dp 1,3"} and progress.table()["dp 1,3"][:3] == [
        6,
        "all_reduce",
        4000,
    ]
