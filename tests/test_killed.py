"""kill -9 of one rank in the middle of a step ends all ranks within 20 s, and the dead rank is named."""

import os
import signal
import time

import pytest

from ranks import begun, processes_with

#: Steps take seconds: between two lines of metrics.jsonl every rank is in the middle of one.
LONG_STEPS = ("model.n_layer=4", "loop.global_batch=32", "loop.micro_batch=1", "loop.seq_len=64", "loop.eval_every=0")
extended = pytest.mark.extended


@pytest.mark.parametrize(
    ("strategy", "ranks", "victim", "options"),
    [
        ("fsdp", 2, 1, ()),
        pytest.param("pipeline", 4, 2, ("parallel.pp=4",), marks=extended),  # between its neighbours
        pytest.param("pipeline", 2, 1, ("parallel.pp=2", "parallel.schedule=gpipe"), marks=extended),
        pytest.param("megatron", 4, 3, ("parallel.pp=2", "parallel.tp=2"), marks=extended),
        pytest.param("zero", 2, 0, ("parallel.zero_stage=3",), marks=extended),  # rank 0, to which the others connect
    ],
)
def test_a_rank_killed_in_a_step_is_named_and_ends_all_ranks(strategy, ranks, victim, options, tmp_path):
    settings = (*LONG_STEPS, "loop.steps=1000", f"parallel.strategy={strategy}", *options)
    job, pids = begun(tmp_path, "laptop", ranks, *settings)
    os.kill(pids[victim], signal.SIGKILL)
    start = time.monotonic()
    _, err = job.communicate(timeout=60)
    assert time.monotonic() - start < 20
    assert f"aiscale: rank {victim} of {ranks} died: signal 9 (SIGKILL)" in err and job.returncode == 137, err
    assert "Traceback" not in err, err
    assert not processes_with(str(tmp_path))
