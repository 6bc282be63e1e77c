"""A Run is checked when it is created, and every error is one line that says what to change."""

import dataclasses

import pytest

from aiscale.errors import ConfigError
from aiscale.plan.config import LoopConfig, ModelConfig, ParallelConfig, Run
from aiscale.plan.config.run import build


def test_a_run_cannot_be_changed_in_place():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Run().name = "other"


def test_defaults_follow_another_field():
    model = ModelConfig(d_model=256, n_head=8)
    assert (model.ff_width, model.kv_heads, model.d_head) == (1024, 8, 32)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"n_layr": 3}, "unknown key n_layr: did you mean n_layer?"),
        ({"n_layer": "many"}, "n_layer is 'many': it must be a whole number"),
        ({"n_layer": 0}, "model.n_layer is 0: it must be greater than 0"),
        ({"norm": "batch"}, "norm is 'batch': it must be one of layernorm, rmsnorm, deepnorm"),
        ({"tied": "perhaps"}, "tied is 'perhaps': it must be true or false"),
    ],
)
def test_a_bad_setting_is_refused_in_one_line(tree, message):
    with pytest.raises(ConfigError) as refusal:
        build(ModelConfig, tree)
    assert str(refusal.value) == message


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: ModelConfig(d_model=128, n_head=3),
            "model.d_model 128 is not divisible by model.n_head 3: every head needs the same width",
        ),
        (
            lambda: Run(loop=LoopConfig(seq_len=256)),
            "a sequence of 256 tokens is longer than the 128 that the model reads: "
            "shorten it, or take another model",
        ),
        (
            lambda: ParallelConfig(strategy="ddp", tp=2),
            "parallel.tp is 2, but parallel.strategy ddp has no such option: "
            "set it to 1, or strategy to megatron",
        ),
        (
            lambda: LoopConfig(global_batch=16).micro_batches(3),
            "a batch of 16 sequences is no multiple of dp 3 x micro-batch 1 = 3: take 18",
        ),
        (
            lambda: LoopConfig(global_batch=16, micro_batch=3).micro_batches(2),
            "a batch of 16 sequences is no multiple of dp 2 x micro-batch 3 = 6: take 18",
        ),
    ],
)
def test_values_that_do_not_fit_together_are_refused_with_the_rule(make, message):
    with pytest.raises(ConfigError) as refusal:
        make()
    assert str(refusal.value) == message


def test_a_ranks_share_of_the_batch_is_split_into_micro_batches():
    loop = LoopConfig(global_batch=24, micro_batch=2)
    assert loop.micro_batches(dp=3) == (4, 2)
    assert LoopConfig(global_batch=24).micro_batches(dp=3) == (1, 8)
    assert ParallelConfig(strategy="ddp").data_parallel(5) == 5


def test_config_does_not_import_torch():
    import subprocess
    import sys

    code = "import sys, aiscale.plan.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
