"""A disturbed job loses nothing, and a loss would be detected. make soak runs more rounds, in two more ways."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from soak import KINDS, SoakError, damage, plan
from soak.journal import Journal
from soak.plan import STEPS
from soak.rounds import Reference, difference


def soak(*words: str, **options) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}
    return subprocess.run([sys.executable, "-m", "soak", *words], env=env, capture_output=True, text=True, **options)


@pytest.mark.extended
@pytest.mark.slurm
@pytest.mark.timeout(900)  # seconds on idle cores, minutes on busy ones
def test_preemption_and_a_dead_node_lose_nothing(tmp_path):
    words = ("--rounds", "1", "--variants", "1", "--kinds", "preempt,down", "--dir", str(tmp_path / "soak"))
    done = soak(*words, timeout=900)
    assert done.returncode == 0, done.stderr
    assert "nothing lost" in done.stderr
    assert [line.split()[-2:] for line in done.stdout.splitlines()[:2]] == [["1", "times"]] * 2, done.stdout
    assert not list(tmp_path.glob("soak/testbed*/runs/round-*"))  # removed because nobody needs them


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("soak")
    damage.train_whole(folder)
    return folder / "tiny"


def test_the_same_run_differs_in_nothing(trained):
    assert difference(trained, Reference.of(trained)) == ""


def test_a_weight_off_by_its_last_bit_is_detected(trained):
    wanted = Reference.of(trained)
    name = random.Random(0).choice(sorted(wanted.weights))
    wanted.weights[name].view(-1)[-1:].view(torch.int32).bitwise_xor_(1)
    assert difference(trained, wanted) == f"1 of {len(wanted.weights)} tensors of weights differ, {name} the first"


def test_a_changed_loss_and_a_repeated_step_are_detected(trained):
    wanted = Reference.of(trained)
    wanted.losses[3] = (4, wanted.losses[3][1] + 1e-7)
    assert difference(trained, wanted) == "the loss differs from step 4 on"
    wanted.losses.insert(3, wanted.losses[2])
    assert difference(trained, wanted) == "metrics.jsonl has 6 steps, not each of 1 to 7 once, in order"


def test_rounds_differ_and_each_can_be_repeated():
    rounds = [plan(seed=0, number=number) for number in range(20)]
    assert rounds == [plan(seed=0, number=number) for number in range(20)]
    for events in rounds:
        assert sorted(event.kind for event in events) == sorted(KINDS)
        assert [event.step for event in events] == sorted({event.step for event in events})
        assert 0 < events[0].step and events[-1].step < STEPS - 10
    assert len({tuple(event.kind for event in events) for events in rounds}) > 10
    assert {event.rank for events in rounds for event in events} == {0, 1}


ABOUT, WANTED = {"seed": 0}, {"round": [1, 2], "damage": [0]}


def test_an_interrupted_soak_resumes_and_a_finished_one_starts_anew(tmp_path):
    journal = Journal.open(tmp_path / "soak", ABOUT, WANTED)
    journal.add("damage", 0, wrong="")
    journal.add("round", 2, wrong="")
    with (tmp_path / "soak/journal.jsonl").open("a") as file:
        file.write('{"what": "round", "num')  # killed while writing
    with pytest.raises(SoakError, match="soak is in use by another soak: wait for it, or name another folder"):
        Journal.open(tmp_path / "soak", ABOUT, WANTED)
    journal.file.close()
    again = Journal.open(tmp_path / "soak", ABOUT, WANTED)
    assert list(again.entries) == [("damage", 0), ("round", 2)]
    again.add("round", 1, wrong="")
    again.file.close()
    assert not Journal.open(tmp_path / "soak", ABOUT, WANTED).entries


def test_other_seeds_other_code_and_a_fresh_start_do_not_resume(tmp_path, monkeypatch):
    def entries(about: dict, **options) -> int:
        journal = Journal.open(tmp_path / "soak", about, WANTED, **options)
        found = len(journal.entries)
        journal.add("round", 1, wrong="")
        journal.file.close()
        return found

    assert entries(ABOUT) == 0 and entries(ABOUT) == 1
    assert entries({"seed": 1}) == 0 and entries({"seed": 1}) == 1
    assert entries({"seed": 1}, fresh=True) == 0
    monkeypatch.setattr("soak.journal._fingerprint", lambda: "another")
    assert entries({"seed": 1}) == 0


def test_an_unrelated_folder_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("\\begin")
    with pytest.raises(SoakError, match="has files, but none of a soak: name another folder by --dir"):
        Journal.open(tmp_path, ABOUT, WANTED)
    assert (tmp_path / "thesis.tex").exists()
