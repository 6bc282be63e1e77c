"""`aiscale doctor`: yes or no, with what to change."""

import os
import shlex
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest

from aiscale.cli import main
from aiscale.measure.cases import find_mpiexec
from aiscale.site import doctor
from aiscale.site.doctor import GIB, Finding, _resources, alike, check_ranks, settings
from ranks import aiscale

#: `aiscale` with a library that prints a greeting on stdout as ranks connect, as gloo does up to
#: torch 2.12
GREETED = """
import os, torch.distributed as dist
meet = dist.init_process_group
def greet_and_meet(*args, **options):
    os.write(1, b"[Gloo] connected\\n")
    return meet(*args, **options)
dist.init_process_group = greet_and_meet
from aiscale.cli import main
raise SystemExit(main())
"""


def test_a_healthy_machine_passes():
    done = aiscale("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "yes: this is ready to train"
    assert "2 on 1 node: an all-reduce of 16 MiB over gloo in" in done.stdout


def test_a_problem_fails_with_its_remedy(tmp_path):
    command = f"ulimit -n 200; exec {shlex.quote(sys.executable)} -m aiscale doctor --nproc 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert "✗ limits" in done.stdout and "200 open files → ulimit -n " in done.stdout
    assert done.stdout.splitlines()[-1].startswith("no: ")


def test_memory_that_others_use_does_not_count_as_free(monkeypatch):
    def memory(available_gib):
        told = SimpleNamespace(total=64 * doctor.GIB, available=available_gib * doctor.GIB)
        monkeypatch.setattr(doctor.psutil, "virtual_memory", lambda: told)
        return next(finding for finding in doctor.examine() if finding.name == "memory")

    assert memory(1).state == "warning" and "GiB free" in memory(1).remedy
    assert memory(3).state == "ok"


@pytest.mark.extended
def test_the_ranks_of_a_job_answer_together_and_those_bound_to_one_core_are_named(tmp_path):
    bind = f"import os; os.sched_setaffinity(0, [{min(os.sched_getaffinity(0))}])\n"
    command = [
        find_mpiexec(),
        "-n",
        "3",
        sys.executable,
        "-c",
        bind + GREETED,
        "doctor",
        "--device",
        "cpu",
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=300
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("✓ ranks")] == [
        line for line in lines if "3 on 1 node" in line
    ]
    assert (
        len([line for line in lines if line.startswith("! ranks") and "bound to 1 core" in line])
        == 1
    )
    assert len([line for line in lines if line.startswith("✓ packages")]) == 1, (
        "one rank of a node looks at it"
    )
    assert lines[-1] == "yes: this is ready to train"


GIVEN = {"count": 4, "free": 60 * GIB, "fault": None}


@pytest.mark.parametrize(
    ("gpus", "told"),
    [
        ({}, {}),
        ({"count": 3}, {"GPUs": "torch sees 3 of 4"}),
        ({"free": 40 * GIB}, {"GPU 2": "24.0 of 64.0 GiB are taken before anything runs"}),
        ({"fault": "device-side assert"}, {"GPU 2": "device-side assert"}),
        ({"fault": 0.5}, {"GPU 2": "a product of two matrices of ones is wrong"}),
    ],
)
def test_a_gpu_that_lacks_is_taken_or_computes_wrong_is_named(gpus, told, monkeypatch):
    """GPUs of a node are played by this CPU; number 2 is the bad one."""
    import torch

    has = GIVEN | gpus
    multiply = torch.Tensor.__matmul__

    def memory(device):
        return has["free"] if device.index == 2 else 60 * GIB, 64 * GIB

    def ones(*shape, device, **options):
        return torch.full(shape, 1.0 + device.index, device="cpu")

    def product(a, b):
        bad = a[0, 0] == 3  # of GPU 2
        if bad and isinstance(has["fault"], str):
            raise RuntimeError(has["fault"])
        right = multiply(torch.ones_like(a), torch.ones_like(b))
        return right + has["fault"] if bad and has["fault"] else right

    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: has["count"])
    monkeypatch.setattr(torch.cuda, "mem_get_info", memory)
    monkeypatch.setattr(torch, "ones", ones)
    monkeypatch.setattr(torch.Tensor, "__matmul__", product)
    monkeypatch.setattr(doctor, "PRODUCT_SIDE", 8)
    assert {one.name: one.text for one in doctor.each_gpu() if one.state == "wrong"} == told


def test_a_node_answers_for_itself(capsys, monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "node7")
    assert main(["doctor", "--node"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "ready node7"
    lacking = Finding("limits", "wrong", "200 open files", "ulimit -n 4096")
    monkeypatch.setattr(doctor, "examine", lambda: iter([lacking]))
    assert main(["doctor", "--node"]) == 1
    said = capsys.readouterr()
    assert said.out == "" and "node7 ✗ limits" in said.err


def test_a_wrong_sum_is_a_problem(monkeypatch):
    import torch.distributed as dist

    from aiscale.measure.distributed import connect

    world = connect("cpu")
    assert [finding.state for finding in check_ranks(world)] == ["ok"]
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: tensor[-1].add_(1))
    (finding,) = check_ranks(world)
    world.close()
    assert finding.state == "wrong" and "gave a wrong sum" in finding.text


def test_what_decides_about_the_network_and_binding_is_printed():
    env = {
        "NCCL_NET": "OFI",
        "FI_MR_CACHE_MONITOR": "kdreg2",
        "HOME": "/x",
        "LOADEDMODULES": "rocm/7.1.1:rccl/1",
    }
    variables, modules = settings(env)
    assert (
        variables.text == "FI_MR_CACHE_MONITOR=kdreg2 NCCL_NET=OFI"
        and modules.text == "rocm/7.1.1 rccl/1"
    )


@pytest.mark.parametrize(("available_gib", "state"), [(2, "warning"), (3, "ok")])
def test_memory_is_judged_by_what_is_free_not_by_what_there_is(available_gib, state, monkeypatch):
    memory = SimpleNamespace(total=64 * GIB, available=available_gib * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    (finding,) = [finding for finding in _resources() if finding.name == "memory"]
    assert finding.state == state and ("2.0 of 64 GiB free" in finding.text) == (state == "warning")


def test_findings_shared_by_nodes_are_reported_once():
    good, bad = Finding("memory", "ok", "8 GiB"), Finding("memory", "wrong", "1 GiB", "more")
    assert [one.text for one in alike({"a": [good], "b": [good], "c": [bad]})] == [
        "8 GiB  [a, b]",
        "1 GiB  [c]",
    ]
    assert alike({"a": [good], "b": [good]}) == [good]
