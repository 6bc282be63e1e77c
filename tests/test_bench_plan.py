"""The planner against steps of our own on slowed links: the bytes are exact, and a wrong plan misses its checks."""

import json

import pytest

from aiscale.bench import plan
from aiscale.bench.nodes import why_no_nodes
from ranks import aiscale


@pytest.mark.extended
@pytest.mark.skipif(bool(why_no_nodes()), reason=why_no_nodes() or "-")
def test_every_rank_holds_the_planned_bytes_and_the_link_slows_each_step():
    done = aiscale("bench", "plan", "--quick", "--json", timeout=300)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["name"] for row in rows] == list(plan.CASES)
    for row in rows:
        assert row["held_bytes"] == row["predicted_bytes"] and len(row["held_bytes"]) == plan.RANKS
        assert row["predicted_s"] > row["compute_s"] and row["step_s"] > row["compute_s"]


def test_a_step_that_the_planner_misses_by_a_fifth_and_a_byte_too_many_fail_the_benchmark():
    case = plan.CASES["ddp"]
    held = plan.compare("ddp", {"0": [0.1], "100": [1.0]}, [])[0]["predicted_bytes"]
    parameters = case.run().model
    assert held[0]["parameters"] == held[3]["parameters"] == 4 * plan.shape_of(parameters, 128).parameters
    (row,) = plan.compare("ddp", {"0": [0.1], "100": [1.0]}, held)
    row["step_s"] = row["predicted_s"] * 1.1
    rows = [{**row, "name": name} for name in plan.CASES]
    assert all(check["met"] for check in plan.checks(rows))
    rows[0]["step_s"] = rows[0]["predicted_s"] * 1.25
    rows[1]["held_bytes"] = [dict(held[0], gradients=held[0]["gradients"] + 1), *held[1:]]
    missed = [check["name"] for check in plan.checks(rows) if not check["met"]]
    assert missed == ["ddp at 100 Mbit/s: step, off by", "fsdp: bytes held, off by"]


@pytest.mark.parametrize("name", plan.CASES)
def test_on_a_link_without_limits_the_planned_step_is_the_one_that_told_the_speed(name):
    (row,) = plan.compare(name, {"0": [0.5], "1000000000": [0.5]}, [])
    assert row["predicted_s"] == pytest.approx(0.5, rel=1e-3)
