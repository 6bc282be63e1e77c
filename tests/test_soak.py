"""A disturbed job loses nothing, and a loss would be detected. `make soak` runs more rounds."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import damage
from soak.__main__ import Reference, difference, plan
from soak.testbed import KINDS, STEPS

ROOT = Path(__file__).parents[1]


@pytest.mark.extended
@pytest.mark.slurm
@pytest.mark.timeout(900)  # seconds on idle cores, minutes on busy ones
def test_a_run_that_is_disturbed_in_every_way_loses_nothing(tmp_path):
    paths = [str(ROOT / "tests"), str(ROOT / "launchers"), *filter(None, sys.path)]
    words = ["-m", "soak", "--rounds", "1", "--dir", str(tmp_path / "soak")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, *words], env=env, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *strikes, verdict = done.stdout.splitlines()
    assert verdict == "round 1: nothing lost" and len(strikes) >= len(KINDS), done.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("soak")
    assert damage.train(folder, steps=7).returncode == 0
    return folder


def test_the_same_run_differs_in_nothing(trained):
    assert difference(trained, Reference.of(trained)) == ""


def test_a_weight_off_by_its_last_bit_is_detected(trained):
    wanted = Reference.of(trained)
    name = random.Random(0).choice(sorted(wanted.weights))
    wanted.weights[name].view(-1)[-1:].view(torch.int32).bitwise_xor_(1)
    assert (
        difference(trained, wanted)
        == f"1 of {len(wanted.weights)} tensors of weights differ, {name} the first"
    )


def test_a_changed_loss_and_a_repeated_step_are_detected(trained):
    wanted = Reference.of(trained)
    wanted.losses[4] = (4, wanted.losses[4][1] + 1e-7)
    assert difference(trained, wanted) == "the loss differs from step 4 on"
    wanted.losses.insert(3, wanted.losses[2])
    assert difference(trained, wanted) == "metrics.jsonl has 7 steps, not each of 8 once, in order"


def test_rounds_differ_and_each_can_be_repeated():
    rounds = [plan(seed=0, number=number) for number in range(20)]
    assert rounds == [plan(seed=0, number=number) for number in range(20)]
    for events in rounds:
        assert sorted(event.kind for event in events) == sorted(KINDS)
        assert [event.step for event in events] == sorted({event.step for event in events})
        assert 0 < events[0].step and events[-1].step < STEPS - 10
    assert len({tuple(event.kind for event in events) for events in rounds}) > 10
    assert {event.rank for events in rounds for event in events} == {0, 1}
