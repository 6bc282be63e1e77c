"""A layout that cannot work is refused in one line, with exit status 2, before anything is written."""

import sys

import pytest

from aiscale.cli import main

MEGATRON = "parallel.strategy=megatron"


@pytest.mark.parametrize(
    ("nproc", "settings", "message"),
    [
        (
            3,
            (MEGATRON, "parallel.tp=3", "model.d_model=96"),
            "model.n_head 4 is not divisible by parallel.tp 3: change one of them",
        ),
        (
            2,
            ("parallel.strategy=ddp", "parallel.zero_stage=3"),
            "parallel.zero_stage is 3, but parallel.strategy ddp has no such option: set it to 0, or strategy to zero",
        ),
        (
            4,
            (MEGATRON, "parallel.tp=2", "parallel.dp=4"),
            "dp 4 x tp 2 x pp 1 = 8 ranks, but this job has 4: change one of them, or start 8",
        ),
    ],
)
def test_a_layout_that_cannot_work_is_refused(nproc, settings, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # --nproc would set it in this process
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    words = ["train", "--recipe", "laptop", "--runs-dir", str(tmp_path / "runs"), "--nproc", str(nproc)]
    words += [word for setting in ("model.n_layer=4", *settings) for word in ("--set", setting)]
    monkeypatch.setattr(sys, "argv", ["aiscale", *words])
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("aiscale: ") and message in line
    assert not list(tmp_path.iterdir())
