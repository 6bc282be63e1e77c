"""A failing rank ends the others within seconds, is reported by its rank, leaves no process."""

import os
import re
from pathlib import Path

import pytest
import torch

from aiscale.launch import culprit
from aiscale.measure.distributed.connect import pick_device
from aiscale.measure.distributed.rendezvous import Launch
from aiscale.train import command
from ranks import free_port, processes_with, run_ranks, wait_until

DDP = Path(__file__).parents[1] / "src/aiscale/train/ddp.py"
extended = pytest.mark.extended


def train(launcher, folder, *, old, new):
    """Two ranks of the trainer ddp, in which a line is another one. It would train without end."""
    text = DDP.read_text()
    assert text.count(old) == 1
    options = ["--model", "1x16", "--length", "16", "--steps", "100000", "--save-every", "0"]
    text = text.replace(old, new).replace("parser.parse_args()", f"parser.parse_args({options})")
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}  # mpiexec gives none
    done = run_ranks(text, 2, folder, launcher=launcher, connected=False, env=address, timeout=600)
    wait_until(lambda: not processes_with(str(folder / "ranks.py")), 20, "no process is left")
    assert done.returncode != 0
    return done


LOG = "        job.log(step, loss, norm)\n"
BROKEN = """        if step == 3 and rank == 1:
            raise ValueError("shard 3 is truncated")
"""


@pytest.mark.parametrize(
    "launcher",
    ["aiscale", pytest.param("mpiexec", marks=extended), pytest.param("torchrun", marks=extended)],
)
def test_an_error_on_one_rank_ends_all_and_is_reported_with_its_rank(launcher, tmp_path):
    done = train(launcher, tmp_path, old=LOG, new=BROKEN + LOG)
    assert "ValueError: shard 3 is truncated" in done.stderr, done.stderr
    if launcher == "aiscale":
        assert "aiscale: rank 1 of 2 failed with exit status 1" in done.stderr, done.stderr
    else:
        assert "[rank1]: ValueError: shard 3 is truncated" in done.stderr, done.stderr


KILLED = """        if step == 3 and rank == 1:
            import os, signal
            os.kill(os.getpid(), signal.SIGKILL)
"""


@extended
@pytest.mark.parametrize("launcher", ["mpiexec", "torchrun"])
def test_a_rank_killed_under_another_launcher_ends_all(launcher, tmp_path):
    """torchrun names it. MPICH's mpiexec may name a process that it has ended itself."""
    done = train(launcher, tmp_path, old=LOG, new=KILLED + LOG)
    if launcher == "torchrun":
        assert re.search(r"rank\s*: 1 \(local_rank: 1\)\s*exitcode\s*: -9", done.stderr), (
            done.stderr
        )


READ = "windows, held_out, text = read_windows(args)\n"


def test_ranks_that_read_different_texts_are_refused(tmp_path):
    done = train("aiscale", tmp_path, old=READ, new=READ + "    text = text + str(rank)\n")
    (line,) = done.stderr.strip().splitlines()
    assert re.fullmatch(
        r"aiscale: --text \S+ is not the same on ranks 0 and 1: give every node the same file", line
    )
    assert done.returncode == 2 and not (tmp_path / "run/run.json").exists()


@extended
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
    ("gpus", "ranks", "visible"), [(1, 4, ""), (2, 3, ""), (4, 4, "0,1,2,3"), (0, 2, "0,1,2,3")]
)
def test_ranks_that_would_share_a_gpu_all_compute_on_cpus(
    gpus, ranks, visible, monkeypatch, capsys
):
    """NCCL refuses two ranks on one GPU."""
    monkeypatch.setattr(command, "GPU_DEVICES", ["/"] if gpus else [])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(command, "launch", lambda *arguments, **options: 0)
    for name in command.VISIBLE:
        monkeypatch.setenv(name, "0,1,2,3")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("RANK", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    assert command.main(["ddp", "--nproc", str(ranks)]) == 0
    assert {os.environ[name] for name in command.VISIBLE} == {visible}
    assert (f"{ranks} ranks, and GPUs here: {gpus}" in capsys.readouterr().err) == (visible == "")


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
def test_all_ranks_of_a_node_choose_the_same_kind_of_device(
    gpus, ranks, launcher, device, expected, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    places = [
        Launch(launcher=launcher, rank=r, size=ranks, local_rank=r, local_size=ranks)
        for r in range(ranks)
    ]
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
