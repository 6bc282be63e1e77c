"""No port is open beyond the loopback, no file is world-writable, no secret is printed.
Nobody else can write where ranks meet or where compiled code lies."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import listening
from aiscale import private
from aiscale.lesson import cluster
from aiscale.lesson.cluster import guard
from aiscale.processes import marked
from aiscale.site.kernel import start_script

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

#: A command as another user, who is nobody.
STRANGER = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]

TINY = "--model 1x32 --steps 1000000 --save-every 0".split()

#: Three ways to start ranks on one machine; each prints where they listen. `seen` waits until the
#: ranks have connected.
LOOK = """
import json, os, subprocess, sys, time
sys.path.insert(0, {tests!r})
import listening
from aiscale.lesson import cluster
from aiscale.lesson.cluster import guard
from aiscale.measure.distributed.rendezvous import choose_gloo_interface
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

train = ["-m", "aiscale", "train", "ddp", "--save", {runs!r}, *{tiny!r}]
launched = subprocess.Popen([sys.executable, *train, "--nproc", "2"])
connected = "from aiscale.measure.distributed import connect; world = connect('cpu')"
code = f"{{connected}}; world.barrier(); input()"
by_hand = []
for rank in range(2):
    env = os.environ | dict(RANK=str(rank), WORLD_SIZE="2")
    env |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT="29577")
    by_hand.append(subprocess.Popen([sys.executable, "-c", code], env=env, stdin=subprocess.PIPE))
in_slurm = []
for rank in range(2):  # a step on one node, from a launcher that exports the node's address
    env = os.environ | dict(SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank))
    env |= dict(SLURM_STEP_NUM_TASKS="2", SLURM_STEP_NUM_NODES="1", SLURM_JOB_ID="1")
    env |= dict(SLURM_STEP_ID="0", MASTER_ADDR="10.77.0.1")
    env["SLURM_STEP_LAUNCHER_PORT"] = str(os.getpid())  # of this step alone
    in_slurm.append(subprocess.Popen([sys.executable, "-c", code], env=env, stdin=subprocess.PIPE))
alone = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
ranks = cluster.start(2, start_timeout_s=120)
ranks.execute("dist.barrier()")
engines = marked(guard.MARKER, ranks.run(os.getenv, guard.MARKER)[0])
report = dict(engines=beyond([os.getpid(), *engines]))
ranks.stop()
report |= dict(by_hand=seen(by_hand, 3), alone=seen([alone], 1), launched=seen([launched], 2))
report |= dict(in_slurm=seen(in_slurm, 2))
for process in (launched, alone, *by_hand, *in_slurm):
    process.terminate()
    process.wait(60)

# the hosts file of this namespace decides where the machine's name leads
def card(meeting_point, own_address):
    own = f"{{own_address}} classroom\\n" if own_address else ""
    with open("hosts", "w") as hosts:
        hosts.write("127.0.0.1 localhost\\n" + own)
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
    (folder / "look.py").write_text(
        LOOK.format(tests=str(ROOT / "tests"), runs=str(folder / "runs"), tiny=TINY)
    )
    command = [*NAMESPACES, "bash", "-c", ON_A_NETWORK, "bash", sys.executable, "look.py"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    env.pop("GLOO_SOCKET_IFNAME", None)
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=280)
    if done.returncode and ("unshare" in done.stderr or "not permitted" in done.stderr):
        pytest.skip(f"namespaces are not allowed here: {done.stderr.splitlines()[0]}")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("way", "least"),
    [("engines", 10), ("launched", 2), ("by_hand", 3), ("in_slurm", 2), ("alone", 1)],
)
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
            cluster_id, folder = ranks.run(
                lambda: (os.environ[guard.MARKER], Path(os.environ["IPYTHONDIR"]).parent)
            )[0]
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
        path.read_text(errors="replace")
        for path in folder.rglob("*")
        if path.is_file() and path not in files
    )
    assert [key for key in keys if key in said] == []


def test_another_user_cannot_enter_the_store_of_ranks(engines):
    folder, *_ = engines
    stores = list(folder.glob("store-*"))
    assert stores, "the ranks meet there, and at no port"
    if os.geteuid() != 0:
        pytest.skip(
            "only root can become another user; that the folder's mode is 0700 was tested above"
        )
    for attack in (["cat", stores[0]], ["ls", folder], ["touch", folder / "store-mine"]):
        done = subprocess.run([*STRANGER, *attack], capture_output=True, text=True)
        assert done.returncode and "Permission denied" in done.stderr, attack


@pytest.fixture(params=["open to all", "a link", "another user's"])
def taken(request, tmp_path, monkeypatch):
    """A folder for temporary files where a stranger has made the folder that this user would."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    name = tmp_path / f"aiscale-{os.getuid()}"
    if request.param == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        name.symlink_to(tmp_path / "elsewhere")
    else:
        name.mkdir(mode=0o700)
    if request.param == "open to all":
        name.chmod(0o777)
    if request.param == "another user's":
        if os.geteuid() != 0:
            pytest.skip("only root can give a folder to another user")
        os.chown(name, 65534, 65534)
    return name


def test_compiled_code_is_not_loaded_from_a_folder_that_a_stranger_made(taken, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    private.keep_caches_private()
    chosen = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).parent
    assert chosen != taken and stat.S_IMODE(chosen.stat().st_mode) == 0o700
    with pytest.raises(PermissionError, match="remove it, or set TMPDIR to a folder of your own"):
        private.named_folder()


def test_a_kernel_does_not_load_code_from_a_folder_that_a_stranger_made(taken):
    cache = started_kernel(taken.parent)
    assert cache.parent != taken and stat.S_IMODE(cache.parent.stat().st_mode) == 0o700


def test_kernels_share_one_private_folder_and_leave_no_other(tmp_path):
    caches = {started_kernel(tmp_path) for _ in range(2)}
    assert caches == {tmp_path / f"aiscale-{os.getuid()}" / "inductor"}
    assert [path.name for path in tmp_path.iterdir() if path.name != "start.sh"] == [
        f"aiscale-{os.getuid()}"
    ]


def started_kernel(tmpdir: Path) -> Path:
    """The cache of compiled code in a kernel that starts with this TMPDIR."""
    script = tmpdir / "start.sh"
    script.write_text(start_script("mine", Path(sys.prefix), None, "", {}))
    env = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    command = ["bash", script, "-c", "import os; print(os.environ['TORCHINDUCTOR_CACHE_DIR'])"]
    done = subprocess.run(
        command, env={**env, "TMPDIR": str(tmpdir)}, capture_output=True, text=True, check=True
    )
    return Path(done.stdout.strip())


@pytest.mark.parametrize(
    "file",
    sorted(ROOT.glob("launchers/*/site.sh")),
    ids=lambda file: file.parent.name,
)
def test_launchers_keep_compiled_code_in_a_new_folder(file):
    text = file.read_text()
    assert 'caches="$(mktemp -d)"' in text and 'TORCHINDUCTOR_CACHE_DIR="$caches/' in text
    assert "/tmp/$" not in text, "whoever makes a folder there first can put code into it"
