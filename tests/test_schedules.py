"""Orders of micro-batches in a pipeline: the formulas' are torch's own, and the traced steps'."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.pipelining import (
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from aiscale.plan import cost
from ranks import run_ranks

SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
}
SHAPES = [
    ("gpipe", 4, 8, 1),
    ("gpipe", 2, 3, 1),
    ("1f1b", 4, 8, 1),
    ("1f1b", 4, 4, 1),
    ("interleaved", 4, 8, 2),
    ("interleaved", 2, 4, 4),
    ("interleaved", 3, 6, 3),
    ("zero-bubble", 4, 8, 1),
    ("zero-bubble", 3, 3, 1),
]
FEW = [("1f1b", 4, 2, 1), ("gpipe", 5, 2, 1), ("zero-bubble", 4, 2, 1)]


@pytest.mark.parametrize(("schedule", "pp", "n_micro", "virtual_stages"), SHAPES + FEW)
def test_the_simulated_step_has_the_predicted_bubble(schedule, pp, n_micro, virtual_stages):
    events = cost.pipeline_timeline(
        schedule, pp, n_micro, virtual_stages, forward_s=1.0, backward_s=2.0
    )
    expected = cost.bubble(schedule, pp, n_micro, virtual_stages)
    assert cost.idle_share(events) == pytest.approx([expected] * pp)


def test_the_formulas_match_the_papers():
    assert cost.bubble("gpipe", 4, 8) == cost.bubble("1f1b", 4, 8) == 3 / 8
    assert cost.bubble("interleaved", 4, 8, 2) == 3 / 16
    assert cost.bubble("zero-bubble", 4, 8) == 1 / 8


def test_gpipe_holds_every_micro_batch_and_1f1b_at_most_the_remaining_stages():
    assert cost.in_flight("gpipe", 4, 8) == [8] * 4
    assert cost.in_flight("1f1b", 4, 8) == [4, 3, 2, 1]
    assert cost.in_flight("1f1b", 4, 2) == [2, 2, 2, 1]


@pytest.mark.parametrize(
    ("schedule", "pp", "n_micro", "virtual_stages"),
    # torch has no list of its order: see the traced steps
    [shape for shape in SHAPES if shape[0] != "1f1b"],
)
def test_the_schedules_order_equals_torchs(schedule, pp, n_micro, virtual_stages):
    kinds = {"FORWARD": "forward", "FULL_BACKWARD": "backward", "BACKWARD_INPUT": "backward"}
    kinds |= {"BACKWARD_WEIGHT": "weights"}
    pieces, ours = pp * virtual_stages, cost.schedule_order(schedule, pp, n_micro, virtual_stages)
    kind = SCHEDULES[schedule]
    stages = [
        SimpleNamespace(
            num_stages=pieces,
            group_size=pp,
            group_rank=0,
            is_last=False,
            submod=torch.nn.Identity(),
        )
        for _ in range(virtual_stages)
    ]
    torchs = kind(stages[0] if schedule == "gpipe" else stages, n_micro).pipeline_order
    for rank in range(pp):
        actions = [a for a in torchs[rank] if a is not None and a.computation_type.name in kinds]
        theirs = [
            cost.Work(kinds[a.computation_type.name], a.stage_index, a.microbatch_index)
            for a in actions
        ]
        assert ours[rank] == theirs


# The measured timeline ---------------------------------------------------------------------------

TRACED = """
import json
from instruments.trace import traced
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
torch.manual_seed(0)
x = torch.randn(8, 16)
for kind in (ScheduleGPipe, Schedule1F1B):
    stage = PipelineStage(torch.nn.Linear(16, 16), world.rank, 2, torch.device("cpu"))
    schedule = kind(stage, 8, loss_fn=torch.nn.functional.mse_loss)
    step = (lambda: schedule.step(x)) if world.rank == 0 else (lambda: schedule.step(target=x))
    events = world.gather(traced(step, forward_s=0.01, backward_s=0.02, steps=3))
    if world.rank == 0:
        say(json.dumps([event for mine in events for event in mine]))
"""


def test_a_traced_step_shows_all_work_in_the_order_of_the_schedule(tmp_path):
    done = run_ranks(TRACED, 2, tmp_path)
    assert done.returncode == 0, done.stderr
    for schedule, line in zip(("gpipe", "1f1b"), done.stdout.splitlines(), strict=True):
        events = [cost.Event(*event) for event in json.loads(line)]
        least = {"forward": 0.01, "backward": 0.02}
        for rank, order in enumerate(cost.schedule_order(schedule, 2, 8)):
            mine = [event for event in events if event.rank == rank]
            assert [(e.kind, e.name) for e in mine] == [(w.kind, str(w.micro_batch)) for w in order]
            assert all(a.end_s <= b.start_s for a, b in zip(mine, mine[1:], strict=False))
            assert all(event.end_s - event.start_s >= least[event.kind] for event in mine)
