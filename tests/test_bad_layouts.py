"""A layout that cannot work is refused in one line, with exit status 2, before anything is written."""

import sys

import pytest

from aiscale.cli import main

MEGATRON, PIPELINE = "parallel.strategy=megatron", "parallel.strategy=pipeline"
INTERLEAVED = ("parallel.schedule=interleaved", "parallel.virtual_stages=2")


@pytest.mark.parametrize(
    ("nproc", "settings", "message"),
    [
        (
            3,
            (MEGATRON, "parallel.tp=3", "model.d_model=96"),
            "model.n_head 4 is not divisible by parallel.tp 3: every tensor-parallel rank needs as many heads: change",
        ),
        (
            4,
            (PIPELINE, "parallel.pp=4", *INTERLEAVED),
            "model.n_layer 4 is not divisible by parallel.pp 4 x virtual_stages 2 = 8",
        ),
        (
            2,
            (MEGATRON, "parallel.ep=2", "model.n_expert=3", "model.bias=false"),
            "model.n_expert 3 is not divisible by parallel.ep 2: every expert-parallel rank needs as many experts",
        ),
        (
            2,
            (MEGATRON, "parallel.tp=2", "model.n_expert=4", "model.bias=false"),
            "model.n_expert 4 with parallel.tp 2 and distributed_optimizer False: Megatron-Core divides experts over",
        ),
        (
            2,
            (MEGATRON, "parallel.pp=2", *INTERLEAVED),
            "parallel.schedule interleaved with parallel.pp 2: with 2 stages both neighbours are the same rank and "
            "Megatron-Core's messages cross: set pp to 3 or more, or schedule=1f1b",
        ),
        (
            4,
            (MEGATRON, "parallel.pp=4", "model.n_layer=8", "loop.micro_batch=8", *INTERLEAVED),
            "2 micro-batches a step with parallel.pp 4: the interleaved schedule needs a multiple of pp: "
            "set loop.micro_batch so that there are 4",
        ),
        (
            2,
            ("parallel.strategy=ddp", "parallel.zero_stage=3"),
            "parallel.zero_stage is 3, but parallel.strategy ddp has no such option: set it to 0, or strategy to zero",
        ),
        (
            2,
            ("parallel.strategy=zero", "parallel.zero_stage=2", "parallel.offload=all"),
            "parallel.offload all with parallel.zero_stage 2: only stage 3 divides parameters: set zero_stage=3",
        ),
        (
            6,
            (MEGATRON, "parallel.tp=2", "parallel.pp=2"),
            "tp 2 x pp 2 = 4 does not divide the 6 ranks of this job: start a multiple of 4",
        ),
        (
            4,
            (MEGATRON, "parallel.tp=2", "parallel.dp=4"),
            "dp 4 x tp 2 x pp 1 = 8 ranks, but this job has 4: change one of them, or start 8",
        ),
        (
            4,
            ("parallel.strategy=fsdp", "parallel.replicas=3"),
            "parallel.replicas 3 does not divide the 4 data-parallel ranks: every copy of the model needs as many",
        ),
        (
            2,
            (MEGATRON, "parallel.sequence_parallel=true"),
            "parallel.sequence_parallel divides tokens over tensor-parallel ranks, but parallel.tp is 1: raise it",
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
