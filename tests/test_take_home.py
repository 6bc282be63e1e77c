"""What a participant takes home: one zip, which opens as the folder that it came from."""

from __future__ import annotations

import zipfile

from aiscale.cli import main
from aiscale.lesson import take_home


def test_scripts_guesses_and_notebooks_go_home_and_nothing_else(tmp_path, monkeypatch, capsys):
    written = ["my/train.py", "progress/03_ddp.json", "notebooks/03_ddp.ipynb"]
    written += ["workshop/exercises/03_ddp.ipynb", "workshop/clinic/mine/01.py"]
    left = ["my/.reference/run.pt", "notebooks/.ipynb_checkpoints/03_ddp.ipynb"]
    left += ["my/__pycache__/train.pyc", "secret/password", "my/checkpoint.pt"]
    for name in written + left:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "my/link").symlink_to(tmp_path / "secret/password")
    (tmp_path / "my/checkpoint.pt").write_bytes(b"0" * 2000)
    monkeypatch.setattr(take_home, "LARGEST_BYTES", 1000)
    monkeypatch.chdir(tmp_path / "notebooks")
    assert main(["take-home"]) == 0
    said = capsys.readouterr().out
    assert "left out, over 0 MB: my/checkpoint.pt" in said and "5 files" in said
    with zipfile.ZipFile(tmp_path / "aiscale-home.zip") as packed:
        assert sorted(packed.namelist()) == sorted(f"aiscale/{name}" for name in written)
        assert packed.read("aiscale/my/train.py") == b"my/train.py"
    assert main(["take-home"]) == 0, "again, over the first"


def test_elsewhere_it_says_where_to_go(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["take-home"]) == 2
    assert "has no folder notebooks, here or above" in capsys.readouterr().err
