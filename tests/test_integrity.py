"""A run never resumes silently from a damaged checkpoint: it falls back to an older one and says so."""

import json
import random
import shutil

import pytest

from aiscale import checkpoint
from aiscale.train import fit
from damage import TINY, cut, flip_a_bit, resume_after_damage, train_whole
from ranks import aiscale

#: A flipped bit, a cut, a missing and a lengthened file, each for the three files of a checkpoint.
SEEDS = (0, 1, 2, 3, 4, 5, 7, 9, 13, 17, 19, 33)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return folder, train_whole(folder)


@pytest.mark.parametrize("seed", SEEDS)
def test_any_damage_makes_the_run_fall_back_one_checkpoint(seed, trained, tmp_path):
    folder, losses = trained
    assert resume_after_damage(folder, tmp_path / "runs", seed=seed, losses=losses) == ""


def test_damaged_files_are_named(trained, tmp_path, capsys):
    shutil.copytree(trained[0], tmp_path / "runs")
    newest = tmp_path / "runs/tiny/checkpoints/step_00000006"
    flip_a_bit(newest / ".metadata", random.Random(0))
    torn, unfinished = newest.with_name("step_00000008"), newest.with_name(".step_00000010.partial")
    for folder in (torn, unfinished):
        shutil.copytree(newest, folder)
        (folder / checkpoint.NOTE).unlink()
    fit(TINY.override("loop.steps=7"), runs_dir=tmp_path / "runs", resume=True, progress=False)
    assert capsys.readouterr().err.splitlines() == [
        f"aiscale: {unfinished} was not finished: resuming from step_00000008",
        f"aiscale: {torn} is not whole (it has no aiscale.json): going back to step_00000006",
        f"aiscale: {newest} is damaged (.metadata is not what was written: its checksum differs): going back to "
        "step_00000004",
    ]
    assert torn.is_dir() and not unfinished.exists()  # it may belong to somebody, because it has a checkpoint's name


def test_if_all_checkpoints_are_damaged_the_run_is_refused_and_nothing_is_changed(trained, tmp_path):
    shutil.copytree(trained[0], tmp_path / "runs")
    folder = tmp_path / "runs/tiny/checkpoints"
    for path in folder.iterdir():
        cut(next(path.glob("*.distcp")), random.Random(0))
    with pytest.raises(
        checkpoint.CheckpointError, match="step_00000002 is damaged .*, and no newer one can be used either: noth"
    ):
        fit(TINY.override("loop.steps=7"), runs_dir=tmp_path / "runs", resume=True, progress=False)
    assert len(list(folder.iterdir())) == 3


def test_all_ranks_fall_back_to_the_same_checkpoint(tmp_path):
    settings = [word for key, value in flat(TINY.to_dict()) for word in ("--set", f"{key}={value}")]
    words = ("train", "--nproc", "2", "--quiet", "--set", "parallel.strategy=fsdp", *settings)
    whole = aiscale(*words, "--set", "loop.steps=8", "--json", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    newest = checkpoint.latest(tmp_path / "runs/tiny/checkpoints")
    flip_a_bit(sorted(newest.glob("*.distcp"))[-1], random.Random(1))
    again = aiscale(*words, "--set", "loop.steps=8", "--json", "--resume", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "step_00000008 is damaged (" in again.stderr and "going back to step_00000006" in again.stderr
    assert [json.loads(done.stdout)["val_loss"] for done in (whole, again)].count(
        json.loads(whole.stdout)["val_loss"]
    ) == 2


def flat(tree: dict):
    for section in ("model", "loop"):
        yield from ((f"{section}.{key}", value) for key, value in tree[section].items() if key != "steps")
    yield "name", tree["name"]
