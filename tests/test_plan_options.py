"""A trainer's options, as the formulas read them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from aiscale.plan.config import HFModelConfig
from aiscale.plan.options import planned
from aiscale.train.options import TRAINERS


@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_trainer_has_a_run(trainer):
    run = planned(trainer, "--batch 32 --micro-batch 4 --bf16")
    assert (run.loop.global_batch, run.loop.micro_batch, run.loop.precision) == (32, 4, "bf16")
    assert run.parallel.data_parallel(4 if trainer != "serial" else 1)


def test_what_is_a_trainers_own_is_read():
    zero = planned("zero", "--stage 3 --model gptj-6b --recompute").parallel
    assert (zero.strategy, zero.zero_stage) == ("zero", 3)
    grid = planned("megatron", "--tp 4 --pp 8 --model 22b --sequence-parallel --no-zero1 --fp16")
    assert (grid.parallel.tp, grid.parallel.pp, grid.parallel.sequence_parallel) == (4, 8, True)
    assert not grid.parallel.distributed_optimizer
    assert grid.loop.precision == "fp16"
    assert (
        planned("megatron", "--tp 1 --pp 4 --virtual-stages 3 --model gpt2").parallel.schedule
        == "interleaved"
    )
    sparse = planned("radius", "--density 0.1 --interval 7 --dense-until 3").compression
    assert (sparse.method, sparse.density, sparse.interval, sparse.warmup_steps) == (
        "radius",
        0.1,
        7,
        3,
    )


def test_a_model_of_transformers_is_one():
    model = planned("fsdp", "--model gptj-6b --recompute").model
    assert isinstance(model, HFModelConfig)
    assert (model.model_type, model.n_layer, model.activation_checkpointing) == ("gptj", 28, True)


def test_options_are_read_without_torch():
    program = (
        "import sys, aiscale.plan.options, aiscale.train.layout; print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"
