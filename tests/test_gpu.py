"""GPUs: the trainers on one card give the losses of the CPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from aiscale.measure.distributed import ConnectError, Launch
from aiscale.measure.distributed.connect import pick_device
from aiscale.train.record import read_metrics
from ranks import script

SHORT = "--model tiny --steps 4 --batch 8".split()


def losses(trainer: str, folder, *options: str, gpu: bool = True) -> list[float]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"} | ({} if gpu else {"CUDA_VISIBLE_DEVICES": ""})
    command = [
        sys.executable,
        "-m",
        "aiscale",
        "train",
        trainer,
        *SHORT,
        "--save",
        str(folder),
        *options,
    ]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [line["loss"] for line in read_metrics(folder)]


# With a GPU --------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["", "--bf16"])
def test_a_gpu_gives_the_losses_of_the_cpu(precision, tmp_path):
    on_cpu = losses("serial", tmp_path / "cpu", gpu=False)
    on_gpu = losses("serial", tmp_path / "gpu", *precision.split())
    assert on_gpu == pytest.approx(on_cpu, abs=2e-2 if precision else 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("trainer", "options"),
    [
        ("ddp", ""),
        ("ddp", "--compile"),
        ("fsdp", "--recompute"),
        *(("zero", f"--stage {stage}") for stage in range(4)),
        ("tp_pp", "--tp 1 --pp 1"),
        ("megatron", "--tp 1 --pp 1"),
        ("radius", "--density 1"),
    ],
)
def test_every_trainer_runs_on_a_gpu_with_one_rank(trainer, options, tmp_path):
    serial = losses("serial", tmp_path / "serial")
    assert losses(trainer, tmp_path / "run", *options.split()) == pytest.approx(serial, abs=2e-4)


@pytest.mark.gpu
def test_gpt2_355m_reaches_45_percent_of_a_hopper_gpus_peak():
    (row,) = script("gpu").measure(["355M"])["rows"]
    assert row["mfu"] > (0.45 if any(name in row["device"] for name in ("H100", "H200")) else 0.2)


# Without -----------------------------------------------------------------------------------------


def test_ranks_share_gpus_only_when_asked_to(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    places = [
        Launch(launcher="aiscale", rank=r, size=4, local_rank=r, local_size=4) for r in range(4)
    ]
    with pytest.raises(ConnectError, match="4 ranks on this node, but torch sees 2 GPUs"):
        pick_device("cuda", places[0])
    assert [pick_device("cuda", place, shared=True).index for place in places] == [0, 1, 0, 1]
    assert pick_device("cpu", places[3], shared=True).type == "cpu"
