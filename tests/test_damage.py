"""A run never goes on silently from a damaged checkpoint: it goes back one, and says so."""

import hashlib
import json
import random
import shutil

import pytest

from damage import NEWEST, cut, flip_a_bit, resume_after_damage, train, train_whole
from ranks import forked

#: A flipped bit, a cut, a missing and a lengthened file.
SEEDS = (0, 2, 3, 4)
extended = pytest.mark.extended


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return folder, train_whole(folder)


@pytest.mark.parametrize(
    "seed", [seed if seed in SEEDS else pytest.param(seed, marks=extended) for seed in range(30)]
)
def test_any_damage_makes_the_run_go_back_one_checkpoint(seed, trained, tmp_path):
    folder, losses = trained
    assert resume_after_damage(folder, tmp_path / "run", seed=seed, losses=losses) == ""


def test_a_note_with_another_number_of_steps_is_damaged(trained, tmp_path):
    """One bit makes 2 of 6: the weights of six steps would learn steps 2 to 5 once more."""
    folder, losses = trained
    shutil.copytree(folder / "until6", tmp_path / "run")
    note = tmp_path / "run" / NEWEST / "note.json"
    note.write_text(note.read_text().replace('"steps": 6', '"steps": 2'))
    done = train(tmp_path / "run", steps=7)
    assert f"{NEWEST} is damaged (note.json is not what was written)" in done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines()] == ["4", "5", "6"]


def contents(folder):
    """{file: digest}, without the empty .lock."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_if_all_checkpoints_are_damaged_the_run_is_refused_and_nothing_changes(trained, tmp_path):
    shutil.copytree(trained[0] / "until6", tmp_path / "run")
    for path in (tmp_path / "run").glob("*/*.distcp"):
        cut(path, random.Random(0))
    before = contents(tmp_path / "run")
    done = train(tmp_path / "run", steps=7)
    assert done.returncode == 2, done.stderr
    *passed_over, last = done.stderr.splitlines()
    assert [line.partition(" is damaged")[0][-8:] for line in passed_over] == [
        "00000006",
        "00000004",
    ]
    assert "all checkpoints are damaged; start anew with another --save" in last
    assert contents(tmp_path / "run") == before


@extended
@pytest.mark.parametrize(
    ("trainer", "shard"),
    [
        ("fsdp", "*.distcp"),
        ("zero", "deepspeed/*optim_states.pt"),
        ("megatron", "*.distcp"),
        ("tp_pp", "*.distcp"),
    ],
)
def test_all_ranks_go_back_to_the_same_checkpoint(trainer, shard, tmp_path):
    options = ["--steps", "4", "--save-every", "2", "--save", str(tmp_path / "run")]
    options += ["--tp", "2", "--pp", "1"] if trainer in ("megatron", "tp_pp") else []
    command = ["-m", "aiscale", "train", trainer, "--nproc", "2", *options]
    whole = forked(command, timeout=600)
    assert whole.returncode == 0, whole.stderr
    newest = tmp_path / "run/00000004"
    assert json.loads((newest / "note.json").read_text())["steps"] == 4
    flip_a_bit(sorted(newest.glob(shard))[-1], random.Random(1))  # not rank 0's
    again = forked(command, timeout=600)
    assert again.returncode == 0, again.stderr
    assert "00000004 is damaged (" in again.stderr and again.stderr.count("going back") == 1
    lines = whole.stdout.splitlines()
    said = [line for line in again.stdout.splitlines() if " loss " in line]
    assert said == [line for line in lines if " loss " in line][2:]
