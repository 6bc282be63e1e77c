"""A failing rank ends the others within seconds, reports the reason once, and leaves no process."""

import json
import re
import time

import pytest
import torch

from aiscale.distributed.connect import pick_device
from aiscale.distributed.rendezvous import Launch
from aiscale.launch import culprit
from ranks import processes_with, run_ranks, wait_until

#: `aiscale train` without end, as a script, so that a fault can be planted in one rank.
TRAIN = """
import os, sys
import aiscale.train.loop as module
from aiscale.cli import main
from aiscale.config import ConfigError
from aiscale.parallel.serial import Engine
def spoil(owner, name, error, after=0):  # on rank 1, from the call number `after`
    real, calls = getattr(owner, name), []
    def spoilt(*args, **kwargs):
        calls.append(1)
        if os.environ.get("RANK") == "1" and len(calls) > after:
            raise error
        return real(*args, **kwargs)
    setattr(owner, name, spoilt)
FAULT
settings = ("model.n_layer=1", "loop.steps=100000", "loop.eval_every=0", "loop.device=cpu", SETTINGS)
sys.argv = ["aiscale", "train", "--quiet", "--runs-dir", "runs", *(w for s in settings for w in ("--set", s))]
raise SystemExit(main())
"""


def train(fault: str, launcher: str, folder, *settings: str):
    code = TRAIN.replace("FAULT", fault).replace("SETTINGS", ", ".join(map(repr, settings)))
    start = time.monotonic()
    done = run_ranks(code, 2, folder, launcher=launcher, timeout=240, connected=False)
    wait_until(lambda: not processes_with(str(folder / "ranks.py")), 20, "no process is left")
    return done, time.monotonic() - start


@pytest.mark.parametrize(
    ("launcher", "strategy"),
    [
        ("aiscale", "ddp"),
        *(pytest.param(*how, marks=pytest.mark.extended) for how in (("mpiexec", "ddp"), ("torchrun", "ddp"))),
    ],
)
def test_an_error_on_one_rank_ends_all_and_is_reported_with_its_rank(launcher, strategy, tmp_path):
    fault = 'spoil(Engine, "step", ConfigError("shard 3 is truncated"), after=3)'
    done, seconds = train(fault, launcher, tmp_path, f"parallel.strategy={strategy}")
    assert done.returncode != 0 and seconds < 120  # on a busy machine, starting takes most of it
    assert "aiscale: rank 1 of 2: shard 3 is truncated" in done.stderr, done.stderr
    if launcher == "aiscale":
        assert "aiscale: rank 1 of 2 failed with exit status 2" in done.stderr, done.stderr
    if strategy == "ddp" and launcher == "aiscale":
        assert "rank 0 of 2: lost its connection to " in done.stderr and "Traceback" not in done.stderr


@pytest.mark.extended
@pytest.mark.parametrize("launcher", ["mpiexec", "torchrun"])
def test_a_rank_killed_under_another_launcher_can_be_identified(launcher, tmp_path):
    fault = """
import signal
real, taken = Engine.step, []
def step(self, *arguments):
    taken.append(1)
    if len(taken) == 4 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self, *arguments)
Engine.step = step
"""
    done, seconds = train(fault, launcher, tmp_path, "parallel.strategy=ddp")
    assert done.returncode != 0 and seconds < 120
    if launcher == "torchrun":  # it may end rank 0 before rank 0 reports, and its own report names the rank
        assert re.search(r"rank\s*: 1 \(local_rank: 1\)\s*exitcode\s*: -9", done.stderr), done.stderr
    else:  # rank 0 or mpiexec reports first; mpiexec knows only process ids, which run.json maps to ranks
        note = json.loads((tmp_path / "runs/laptop/run.json").read_text())
        _, pid = note["world"]["processes"][1]
        told = f"PID {pid} RUNNING AT" in done.stdout, "lost its connection to rank 1" in done.stderr
        assert any(told), (done.stdout, done.stderr)


@pytest.mark.extended
def test_ranks_that_read_different_texts_are_refused(tmp_path):
    fault = """
import dataclasses
real = module.open_corpus
module.open_corpus = lambda *a, **k: dataclasses.replace(real(*a, **k), sha256=os.environ["RANK"] * 64)
"""
    done, _ = train(fault, "aiscale", tmp_path, "parallel.strategy=ddp")
    (line,) = done.stderr.strip().splitlines()
    assert "data.corpus embedded is not the same text on ranks 0 and 1: give every node" in line
    assert done.returncode == 2


@pytest.mark.extended
def test_an_uncaught_error_in_a_users_script_ends_the_mpi_job(tmp_path):
    code = """
    from mpi4py import MPI
    if world.rank == 1:
        raise RuntimeError("boom")
    MPI.COMM_WORLD.Barrier()
    """
    done = run_ranks(code, 2, tmp_path, launcher="mpiexec")
    assert done.returncode != 0 and "RuntimeError: boom" in done.stderr


@pytest.mark.parametrize(
    ("gpus", "ranks", "launcher", "device", "expected"),
    [
        (4, 4, "torchrun", "auto", ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]),
        (2, 3, "torchrun", "auto", ["cpu"] * 3),  # not two on GPUs and one on the CPU
        (1, 4, "srun", "auto", ["cuda:0"] * 4),  # --gpus-per-task=1
        (1, 2, "mpiexec", "cuda", ["cuda:0"] * 2),  # a wrapper that sets CUDA_VISIBLE_DEVICES
        (1, 2, "aiscale", "auto", ["cpu"] * 2),
    ],
)
def test_all_ranks_of_a_node_choose_the_same_kind_of_device(gpus, ranks, launcher, device, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    places = [Launch(launcher=launcher, rank=r, size=ranks, local_rank=r, local_size=ranks) for r in range(ranks)]
    assert [str(pick_device(device, place)) for place in places] == expected


@pytest.mark.parametrize(
    ("codes", "first", "expected"),
    [
        ([1, -9, None], {0}, (-9, 1)),  # killed: that explains the rest
        ([1, 2, None], {1}, (2, 1)),  # failed first
        ([75, 2], {0, 1}, (2, 1)),  # 75: only lost its connection
        ([75, None], {0}, (75, 0)),
    ],
)
def test_the_rank_at_fault_is_named(codes, first, expected):
    assert culprit(codes, first) == expected
