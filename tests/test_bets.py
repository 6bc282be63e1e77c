"""Lesson 11's bets: both sides choose among the same layouts, the best of all included."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from aiscale.plan.regret import Group, of_choice, published_groups

sys.path.append(str(Path(__file__).parents[1] / "notebooks"))
from instruments.bets import EIGHT, eight_of, regret_table, rules_table

GROUPS = [
    *published_groups("nanotron_sweep"),
    *published_groups("bloom_176b_topology_sweep"),
]


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.name)
def test_eight_layouts_hold_the_fastest_and_the_planners_choice_with_their_regret(group):
    job = eight_of(group)
    assert len(job.layouts) == min(EIGHT, len(set(group.layouts)))
    assert len(set(job.layouts)) == len(job.layouts)
    assert min(job.measured_s) == min(group.measured_s)
    assert job.planned == group.planned
    for layout in job.layouts:
        assert of_choice(job, layout) == of_choice(group, layout)


def test_the_table_says_what_a_choice_lost():
    job = eight_of(GROUPS[0])
    slowest = job.layouts[job.measured_s.index(max(job.measured_s))]
    line = regret_table({"a job": job}, {"a job": slowest}).splitlines()[-1]
    lost = max(job.measured_s) - min(job.measured_s)
    assert slowest in line and f"{lost:.3g} ({of_choice(job, slowest):.2f} x)" in line


def test_the_lesson_says_why_the_planner_lost():
    """A stall on 8 GPUs, tensor parallelism over two nodes on 512, and micro-batches of BLOOM."""
    jobs = {group.name: eight_of(group) for group in GROUPS}
    regrets = {name: of_choice(job, job.planned) for name, job in jobs.items()}
    assert regrets["32 layers, 8 GPUs, batch 256"] > 2.5
    assert regrets["32 layers, 64 GPUs, batch 256"] < 1.1
    assert "tp 16" in jobs["32 layers, 512 GPUs, batch 256"].planned
    bloom = jobs["13824 x 78, 384 GPUs, batch 2048"]
    one, two = (
        bloom.layouts.index(f"dp 8, tp 4, pp 12, zero 1, micro-batch {size}, recompute full")
        for size in (1, 2)
    )
    assert bloom.predicted_s[one] == pytest.approx(bloom.predicted_s[two], rel=0.03)
    assert bloom.measured_s[one] / bloom.measured_s[two] == pytest.approx(1.4, abs=0.05)


def test_rules_are_counted_within_a_tenth_of_the_best():
    """By hand: two layouts of four are within a tenth, one of the two with the least tp x pp."""
    names = ("tp 1, pp 1, a", "tp 1, pp 1, b", "tp 2, pp 1", "tp 2, pp 2")
    job = Group("a job", names, measured_s=(1.0, 2.0, 1.05, 3.0), predicted_s=(3.0, 2.0, 4.0, 1.0))
    lines = [line.strip("| ").split(" | ") for line in rules_table({"T": [job]}).splitlines()]
    assert lines[0] == ["within a tenth of the best", "T, 1 jobs"]
    assert dict(lines[2:]) == {
        "the planner's first": "0; the others 3.00 x",
        "the best of its first three": "1",
        "least tp x pp": "0.5",
        "any layout": "0.5",
    }


def test_the_lesson_says_what_the_rules_reach():
    rows = rules_table({"nanotron": published_groups("nanotron_sweep")}).splitlines()
    assert rows[3].endswith("| 12; the others 2.62 x, 3.69 x |")  # both on 512 GPUs
    assert rows[5].endswith("| 1.4 |")
