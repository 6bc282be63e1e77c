"""A checkpoint that is not what was written is never resumed from in silence: the run goes back, and says so."""

import json
import random
import shutil

import pytest

from aiscale import checkpoint
from aiscale.soak.damage import TINY, cut, flip_a_bit, resume_after_damage, train_whole
from aiscale.train import fit
from ranks import aiscale

VARIANTS = 50


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return folder, train_whole(folder)


@pytest.mark.parametrize("seed", range(VARIANTS))
def test_damage_of_any_kind_anywhere_sends_the_run_back_one_checkpoint(seed, trained, tmp_path):
    folder, losses = trained
    assert resume_after_damage(folder, tmp_path / "runs", seed=seed, losses=losses) == ""


def test_what_is_wrong_is_told_by_name(trained, tmp_path, capsys):
    shutil.copytree(trained[0], tmp_path / "runs")
    newest = tmp_path / "runs/tiny/checkpoints/step_00000006"
    flip_a_bit(newest / ".metadata", random.Random(0))
    fit(TINY.override("loop.steps=7"), runs_dir=tmp_path / "runs", resume=True, progress=False)
    assert capsys.readouterr().err == (
        f"aiscale: {newest} is damaged (.metadata is not what was written: its checksum differs): going back to "
        "step_00000004\n"
    )


def test_a_note_that_says_something_else_is_damage(trained, tmp_path):
    shutil.copytree(trained[0], tmp_path / "runs")
    path = tmp_path / "runs/tiny/checkpoints/step_00000006"
    note = json.loads((path / "aiscale.json").read_text())
    (path / "aiscale.json").write_text(json.dumps(note | {"step": 3}))
    with pytest.raises(checkpoint.CheckpointError, match="step_00000006 is damaged: aiscale.json is not what was writ"):
        checkpoint.read_note(path)


def test_where_all_are_damaged_the_run_is_refused_and_nothing_is_touched(trained, tmp_path):
    shutil.copytree(trained[0], tmp_path / "runs")
    folder = tmp_path / "runs/tiny/checkpoints"
    for path in folder.iterdir():
        cut(next(path.glob("*.distcp")), random.Random(0))
    with pytest.raises(
        checkpoint.CheckpointError, match="step_00000002 is damaged .* and so are those before it: noth"
    ):
        fit(TINY.override("loop.steps=7"), runs_dir=tmp_path / "runs", resume=True, progress=False)
    assert len(list(folder.iterdir())) == 3


def test_a_run_that_died_before_its_first_checkpoint_starts_over(trained, tmp_path):
    shutil.copytree(trained[0], tmp_path / "runs")
    for path in (tmp_path / "runs/tiny/checkpoints").iterdir():
        path.rename(path.with_name(f".{path.name}.partial"))
    assert fit(TINY, runs_dir=tmp_path / "runs", resume=True, progress=False).losses == trained[1]


def test_ranks_go_back_together(tmp_path):
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
    """(section.key, value) of the settings above."""
    for section in ("model", "loop"):
        yield from ((f"{section}.{key}", value) for key, value in tree[section].items() if key != "steps")
    yield "name", tree["name"]
