"""Replicas of workshop/your_own go on when one is killed, lose no step, and heal the new one."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from aiscale.lesson.replicas import Replicas
from listening import beyond_loopback, environment
from ranks import wait_until

SCRIPTS = Path(__file__).parents[1] / "workshop" / "your_own"


@pytest.fixture
def members(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    yield importlib.import_module("members")
    del sys.modules["members"]


def test_a_newcomer_alone_begins_no_round(members, tmp_path):
    """Before the first round it waits for all, later for one who knows the weights."""
    newcomer = members.Members(tmp_path / "meet", "r0", 3, patience_s=1)
    with pytest.raises(SystemExit, match="r0-.* has waited 1 s for others"):
        newcomer.gather(-1)
    newcomer._decide(1, {"r1-1": -1, "r2-1": -1})  # newcomers, who train by now
    with pytest.raises(SystemExit, match="has waited"):
        newcomer.gather(-1)
    assert newcomer._newest()[0] == 1


def test_one_who_knows_the_weights_goes_on_alone(members, tmp_path):
    survivor = members.Members(tmp_path / "meet", "r0", 3, patience_s=30)
    survivor._decide(1, {survivor.name: 7, "r1-1": 6})
    (tmp_path / "meet/gone-r1-1").touch()
    assert survivor.gather(7) == [7] and (survivor.round, survivor.size) == (2, 1)
    survivor.leave()


def test_who_lives_is_waited_for_until_it_counts_as_dead(members, tmp_path, monkeypatch):
    """One who is first at the door must not train alone while another is on its way."""
    monkeypatch.setattr(members, "DEAD_S", 1.5)
    first = members.Members(tmp_path / "meet", "r0", 3, patience_s=30)
    first._decide(1, {first.name: 7, "r1-1": 7})
    began = time.monotonic()
    assert first.gather(7) == [7]
    first.leave()
    assert time.monotonic() - began > 1.5


def test_a_round_is_decided_once(members, tmp_path):
    first, second = (members.Members(tmp_path / "meet", name, 2) for name in ("r0", "r1"))
    first._decide(1, {"a": 3})
    second._decide(1, {"b": 4})
    assert second._newest() == (1, {"a": 3})


def test_a_folder_that_others_can_open_is_refused(members, tmp_path):
    tmp_path.chmod(0o755)
    with pytest.raises(SystemExit, match="name a folder of your own with mode 700"):
        members.Members(tmp_path, "r0", 3)


def losses_of_one_process(folder: Path, steps: int) -> list[float]:
    command = [sys.executable, "train.py", f"--steps={steps}", "--batch=16"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return [float(loss) for loss in re.findall(r"loss (\S+)", done.stdout)]


@pytest.mark.extended
@pytest.mark.timeout(600)
def test_two_deaths_cost_no_step_and_all_replicas_end_with_the_same_weights(tmp_path):
    """r0, the rank 0, and then r2. The others stand still until the new one is at the door."""
    folder, steps = tmp_path / "scripts", 20
    shutil.copytree(SCRIPTS, folder)
    with Replicas(folder, f"--steps={steps}", "--sequence-s=0.02") as job:
        for step, dead in ((3, "r0"), (9, "r2")):
            job.until(rf"step {step} loss")
            assert sys.platform == "darwin" or beyond_loopback(job.pids()) == []
            job.kill(dead)
            job.until("members 2 ")
            others = {"r0", "r1", "r2"} - {dead}
            job.pause(*others)
            job.until_at_the_door(dead)
            job.go_on(*others)
            job.until("members 3 ")
        pids = job.pids()
        job.wait()
    taken = [step for _, step, *_ in job.steps()]
    # Whoever completes the sum in which another dies has done the step, and need not be rank 0.
    assert taken == sorted(set(taken)) and taken[-1] == steps - 1 and len(taken) >= steps - 2
    assert job.steps()[-1][-1] == 3, "the new replica took steps, too"
    right = losses_of_one_process(folder, steps)
    assert all(abs(loss - right[step]) < 2e-5 for _, step, loss, _ in job.steps())
    assert set(job.states()) == {"r0", "r1", "r2"} and len(set(job.states().values())) == 1
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


@pytest.mark.extended
def test_a_job_that_is_left_takes_its_replicas_with_it(tmp_path, monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    folder = tmp_path / "scripts"
    shutil.copytree(SCRIPTS, folder)
    with pytest.raises(RuntimeError, match="ended with status 2"), Replicas(folder, "--no") as job:
        job.wait()
    with Replicas(folder, "--steps=1000") as job:
        job.until("step 0 loss")
        pids = job.pids()
        assert len(pids) == 3 and all(map(psutil.pid_exists, pids))
        if sys.platform == "linux":
            assert environment(pids[0])["GLOO_SOCKET_IFNAME"] == "lo", "gloo listens there alone"
    assert not any(map(psutil.pid_exists, pids)), "they ended before the block did"
    assert not job.meet.exists()


def test_a_script_that_fails_by_itself_is_started_five_times(tmp_path):
    """Under `sbatch keep_going.sh`, here with an `srun` that fails at once."""
    programs = {"srun": f"echo started >> {tmp_path}/calls; exit 1", "sleep": "exit 0"}
    for name, line in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o700)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "GLOO_SOCKET_IFNAME": "lo"}
    env["MEET"] = str(tmp_path / "meet")
    subprocess.run(
        ["bash", SCRIPTS / "keep_going.sh", "1", "wrong.py"], env=env, check=True, timeout=60
    )
    assert (tmp_path / "calls").read_text().split() == ["started"] * 5


@pytest.mark.slurm
@pytest.mark.extended
@pytest.mark.timeout(900)
def test_under_slurm_a_replica_of_a_dead_node_is_healed_on_a_spare_one(place):
    from centre import Cluster

    shutil.copytree(SCRIPTS, place, dirs_exist_ok=True)
    steps, output = 120, place / "job.out"
    options = f"3 train_elastic.py --batch 16 --steps {steps} --sequence-s 0.05".split()

    def said() -> str:
        return output.read_text() if output.exists() else ""

    with Cluster(site="generic", nodes=4) as nodes:
        job = nodes.submit(
            place / "keep_going.sh",
            "--time=30",
            "--output=job.out",
            *nodes.asked,
            args=options,
            cwd=place,
            env={"GLOO_SOCKET_IFNAME": "eth0"},
        )
        wait_until(lambda: "step 5 loss" in said(), 300, "three replicas train")
        shown = nodes.login(["squeue", "--steps", "--format=%i %N"], capture_output=True).stdout
        dead = re.search(rf"{job}\.2 (node\d)", shown)[1]
        nodes.login(["scontrol", "update", f"node={dead}", "state=down", "reason=dead"], check=True)
        wait_until(lambda: "round 3 members 3" in said(), 300, "a third replica is healed")
        assert nodes.wait(job, timeout_s=300) == "COMPLETED", said()
    taken = {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss (\S+)", said())}
    right = losses_of_one_process(place, steps)
    assert list(taken) == list(range(steps))
    assert all(abs(loss - right[step]) < 1e-4 for step, loss in taken.items())
    assert len(set(re.findall(r"state (\S+)", said()))) == 1, "all end with the same weights"
