"""Host memory: a rank begins with its own part of the model and one whole tensor."""

import json
from pathlib import Path

import pytest

from aiscale.config import Run
from aiscale.plan.layout import layout_of, shape_of
from aiscale.plan.memory import host_bytes
from ranks import forked

#: A rank's share is one layer of 12 D^2 weights, whose largest tensor has 4 D^2.
SIXTEEN_LAYERS = ("model.n_layer=16", "model.n_head=8", "model.d_model=256", "model.vocab_size=64")
SIXTEEN_LAYERS += ("model.max_seq_len=64", "loop.seq_len=64", "loop.global_batch=16", "loop.micro_batch=1")


@pytest.mark.parametrize(
    "settings",
    [
        ("parallel.strategy=megatron", "parallel.tp=8", "parallel.pp=2"),
        ("parallel.strategy=fsdp",),
        ("parallel.strategy=pipeline", "parallel.pp=16"),
    ],
    ids=lambda settings: settings[0].partition("=")[2],
)
def test_a_rank_of_16_draws_its_shard_and_not_the_model(settings):
    job = [*SIXTEEN_LAYERS, *settings], 16, 3
    done = forked(["-m", "drawn", json.dumps(job)], timeout=600, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr
    held = json.loads(done.stdout.splitlines()[-1])
    # Gradients lie beside the weights: on a GPU, not on the host.
    on_host = held["peak"] - held["gradients"] - held["buffers"]
    assert held["parameters"] <= on_host <= 2 * held["parameters"], held
    run = Run().override(*SIXTEEN_LAYERS, *settings)
    planned = host_bytes(shape_of(run.model, 64), layout_of(run, 16))["drawing weights"]
    # Beside it, the indices of the rows that it cuts out.
    assert on_host - held["parameters"] <= 1.1 * planned, held
