"""Which rank a job waits for, by what all ranks have begun. A hanging job: test_trainers.py."""

from __future__ import annotations

import subprocess
import sys

from aiscale.train.watch import find_missing

WORLD = "0"
SUM = "gloo:all_reduce", [[8]]


def table(number: int, name: str = SUM[0], sizes=None) -> dict:
    return {WORLD: [number, name, sizes or SUM[1]]}


def found(mine: dict, others: list[dict], silent=()) -> dict | None:
    """{rank: why} by rank 0, which has begun `mine`."""
    answer = find_missing(mine, dict(enumerate([mine, *others])), set(silent))
    return answer and answer[1]


def test_a_rank_that_has_begun_fewer_collectives_is_named():
    assert found(table(4), [table(4), table(3)]) == {2: "has begun 3 of 4 collectives"}


def test_a_rank_in_another_collective_or_with_other_sizes_is_named():
    assert found(table(4), [table(4, "gloo:barrier"), table(4)]) == {
        1: "is in gloo:barrier of [[8]]"
    }
    assert found(table(4), [table(4), table(4, sizes=[[16]])]) == {
        2: "is in gloo:all_reduce of [[16]]"
    }


def test_of_a_silent_rank_and_a_late_one_both_are_told():
    answer = found(table(4), [table(4), table(3)], silent=[1])
    assert answer == {1: "no longer answers", 2: "has begun 3 of 4 collectives"}


def test_nobody_is_named_where_all_have_begun_the_same_or_this_rank_is_the_late_one():
    assert found(table(4), [table(4), table(4)]) is None
    assert found(table(3), [table(4), table(4)]) is None
    assert found(table(4), [{}, table(4)]) is None, "rank 1 is in no group of this one"


ENDS = """
import atexit
import threading
import torch.distributed as dist
from aiscale.train import watch

def say():
    print([thread.name for thread in threading.enumerate()])

atexit.register(say)  # Python calls it last
store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
watch.watch(0.0)
dist.destroy_process_group()
"""


def test_a_rank_ends_its_watch_before_python_ends():
    """In the store at that time, the thread would abort the rank."""
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, timeout=300, text=True)
    assert (done.stdout, done.returncode) == ("['MainThread']\n", 0), done.stderr
