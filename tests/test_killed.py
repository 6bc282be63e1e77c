"""A rank that is killed (within 20 s) or stopped in mid-step ends all ranks, and is named."""

import os
import re
import signal
import time

import pytest

from ranks import begun, processes_with

#: Steps take seconds: between two lines of metrics.jsonl every rank is in the middle of one.
LONG_STEPS = (
    "--model",
    "4x128",
    "--batch",
    "64",
    "--micro-batch",
    "1",
    "--steps",
    "1000",
    "--save-every",
    "0",
)
extended = pytest.mark.extended


@pytest.mark.parametrize(
    ("trainer", "ranks", "victim", "options"),
    [
        ("fsdp", 2, 1, ()),
        # between its neighbours
        pytest.param("tp_pp", 4, 2, ("--tp", "1", "--pp", "4"), marks=extended),
        pytest.param("megatron", 4, 3, ("--tp", "2", "--pp", "2"), marks=extended),
        # rank 0, to which the others connect
        pytest.param("zero", 2, 0, ("--stage", "3"), marks=extended),
    ],
)
def test_a_rank_killed_in_a_step_is_named_and_ends_all_ranks(
    trainer, ranks, victim, options, tmp_path
):
    job, pids = begun(tmp_path, trainer, ranks, *LONG_STEPS, *options)
    os.kill(pids[victim], signal.SIGKILL)
    start = time.monotonic()
    _, err = job.communicate()  # pytest's own limit ends a run that hangs
    assert time.monotonic() - start < 20
    assert (
        f"aiscale: rank {victim} of {ranks} died: signal 9 (SIGKILL)" in err
        and job.returncode == 137
    ), err
    assert not processes_with(str(tmp_path))


@extended
@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_rank_is_named_and_ends_all_ranks(victim, tmp_path):
    options = (
        "--model",
        "1x16",
        "--length",
        "16",
        "--steps",
        "1000000",
        "--save-every",
        "0",
        "--patience",
        "30",
    )
    job, pids = begun(tmp_path, "ddp", 2, *options, steps=2)
    os.kill(pids[victim], signal.SIGSTOP)
    _, err = job.communicate()
    assert job.returncode == 76, err
    (line,) = [line for line in err.splitlines() if "ranks wait" in line]
    assert re.search(f"rank {victim} on \\S+ no longer answers", line)
    assert not processes_with(str(tmp_path))
