"""A job that survives the death of a rank ends as an undisturbed one; with a planted fault it does not."""

import os
import random

import pytest

from aiscale.landscape import elastic
from aiscale.landscape.plans import first_plan, next_plan, template
from aiscale.processes import warm_up
from ranks import processes_with

#: fp64: sums in another order
EQUAL = 1e-12
#: kills at random places for each idea; AISCALE_KILLS=20 for the benchmark
KILLS = int(os.environ.get("AISCALE_KILLS", "5"))
#: what each idea may repeat, in steps: a rank may die after the commit and before its part of a checkpoint of two
REPEATED = {"bamboo": 0, "oobleck": 1, "varuna": 3, "restart": 3}


def test_plans_cover_all_layers_and_micro_batches():
    for idea in ("bamboo", "oobleck", "varuna"):
        sizes = {"layers": 6, "micro_batches": 6}
        plan = first_plan(idea, ranks=4, **sizes)
        for dead in range(4):
            for each in (plan, next_plan(idea, plan, [rank for rank in range(4) if rank != dead], **sizes)):
                assert sorted(m for share in each.shares for m in share) == list(range(6))
                assert all([n for stage in stages for n in stage.layers] == list(range(6)) for stages in each.pipelines)
    assert template(7, 3) == [(0, 1, 2), (3, 4), (5, 6)]
    two_and_one = next_plan("oobleck", first_plan("oobleck", ranks=4, **sizes), [0, 1, 3], **sizes)
    assert two_and_one.shares == ((0, 1, 2, 3), (4, 5)), "in proportion to a pipeline's ranks"


@pytest.fixture
def beside_an_undisturbed_job(monkeypatch, tmp_path):
    """run(idea, kills): each job with a kill, and how much it differs from one without. No process may be left."""
    warm_up(elastic._NEEDED, os.environ)  # the server of processes stays, without the mark
    monkeypatch.setenv("AISCALE_TEST_MARK", str(tmp_path))

    def run(idea, kills, fault=""):
        calm, *hit = elastic.run(
            [elastic.Scenario(idea), *(elastic.Scenario(idea, kill=kill, fault=fault) for kill in kills)]
        )
        assert calm.copies_differ == 0 and calm.steps_repeated == 0
        return [(each, elastic.difference(each, calm)) for each in hit]

    yield run
    assert not processes_with(str(tmp_path))


def test_bamboos_neighbour_finishes_the_step_of_a_killed_rank_bit_by_bit(beside_an_undisturbed_job):
    ((hit, difference),) = beside_an_undisturbed_job("bamboo", [(2, 3, 5)])
    assert difference == 0 and hit.steps_repeated == 0 and hit.copies_differ == 0
    (killed,) = (event for event in hit.events if event["event"] == "killed")
    seen_s, done_s = (
        {e["rank"]: e["at_s"] for e in hit.events if e["event"] == kind and e["step"] == 3}
        for kind in ("detected", "done")
    )
    assert (killed["rank"], killed["step"]) == (2, 3) and seen_s.keys() == done_s.keys() == {0, 1, 3}
    assert hit.detect_s == max(seen_s.values()) - killed["at_s"] > 0
    assert hit.recover_s == max(done_s.values()) - killed["at_s"] > hit.detect_s


@pytest.mark.extended
@pytest.mark.timeout(180 * max(KILLS, 5))
@pytest.mark.parametrize("idea", ["bamboo", "oobleck", "varuna", "restart"])
def test_jobs_with_a_rank_killed_at_random_end_equal(idea, beside_an_undisturbed_job):
    last = elastic.Scenario(idea, kill=(2, 5, 0)).places() - 1
    kills, draw = [(2, 5, last)] if idea != "restart" else [], random.Random(idea)  # after the last commit
    for _ in range(KILLS if idea != "restart" else 1):
        rank, step = draw.randrange(4), draw.randrange(6)
        kills.append((rank, step, draw.randrange(elastic.Scenario(idea, kill=(rank, step, 0)).places())))
    for hit, difference in beside_an_undisturbed_job(idea, kills):
        limit = 0 if idea in ("bamboo", "restart") else EQUAL
        assert difference <= limit and hit.copies_differ == 0, hit.scenario
        assert hit.steps_repeated <= REPEATED[idea], hit.scenario


@pytest.mark.extended
@pytest.mark.parametrize(
    ("idea", "fault"),
    [("bamboo", "reduction"), ("oobleck", "reduction"), ("oobleck", "moments"), ("varuna", "moments")],
)
def test_a_planted_fault_makes_a_survivors_job_differ(idea, fault, beside_an_undisturbed_job):
    ((_, difference),) = beside_an_undisturbed_job(idea, [(1, 3, 4)], fault)
    assert difference > 1e-4
