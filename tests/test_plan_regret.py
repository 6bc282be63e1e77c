"""Stalls and regret: what they are by hand, and what the planner says of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aiscale.errors import ConfigError
from aiscale.plan import published
from aiscale.plan.answer import plan
from aiscale.plan.constants import CONSTANTS, SCOREBOARD, constants
from aiscale.plan.hardware import platform
from aiscale.plan.layout import PROGRAMS, Layout, Shape
from aiscale.plan.regret import RIGHT, Group, of_choice, published_groups, summary
from aiscale.plan.stalls import neighbourhood
from aiscale.plan.step import step_seconds

ON = platform("h100-sxm5-80gb", node_gbit_s=3200.0)
GPT = Shape(layers=32, hidden=4096, heads=32, ffn=14336, gated=True, vocab=131072, seq=4096)
WIDE = Layout(dp=64, tp=2, pp=4, global_batch=256, software=PROGRAMS["nanotron"])


def test_regret_is_the_chosen_runs_time_over_the_best_ones():
    group = Group("small", ("a", "b", "c", "b"), (2.0, 3.0, 4.0, 2.5), (1.0, 0.9, 2.0, 0.9))
    assert group.planned == "b" and of_choice(group, "b") == pytest.approx(1.25)
    assert of_choice(group, "a") == 1.0
    assert summary([1.0, 1.05, 2.0]) == {"groups": 3, "right": 2, "worst": 2.0}
    with pytest.raises(ConfigError, match="'d' was not measured for small"):
        of_choice(group, "d")


def test_the_stored_groups_have_the_regret_that_the_scoreboard_states():
    stored = published.measured("planner")
    for source in stored["choices"]:
        groups = published_groups(source)
        regrets = [of_choice(group, group.planned) for group in groups]
        right = sum(value <= RIGHT for value in regrets)
        assert f"{right} of {len(groups)} groups of {source}" in " ".join(SCOREBOARD["lines"])
        assert stored["regret"][source]["worst"] == pytest.approx(max(regrets), abs=1e-3)


def test_a_plan_says_when_others_stalled_in_such_a_layout():
    found = neighbourhood(WIDE, ON)
    assert (found.nodes, found.pipeline, found.replicas) == (64, True, 32)
    assert found.share > 0.5
    answer = plan(GPT, WIDE, ON)
    assert f"{found.stalled} of {found.runs} published runs of nanotron" in answer.cautions[0]
    other = plan(GPT, replace(WIDE, software=PROGRAMS["megatron"]), ON)
    assert other.stalls is None and not other.cautions


def test_a_pipeline_waits_for_its_neighbours_only_where_most_of_its_program_did():
    c, without = constants(neighbour_wait_s=0.5), constants(neighbour_wait_s=0)

    def waits_s(layout):
        return step_seconds(GPT, layout, ON, c).total_s - (
            step_seconds(GPT, layout, ON, without).total_s
        )

    assert waits_s(WIDE) == pytest.approx(0.5 * 2 * WIDE.micro_batches)
    assert waits_s(replace(WIDE, dp=8)) == 0
    assert waits_s(replace(WIDE, dp=256, pp=1)) == 0
    assert waits_s(replace(WIDE, software=PROGRAMS["megatron"])) == 0
    assert CONSTANTS.neighbour_wait_s > 0.3
