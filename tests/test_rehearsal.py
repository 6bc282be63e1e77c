"""A rehearsal is a real Slurm: it accepts, refuses and binds as a site; nothing stays behind."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import rehearsal
from centre import Cluster
from ranks import wait_until

ROOT = Path(__file__).parents[1]

WHO = (
    "echo $SLURM_PROCID $SLURM_LOCALID $(hostname) cuda=$CUDA_VISIBLE_DEVICES "
    "rocr=$ROCR_VISIBLE_DEVICES"
)


def processes_of(folder: Path) -> list[str]:
    """Commands of processes whose environment or command line names the rehearsal in `folder`."""
    found = []
    for process in psutil.process_iter():
        try:
            words = [*process.cmdline(), process.environ().get("SLURM_CONF", "")]
        except psutil.Error:
            continue
        if any(str(folder) in word for word in words):
            found.append(process.name())
    return found


def traces(folder: Path) -> list[str]:
    """Everything left of a rehearsal: files, processes, mounts and network names."""
    left = [str(folder)] if folder.exists() else []
    left += [
        line for line in Path("/proc/self/mounts").read_text().splitlines() if str(folder) in line
    ]
    left += [f"/run/netns/{path.name}" for path in Path("/run/netns").glob("node*")]
    left += [
        line.split(":")[0]
        for line in Path("/proc/net/dev").read_text().splitlines()
        if "rehearsal" in line
    ]
    return left + processes_of(folder)


@pytest.mark.slurm
def test_up_and_down_leaves_nothing_behind_and_two_run_side_by_side():
    with Cluster(nodes=2) as one, Cluster(nodes=1) as other:
        assert "slurmctld" in processes_of(one.folder)
        assert len([name for name in processes_of(one.folder) if name == "slurmd"]) == 2
        for nodes, names in ((one, ["node1", "node2"]), (other, ["node1"])):
            done = nodes.run(["hostname"], capture_output=True)
            assert sorted(done.stdout.split()) == names, done.stderr
    assert traces(one.folder) == traces(other.folder) == []


@pytest.mark.slurm
def test_killing_the_owner_ends_its_cluster():
    code = (
        f"import os, signal, sys; sys.path.append({str(ROOT / 'launchers')!r}); import rehearsal;"
        "nodes = rehearsal.Cluster(nodes=1).start();"
        "print(nodes.folder, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr
    folder = Path(done.stdout.strip())
    wait_until(lambda: traces(folder) == [], 120, "nothing is left of it")


@pytest.mark.slurm
def test_a_batch_job_finds_ranks_hosts_and_devices_as_at_perlmutter(perlmutter, place):
    script = place / "job.sh"
    script.write_text(
        "#!/bin/bash -l\n"
        "#SBATCH -A m1234 -C gpu&hbm80g -q debug -t 5 -N 2 --ntasks-per-node=2 --gpus-per-node=4\n"
        "module load pytorch/2.8.0\n"
        "scontrol show hostnames $SLURM_JOB_NODELIST | xargs\n"
        f"srun --cpus-per-task=32 bash -c '{WHO}'\n"
    )
    assert perlmutter.wait(perlmutter.submit(script, f"--output={place}/out")) == "COMPLETED"
    first, *tasks = (place / "out").read_text().splitlines()
    assert first == "node1 node2"
    assert sorted(tasks) == [f"{i} {i % 2} node{i // 2 + 1} cuda=0,1,2,3 rocr=" for i in range(4)]
    (call,) = perlmutter.calls("module")
    assert (call.node, call.args) == ("node1", ("load", "pytorch/2.8.0"))


@pytest.mark.slurm
def test_each_task_sees_the_gpu_closest_to_its_cores_as_at_frontier(frontier):
    options = [
        "--cpus-per-task=7",
        "--gpus-per-task=1",
        "--gpu-bind=closest",
        "--network=disable_rdzv_get",
    ]
    done = frontier.run(["bash", "-c", WHO], ntasks=16, srun=options, capture_output=True)
    order = (4, 5, 2, 3, 6, 7, 0, 1)  # OLCF's guide
    expected = [f"{i} {i % 8} node{i // 8 + 1} cuda= rocr={order[i % 8]}" for i in range(16)]
    assert sorted(done.stdout.splitlines()) == sorted(expected), done.stderr


ACCOUNT = "Invalid account or account/partition combination specified"
POLICY = "Job violates accounting/QOS policy"


@pytest.mark.slurm
@pytest.mark.parametrize(
    "words, text",
    [
        ("-A m9999 -t 5 -C gpu", ACCOUNT),
        ("-A m1234_g -t 5", "a job must name the kind of its nodes"),
        ("-A m1234_g -t 5 -C gpu -q debug -N 9", f"QOSMaxNodePerJobLimit\n.*{POLICY}"),
    ],
)
def test_perlmutter_refuses_with_slurms_messages(perlmutter, words, text):
    script = perlmutter.folder / "true.sh"
    script.write_text("#!/bin/bash\n")
    with pytest.raises(rehearsal.RehearsalError) as error:
        perlmutter.submit(script, *words.split(), "--output=/dev/null")
    assert re.search(text if ".*" in text else re.escape(text), str(error.value)), error.value


@pytest.mark.slurm
@pytest.mark.parametrize("name", ["frontier", "perlmutter"])
def test_every_launcher_is_accepted_as_shipped(name, request):
    nodes = request.getfixturevalue(name)
    nodes.accepts(ROOT / "launchers" / name)


@pytest.mark.slurm
def test_a_command_that_times_out_is_ended(frontier):
    with pytest.raises(subprocess.TimeoutExpired):
        frontier.login(["sleep", "4711"], timeout=1)
    wait_until(
        lambda: frontier.login(["pgrep", "-f", "sleep 4711"]).returncode == 1,
        100,
        "the command has ended",
    )
