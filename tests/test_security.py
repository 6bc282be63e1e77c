"""No port is open beyond loopback outside jobs, no file is world-writable, no secret is printed."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import listening
from aiscale import cluster
from aiscale.cluster import guard
from aiscale.processes import marked

ROOT = Path(__file__).parents[1]

#: In new namespaces this machine gets a name that resolves to a network address, as a server has.
ON_A_NETWORK = """
set -e
ip link set lo up
ip link add out type veth peer name far
ip addr add 10.77.0.1/24 dev out
ip link set out up
ip link set far up
hostname classroom
printf '127.0.0.1 localhost\\n10.77.0.1 classroom\\n' > hosts
mount --bind hosts /etc/hosts
exec "$@"
"""
NAMESPACES = ["unshare", "--net", "--uts", "--mount", "--propagation=private"]
NAMESPACES += [] if os.geteuid() == 0 else ["--user", "--map-root-user"]

TINY = "--set model.n_layer=1 --set model.n_head=2 --set model.d_model=16 --set loop.steps=1000000 --quiet".split()

#: Three ways to start ranks on one machine; each prints where they listen. `seen` waits until the ranks have connected.
LOOK = """
import json, os, subprocess, sys, time
sys.path.insert(0, {tests!r})
import listening
from aiscale import cluster
from aiscale.cluster import guard
from aiscale.distributed.rendezvous import choose_gloo_interface
from aiscale.processes import marked

def beyond(pids):
    return [len(listening.sockets(pids)), listening.beyond_loopback(pids)]

def seen(processes, wanted):
    deadline = time.monotonic() + 120
    while True:
        pids = [pid for process in processes for pid in listening.descendants(process.pid)]
        if len(listening.sockets(pids)) >= wanted or time.monotonic() > deadline:
            return beyond(pids)
        time.sleep(0.2)

train = ["-m", "aiscale", "train", "--runs-dir", {runs!r}, *{tiny!r}]
launched = subprocess.Popen([sys.executable, *train, "--set", "parallel.strategy=ddp", "--nproc", "2"])
code = "from aiscale.distributed import connect; world = connect('cpu'); world.barrier(); input()"
by_hand = []
for rank in range(2):
    env = os.environ | dict(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29577")
    by_hand.append(subprocess.Popen([sys.executable, "-c", code], env=env, stdin=subprocess.PIPE))
alone = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
ranks = cluster.start(2, start_timeout_s=120)
ranks.execute("dist.barrier()")
report = dict(engines=beyond([os.getpid(), *marked(guard.MARKER, ranks.run(os.getenv, guard.MARKER)[0])]))
ranks.stop()
report |= dict(by_hand=seen(by_hand, 3), alone=seen([alone], 1), launched=seen([launched], 3))
for process in (launched, alone, *by_hand):
    process.terminate()
    process.wait(60)

def card(meeting_point, own_address):  # the hosts file of this namespace decides where the machine's name leads
    with open("hosts", "w") as hosts:
        hosts.write("127.0.0.1 localhost\\n" + (f"{{own_address}} classroom\\n" if own_address else ""))
    choose_gloo_interface(meeting_point)
    return os.environ.get("GLOO_SOCKET_IFNAME")

elsewhere = "10.77.0.9"
cards = dict([
    ("on this machine", card("127.0.0.1", "10.77.0.1")),
    ("elsewhere, and others find this one by its name", card(elsewhere, "10.77.0.1")),
    ("elsewhere, and its name leads to nowhere else", card(elsewhere, "127.0.1.1")),
    ("elsewhere, and its name leads to nowhere", card(elsewhere, "")),
])
os.environ["GLOO_SOCKET_IFNAME"] = "chosen"
cards["elsewhere, and somebody has chosen"] = card(elsewhere, "")
cards["on this machine, and somebody has chosen"] = card("127.0.0.1", "")
print("\\n" + json.dumps(dict(report, cards=cards)))
"""


@pytest.fixture(scope="module")
def on_a_network(tmp_path_factory):
    """(sockets, those beyond loopback) by the way in which ranks were started."""
    folder = tmp_path_factory.mktemp("network")
    (folder / "look.py").write_text(LOOK.format(tests=str(ROOT / "tests"), runs=str(folder / "runs"), tiny=TINY))
    command = [*NAMESPACES, "bash", "-c", ON_A_NETWORK, "bash", sys.executable, "look.py"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    env.pop("GLOO_SOCKET_IFNAME", None)
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=280)
    if done.returncode and ("unshare" in done.stderr or "not permitted" in done.stderr):
        pytest.skip(f"namespaces are not allowed here: {done.stderr.splitlines()[0]}")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("way", "least"), [("engines", 10), ("launched", 3), ("by_hand", 3), ("alone", 1)])
def test_ranks_on_one_machine_listen_on_the_loopback_only(on_a_network, way, least):
    sockets, beyond = on_a_network[way]
    assert sockets >= least, "they do listen"
    assert beyond == []


def test_gloo_uses_the_network_if_ranks_connect_on_it(on_a_network):
    assert on_a_network["cards"] == {
        "on this machine": "lo",
        "elsewhere, and others find this one by its name": "out",
        "elsewhere, and its name leads to nowhere else": "out",
        "elsewhere, and its name leads to nowhere": "out",
        "elsewhere, and somebody has chosen": "chosen",
        "on this machine, and somebody has chosen": "chosen",
    }


def open_to_all(folder: Path) -> list[Path]:
    """World-writable files below a folder that others can reach."""
    mode = folder.stat().st_mode
    found = [folder] if mode & stat.S_IWOTH and not mode & stat.S_ISVTX else []
    if mode & stat.S_IXOTH:
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                found += open_to_all(path)
            elif not path.is_symlink() and path.stat().st_mode & stat.S_IWOTH:
                found.append(path)
    return found


@pytest.fixture(scope="module")
def engines():
    """Ranks started with a permissive umask: (folder, pids, keys)."""
    mask = os.umask(0)
    try:
        with cluster.start(2) as ranks:
            ranks.execute("print('a line of rank', rank)")
            cluster_id, folder = ranks.run(lambda: (os.environ[guard.MARKER], Path(os.environ["IPYTHONDIR"]).parent))[0]
            files = list(folder.rglob("ipcontroller-*.json"))
            keys = {json.loads(path.read_text())["key"] for path in files}
            yield folder, [os.getpid(), *marked(guard.MARKER, cluster_id)], files, keys
    finally:
        os.umask(mask)


def test_connection_files_are_private_whatever_the_umask(engines):
    folder, _, files, _ = engines
    assert len(files) == 2 and {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and open_to_all(folder) == []


def test_no_key_is_in_a_log_or_a_command_line(engines):
    folder, pids, files, keys = engines
    said = listening.command_lines(pids)
    assert "ipyparallel.controller" in said and all(keys)
    said += "".join(
        path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file() and path not in files
    )
    assert [key for key in keys if key in said] == []
