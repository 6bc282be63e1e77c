"""Ranks start though TMPDIR has a long path, or this machine's name leads nowhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from test_security import NAMESPACES

TRAIN = "train ddp --model 1x32 --steps 1 --save-every 0 --nproc 2".split()
RANKS = """
from aiscale.lesson import cluster
ranks = cluster.start(2)
ranks.execute("dist.barrier(); print('rank', rank)")
ranks.stop()
"""
#: Its loader's processes send tensors over sockets in TMPDIR.
LOADS = """
import torch, torch.distributed as dist
from torch.utils.data import DataLoader

if __name__ == "__main__":
    dist.init_process_group("gloo")
    loader = DataLoader(torch.ones(8, 2), batch_size=4, num_workers=1)
    print("sum", sum(batch.sum().item() for batch in loader))
    dist.barrier()
    dist.destroy_process_group()
"""
#: A cell of a lesson that calls torchrun.
LESSON = """
import subprocess, sys
import aiscale.lesson
torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "script.py"]
raise SystemExit(subprocess.run(torchrun).returncode)
"""
#: Fails where this machine's name leads to no address of its own.
KNOWN = "import socket; socket.create_server((socket.gethostbyname(socket.getfqdn()), 0))"
#: In new namespaces, this machine gets a name that nobody knows, and has no network.
OFFLINE = """
set -e
ip link set lo up
hostname laptop-in-a-train
printf '127.0.0.1 localhost\\n' > hosts
mount --bind hosts /etc/hosts
exec "$@"
"""


def run(*words: str, folder: Path, offline: bool = False, timeout: float = 120, **env: str):
    """Run `python WORDS` in `folder`; offline: on a machine without a network."""
    command = [sys.executable, *words]
    if offline:
        command = [*NAMESPACES, "bash", "-c", OFFLINE, "bash", *command]
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    there = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": path, **env}
    there.pop("PET_LOCAL_ADDR", None)
    how = {"capture_output": True, "text": True, "timeout": timeout}
    done = subprocess.run(command, cwd=folder, env=there, **how)
    if offline and done.returncode and ("unshare" in done.stderr or "not permitted" in done.stderr):
        pytest.skip(f"namespaces are not allowed here: {done.stderr.splitlines()[0]}")
    return done


@pytest.fixture
def long_folder(tmp_path):
    folder = tmp_path / ("x" * 110)
    folder.mkdir()
    return str(folder)


@pytest.mark.parametrize(
    "words",
    [
        ["-m", "aiscale", *TRAIN],
        pytest.param(["-c", RANKS], marks=pytest.mark.extended),
        pytest.param(["-c", LESSON], marks=pytest.mark.extended),
    ],
    ids=["aiscale train", "cluster.start", "a lesson's torchrun"],
)
def test_ranks_start_though_no_socket_fits_into_tmpdir(words, tmp_path, long_folder):
    (tmp_path / "script.py").write_text(LOADS)
    done = run(*words, folder=tmp_path, TMPDIR=long_folder)
    assert done.returncode == 0, done.stderr


def test_files_still_go_to_the_long_folder_and_the_link_to_it_goes(tmp_path, long_folder):
    code = "import tempfile; from aiscale import environment\n"
    code += "environment.shorten_temporary_folder()\n"
    code += "file = tempfile.NamedTemporaryFile(delete=False); print(file.name)"
    done = run("-c", code, folder=tmp_path, TMPDIR=long_folder)
    name = Path(done.stdout.strip())
    assert len(str(name)) < 64 and not name.parent.parent.exists(), done.stdout
    assert (Path(long_folder) / name.name).exists()


def test_the_link_goes_after_what_multiprocessing_keeps_behind_it(tmp_path, long_folder):
    code = "from multiprocessing import util\nfrom aiscale import environment\n"
    code += "environment.shorten_temporary_folder(); print(util.get_temp_dir())"
    done = run("-c", code, folder=tmp_path, TMPDIR=long_folder)
    assert done.stderr == ""
    assert not Path(done.stdout.strip()).parents[1].exists()
    assert list(Path(long_folder).iterdir()) == []


@pytest.mark.parametrize("offline", [False, True])
def test_torchrun_meets_at_the_loopback_where_this_machines_name_leads_nowhere(offline, tmp_path):
    code = "import aiscale.lesson, os; print(os.environ.get('PET_LOCAL_ADDR'))"
    done = run("-c", code, folder=tmp_path, offline=offline)
    known = not offline and run("-c", KNOWN, folder=tmp_path).returncode == 0
    assert done.stdout.strip() == ("None" if known else "127.0.0.1"), done.stderr


@pytest.mark.extended
def test_a_lessons_torchrun_ends_on_a_machine_without_a_network(tmp_path):
    (tmp_path / "script.py").write_text(LOADS)
    done = run("-c", LESSON, folder=tmp_path, offline=True)
    assert done.returncode == 0 and done.stdout.count("sum 16.0") == 2, done.stderr


@pytest.mark.parametrize(
    ("offline", "told"),
    [(False, "! TMPDIR "), (True, "! host name        laptop-in-a-train ")],
)
def test_the_doctor_names_both(offline, told, tmp_path, long_folder):
    code = "from aiscale import environment; environment.shorten_temporary_folder()\n"
    code += "from aiscale.site import doctor; doctor._devices = doctor._packages\n"  # without torch
    code += "for finding in doctor.examine(): print(finding.line())"
    env = {} if offline else {"TMPDIR": long_folder}
    done = run("-c", code, folder=tmp_path, offline=offline, **env)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(told)]
    assert " → export " in line
