"""A checkpoint that is not what was written is never resumed from in silence: the run goes back, and says so."""

import json
import random
import shutil

import pytest

from aiscale import checkpoint
from aiscale.config import Run
from aiscale.train import fit
from ranks import aiscale

TINY = Run(name="tiny").override(
    *("model.n_layer=1", "model.n_head=2", "model.d_model=16", "model.max_seq_len=16", "loop.seq_len=16"),
    *("loop.global_batch=4", "loop.eval_batches=1", "loop.eval_every=0", "loop.device=cpu"),
    *("loop.steps=6", "loop.checkpoint_every=2", "loop.keep_checkpoints=3", "optimizer.schedule=constant"),
)
VARIANTS = 50


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return folder, fit(TINY, runs_dir=folder, progress=False).losses


def flip_a_bit(path, chance):
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def cut(path, chance):
    path.write_bytes(path.read_bytes()[: chance.randrange(path.stat().st_size)])


def remove(path, chance):
    path.unlink()


def lengthen(path, chance):
    path.write_bytes(path.read_bytes() + bytes(chance.randrange(1, 100)))


@pytest.mark.parametrize("seed", range(VARIANTS))
def test_damage_of_any_kind_anywhere_sends_the_run_back_one_checkpoint(seed, trained, tmp_path, capsys):
    folder, losses = trained
    shutil.copytree(folder, tmp_path / "runs")
    chance, newest = random.Random(seed), tmp_path / "runs/tiny/checkpoints/step_00000006"
    harm = [flip_a_bit, flip_a_bit, cut, remove, lengthen][seed % 5]
    harm(chance.choice(sorted(path for path in newest.iterdir() if path.is_file())), chance)
    # Without its note a folder is the rest of a deletion that was broken off, and nothing is damaged.
    is_rest = not (newest / "aiscale.json").exists()
    resumed = fit(TINY.override("loop.steps=7"), runs_dir=tmp_path / "runs", resume=True, progress=False)
    said = capsys.readouterr().err
    assert len(resumed.losses) == 3 and resumed.losses[:2] == losses[4:]
    assert ("step_00000006 is " in said and "going back to step_00000004" in said) != is_rest


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
