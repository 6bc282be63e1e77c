"""The scripts of lesson 08 learn what one process learns, however they are started, spread, killed and resumed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from aiscale.distributed import rendezvous
from centre import Cluster

SCRIPTS = Path(__file__).parents[1] / "workshop" / "your_own"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
#: In fp32: sums of other parts round otherwise. Measured: 1e-6, the last digit that is printed.
TOLERANCE = 2e-5
STEPS = 15


def losses(said: str) -> list[tuple[int, float]]:
    return [(int(step), float(loss)) for step, loss in re.findall(r"step (\d+) loss (\S+)", said)]


def start(*command, cwd: Path, env=None) -> subprocess.CompletedProcess:
    env = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    return subprocess.run([*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


def train(name: str, ranks: int, cwd: Path, *options, steps: int = STEPS) -> list[tuple[int, float]]:
    command = [*TORCHRUN, f"--nproc-per-node={ranks}", SCRIPTS / name, f"--text={cwd.parent / 'text'}"]
    done = start(*command, f"--steps={steps}", "--batch=16", "--micro-batch=2", *options, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return losses(done.stdout)


@pytest.fixture(scope="module")
def serial(tmp_path_factory):
    """train.py over three epochs of a short text, in the folder above those in which ranks run."""
    place = tmp_path_factory.mktemp("serial")
    (place.parent / "text").write_text(Path(__file__).read_text()[:7000])
    done = start(
        sys.executable,
        SCRIPTS / "train.py",
        f"--text={place.parent / 'text'}",
        f"--steps={STEPS}",
        "--batch=16",
        cwd=place,
    )
    assert done.returncode == 0, done.stderr
    found = losses(done.stdout)
    assert len(found) == STEPS and found[-1][1] < found[0][1]
    return found


@pytest.fixture
def cwd(serial, tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


def assert_equal(found, serial) -> None:
    assert [step for step, _ in found] == [step for step, _ in serial]
    worst = max(abs(mine - theirs) for (_, mine), (_, theirs) in zip(found, serial, strict=True))
    assert worst < TOLERANCE, f"losses differ from train.py's by {worst}"


def test_two_ranks_learn_what_one_process_learns(serial, cwd):
    assert_equal(train("ddp.py", 2, cwd), serial)


@pytest.mark.extended
def test_a_sharded_run_goes_on_at_another_world_size(serial, cwd):
    first = train("fsdp.py", 2, cwd, steps=7)
    assert_equal(first + train("fsdp.py", 4, cwd), serial)


@pytest.mark.extended
def test_deepspeed_learns_the_same_and_goes_on(serial, cwd):
    first = train("zero.py", 2, cwd, steps=7)
    assert_equal(first + train("zero.py", 2, cwd), serial)


@pytest.mark.extended
@pytest.mark.parametrize("name", ["ddp.py", "fsdp.py"])
def test_a_killed_rank_costs_steps_and_changes_no_loss(name, serial, cwd):
    """SIGKILL after step 8; the last checkpoint is of 6 steps. torchrun starts all ranks anew."""
    command = [*TORCHRUN, "--nproc-per-node=2", "--max-restarts=1", SCRIPTS / name, f"--text={cwd.parent / 'text'}"]
    command += [f"--steps={STEPS}", "--batch=16", "--micro-batch=2", "--save-every=3"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    found = []
    with subprocess.Popen(list(map(str, command)), cwd=cwd, env=env, stdout=subprocess.PIPE, text=True) as job:
        for line in job.stdout:
            found += losses(line)
            if len(found) == 8:
                ranks = [child for child in psutil.Process(job.pid).children() if name in " ".join(child.cmdline())]
                ranks[-1].kill()
                found.append(found[-1])  # so that this happens once
    assert job.returncode == 0
    del found[8]
    again = next(i for i in range(1, len(found)) if found[i][0] <= found[i - 1][0])
    assert found[again][0] % 3 == 0 and found[again][0] >= 6, "it did not go on from the last checkpoint"
    for half in (found[:again], found[again:]):
        assert_equal(half, [pair for pair in serial if half[0][0] <= pair[0] <= half[-1][0]])
    assert found[-1][0] == STEPS - 1


@pytest.mark.slurm
@pytest.mark.extended
def test_srun_starts_the_same_scripts(serial, place, monkeypatch):
    """On two virtual nodes: rank, address and port from what Slurm says; no card that this process chose for itself."""
    for name in ("GLOO_SOCKET_IFNAME", rendezvous._OUR_CARD):
        monkeypatch.setenv(name, "lo")
    for name in ("MASTER_ADDR", "MASTER_PORT"):  # an earlier test of this process may have set it
        monkeypatch.delenv(name, raising=False)
    (place / "text").write_text(Path(__file__).read_text()[:7000])
    with Cluster(nodes=2, share=[SCRIPTS]) as nodes:
        for name in ("ddp.py", "fsdp.py"):
            command = ["bash", SCRIPTS / "with_slurm.sh", sys.executable, SCRIPTS / name, f"--text={place / 'text'}"]
            command += [f"--steps={STEPS}", "--batch=16", "--micro-batch=2", f"--save={place / name}.saved"]
            env = {"OMP_NUM_THREADS": "1"}
            done = nodes.run(command, ntasks=4, cwd=place, env=env, capture_output=True, timeout=300)
            assert done.returncode == 0, done.stderr
            assert_equal(losses(done.stdout), serial)


@pytest.mark.extended
@pytest.mark.slurm
@pytest.mark.timeout(620)
def test_the_launcher_of_your_own_script_trains_one_to_its_end(serial, place):
    """The shipped file, as it is, on two virtual nodes: 8 ranks, whose losses are those of one process."""
    (place / "text").write_text(Path(__file__).read_text()[:7000])
    python = place / ".venv/bin/python"  # where the launcher looks
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    with Cluster(site="perlmutter", nodes=2, share=[SCRIPTS]) as nodes:
        launcher = SCRIPTS.parents[1] / "launchers/perlmutter/your_own.sbatch"
        words = [SCRIPTS / "ddp.py", f"--text={place / 'text'}", f"--steps={STEPS}", "--batch=16", "--micro-batch=2"]
        job = nodes.submit(launcher, "--nodes=2", "--time=10", args=words, cwd=place)
        assert nodes.wait(job, timeout_s=400) == "COMPLETED", (place / f"your_own-{job}.out").read_text()
    assert_equal(losses((place / f"your_own-{job}.out").read_text()), serial)


@pytest.mark.extended
def test_flags_alone_spread_a_trainer_of_transformers(tmp_path):
    flags = ["--max_steps=4", "--logging_steps=1", "--per_device_train_batch_size=4", "--save_strategy=no"]
    flags += ["--report_to=none", "--disable_tqdm=true", "--output_dir=out", "--use_cpu", "--ddp_backend=gloo"]
    said = {}
    for way in ("", "--fsdp", f"--deepspeed={SCRIPTS / 'ds_config.json'}"):
        command = [*TORCHRUN, "--nproc-per-node=2", SCRIPTS / "trainer.py", *flags, *filter(None, [way])]
        done = start(*command, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        said[way] = re.findall(r"'loss': '?([\d.]+)", done.stdout)
    assert len(said[""]) == 4 and len({tuple(found) for found in said.values()}) == 1, said


@pytest.mark.extended
def test_ranks_that_hang_say_where_and_who_did_not_come(tmp_path):
    command = [*TORCHRUN, "--nproc-per-node=2", SCRIPTS / "hang.py", "--patience=5"]
    done = start(*command, cwd=tmp_path)
    assert done.returncode
    assert "Rank 1 failed to pass monitoredBarrier" in done.stderr
    assert "rank 0 recorded number 3: gloo:all_reduce" in done.stdout and "rank 1 recorded number 4" in done.stdout
