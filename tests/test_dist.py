"""Processes connect under every launcher, and say in one line why if they cannot."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time

import psutil
import pytest

from aiscale.measure.distributed import ConnectError, Launch, Traffic, connect, find_launch
from aiscale.measure.distributed.counter import Group
from aiscale.measure.distributed.rendezvous import meeting_point
from aiscale.private import STORE
from aiscale.processes import start_python
from ranks import forked, processes_with, run_ranks, wait_until

SUM = (
    "x = torch.ones(3) * world.rank; dist.all_reduce(x); "
    "say(world.rank, world.size, world.launcher, x[0].item())"
)


@pytest.mark.parametrize(
    "launcher",
    [
        "torchrun",
        *(pytest.param(name, marks=pytest.mark.extended) for name in ("aiscale", "mpiexec")),
    ],
)
def test_three_ranks_connect_under(launcher, tmp_path):
    done = run_ranks(SUM, 3, tmp_path, launcher=launcher)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{rank} 3 {launcher} 3.0" for rank in range(3)]


def test_a_single_process_has_world_size_1(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    world = connect("cpu")
    assert (world.rank, world.size, world.launcher) == (0, 1, "none")
    assert (
        world.from_rank0(lambda: "hello") == "hello" and world.sum(3) == 3 and not world.any(False)
    )
    world.close()
    world.close()


SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_LOCALID": "3",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, ("none", 0, 1, 0, 1)),
        ({"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}, ("torchrun", 1, 2, 0, 2)),
        (SRUN, ("srun", 3, 16, 3, 8)),
        (
            {**SRUN, "RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"},
            ("torchrun", 1, 2, 0, 2),
        ),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
            ("mpiexec", 1, 4, 1, 2),
        ),
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}, ("mpiexec", 2, 4, 0, 4)),
        # A batch script knows how many tasks srun would start, but is itself one process.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "16"}, ("none", 0, 1, 0, 1)),
        ({"WORLD_SIZE": "4"}, ("none", 0, 1, 0, 1)),  # some clusters set it for every process
    ],
)
def test_rank_and_world_size_are_read_from_each_launchers_variables(env, expected):
    found = find_launch(env)
    assert (found.launcher, found.rank, found.size, found.local_rank, found.local_size) == expected


def test_a_missing_mpi_library_is_reported_with_the_remedy(tmp_path):
    env = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI4PY_LIBMPI": str(tmp_path / "libmpi.so")}
    code = "from aiscale.measure.distributed import connect; connect('cpu')"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True
    )
    last = done.stderr.strip().splitlines()[-1]
    assert (
        "mpi4py cannot load an MPI library" in last
        and "pip install mpich, or load a module" in last
    )


def test_ranks_without_a_meeting_point_are_refused(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(
        ConnectError,
        match="gave RANK 0 of WORLD_SIZE 2 but no MASTER_ADDR and MASTER_PORT: set both",
    ):
        meeting_point(Launch(launcher="environment", size=2))


def test_the_first_host_of_a_slurm_step_is_found_without_scontrol(monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_NODES", "4")
    monkeypatch.setenv("PATH", "")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for nodes, first in [
        ("frontier[00123-00125,7]", "frontier00123"),
        ("nid1,nid2", "nid1"),
        ("a-b[3]", "a-b3"),
    ]:
        monkeypatch.setenv("SLURM_STEP_NODELIST", nodes)
        assert meeting_point(Launch(launcher="srun", size=8))[0] == first


def test_steps_of_slurm_on_several_nodes_meet_at_ports_of_their_own(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_STEP_NUM_NODES", "2")
    monkeypatch.setenv("SLURM_STEP_NODELIST", "nid[1-2]")
    ports = []
    for job, step in (("4300", "0"), ("4300", "1"), ("4301", "0")):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        monkeypatch.setenv("SLURM_STEP_ID", step)
        ports.append(meeting_point(Launch(launcher="srun", size=8))[1])
    assert len(set(ports)) == 3 and all(1024 < port < 32768 for port in ports), (
        "Linux gives the others to connections"
    )


def test_a_step_on_one_node_meets_at_a_private_file_whatever_the_launcher_exports(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("MASTER_PORT", STORE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "node1")  # as every launcher does
    monkeypatch.setenv("SLURM_STEP_NUM_NODES", "1")
    files = set()
    # the last one was requeued
    for step in (("7", "0", "40001"), ("7", "1", "40002"), ("7", "0", "40003")):
        for name, value in zip(("JOB_ID", "STEP_ID", "STEP_LAUNCHER_PORT"), step, strict=True):
            monkeypatch.setenv(f"SLURM_{name}", value)
        where = meeting_point(Launch(launcher="srun", size=8))
        assert where == meeting_point(Launch(launcher="srun", size=8, rank=1))
        files.add(where)
    assert len(files) == 3 and {path.parent.stat().st_mode & 0o777 for path in files} == {0o700}


def test_what_ranks_gather_is_data_and_no_code(tmp_path):
    code = """
    say(world.gather({"rank": world.rank, "words": ("ä", 1.5, None)}))
    try:
        world.gather(Path("x"))
    except TypeError as error:
        say(error)
    """
    done = run_ranks("from pathlib import Path\n" + textwrap.dedent(code), 2, tmp_path)
    every = str([{"rank": rank, "words": ["ä", 1.5, None]} for rank in range(2)])
    lines = done.stdout.splitlines()
    assert sorted(lines) == sorted(
        [every, every, *["Object of type PosixPath is not JSON serializable"] * 2]
    ), done


def test_a_port_in_use_is_named(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        code = "from aiscale.measure.distributed import connect; connect('cpu', timeout_s=20)"
        done = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True
        )
    last = done.stderr.strip().splitlines()[-1]
    assert last.endswith(
        f"127.0.0.1:{port} is already in use by another process: set MASTER_PORT to a free port"
    )


def test_a_rank_that_times_out_names_the_missing_rank():
    # Bound and never listening: nobody else can take the port meanwhile, and whoever connects is
    # refused.
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        code = "from aiscale.measure.distributed import connect; connect('cpu', timeout_s=2)"
        done = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True
        )
    assert (
        f"rank 1 of 2 waited 2 s at 127.0.0.1:{port} for the others"
        in done.stderr.strip().splitlines()[-1]
    )


def test_ranks_connect_even_if_the_host_name_does_not_resolve(tmp_path):
    # A broken look-up of this host's name, as on a laptop without network.
    (tmp_path / "sitecustomize.py").write_text(
        "import socket\nreal = socket.getaddrinfo\n"
        "def fail(host, *a, **k):\n"
        "    if host == socket.gethostname(): "
        "raise socket.gaierror(-2, 'Name or service not known')\n"
        "    return real(host, *a, **k)\n"
        "socket.getaddrinfo = fail\n"
    )
    code = "say(os.environ['GLOO_SOCKET_IFNAME'], world.sum(1.0))"
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    done = run_ranks(code, 2, tmp_path, launcher="aiscale", env={"PYTHONPATH": path})
    assert done.stdout.splitlines() == ["lo 2.0"] * 2, done.stderr


def test_an_error_on_rank_0_reaches_every_rank(tmp_path):
    code = """
    def make():
        raise ValueError("no such corpus")
    try:
        world.from_rank0(make)
    except ValueError as error:
        say(error)
    """
    done = run_ranks(code, 2, tmp_path)
    assert done.stdout.splitlines() == ["no such corpus"] * 2, done.stderr


def test_a_killed_rank_is_named_and_ends_the_others(tmp_path):
    code = """
    import signal, time
    if world.rank == 1:
        open("struck", "w").write(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
    """
    done = run_ranks(code, 3, tmp_path, launcher="aiscale")
    assert time.time() - float((tmp_path / "struck").read_text()) < 20
    assert "aiscale: rank 1 of 3 died: signal 9 (SIGKILL); stopping the other 2" in done.stderr
    assert done.returncode == 128 + signal.SIGKILL
    assert not processes_with(str(tmp_path / "ranks.py"))


def test_every_collective_is_counted_with_its_payload(tmp_path):
    code = """
    x, parts = torch.ones(6), [torch.empty(6) for _ in range(2)]
    dist.all_reduce(x)
    dist.broadcast(x, 0)
    dist.all_gather(parts, x)
    dist.all_gather_into_tensor(torch.empty(12), x)
    dist.reduce_scatter_tensor(torch.empty(3), x)
    (dist.send if world.rank == 0 else dist.recv)(x, 1 - world.rank)
    world.barrier()
    with world.control():
        dist.all_reduce(torch.ones(1000))
    counts = {op: (c.calls, c.payload_bytes) for (op, size), c in world.traffic.snapshot().items()}
    say(sorted(counts.items()), world.traffic.control_counts["all_reduce", 2].payload_bytes)
    """
    done = run_ranks(code, 2, tmp_path)
    expected = {
        "all_gather": (2, 96),
        "all_reduce": (1, 24),
        "broadcast": (1, 24),
        "reduce_scatter": (1, 24),
    }
    for line, last in zip(sorted(done.stdout.splitlines()), ("recv", "send"), strict=True):
        assert line == f"{sorted({**expected, last: (1, 24)}.items())} 4000", done.stderr


def test_traffic_since_a_snapshot_excludes_earlier_traffic():
    traffic = Traffic()
    traffic.add("all_reduce", pair := Group("world", (0, 1)), 100)
    before = traffic.snapshot()
    assert traffic.since(before) == {}
    traffic.add("all_reduce", pair, 50)
    (count,) = traffic.since(before).values()
    assert (count.calls, count.payload_bytes) == (1, 50)


RANKS_ENV = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
linux = pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux only")


def launching(n: int, preload=("torch._dynamo",)) -> list[str]:
    """The command that runs the module `in_a_rank` as `n` ranks."""
    code = f"raise SystemExit(aiscale.launch.launch({n}, ['-m', 'in_a_rank'], preload={preload!r}))"
    return [sys.executable, "-c", f"import aiscale.launch; {code}"]


def launched(code: str, folder, *, n: int = 2) -> subprocess.CompletedProcess:
    (folder / "in_a_rank.py").write_text(code)
    env = RANKS_ENV | {"PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}
    return subprocess.run(launching(n), capture_output=True, text=True, timeout=240, env=env)


@linux
def test_ranks_are_forked_from_a_process_with_one_thread_that_has_imported_what_they_need(tmp_path):
    code = """
import os, sys
imported = "torch._dynamo" in sys.modules
from aiscale.measure.distributed import connect
world = connect("cpu")
threads = len(os.listdir(f"/proc/{os.getppid()}/task"))
as_new = sys.argv[0] == __file__ and __name__ == "__main__"
os.write(1, f"{imported} {threads} {world.sum(world.rank)} {world.launcher} {as_new}\\n".encode())
world.close()
"""
    done = launched(code, tmp_path, n=3)
    assert done.stdout.splitlines() == ["True 1 3.0 aiscale True"] * 3, done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("end", "status", "message"),
    [
        ("sys.exit(7)", 7, "aiscale: rank 1 of 2 failed with exit status 7"),
        (
            "os.kill(os.getpid(), 9)",
            137,
            "aiscale: rank 1 of 2 died: signal 9 (SIGKILL); stopping the other 1",
        ),
        ("raise KeyError('bug')", 1, "KeyError: 'bug'"),
    ],
)
def test_a_rank_that_ends_early_is_named_and_ends_the_others(end, status, message, tmp_path):
    code = f"""
import atexit, os, sys, time
print("buffered", flush=False)
atexit.register(print, "at the end")
if os.environ["RANK"] == "1":
    {end}
time.sleep(600)
"""
    done = launched(code, tmp_path)
    assert done.returncode == status and message in done.stderr, done.stderr
    assert done.stdout.count("at the end") == ("kill" not in end), done.stdout


@linux
@pytest.mark.parametrize("preload", [(), ("torch",)], ids=["started", "forked"])
def test_ranks_do_not_outlive_their_launcher(preload, tmp_path):
    note = tmp_path / "pids"
    code = (
        f"import os, time; open({str(note)!r}, 'a').write(f'{{os.getpid()}} {{os.getppid()}} '); "
        "time.sleep(600)"
    )
    (tmp_path / "in_a_rank.py").write_text(code)
    env = RANKS_ENV | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    parent = subprocess.Popen(launching(2, preload), env=env)
    wait_until(lambda: note.exists() and note.read_text().count(" ") == 4, 120, "two ranks started")
    # theirs, and that of the process that forked them
    pids = {int(pid) for pid in note.read_text().split()}
    parent.kill()
    wait_until(
        lambda: not any(map(psutil.pid_exists, pids - {parent.pid})), 60, "the ranks are gone"
    )
    parent.wait()


@linux
def test_ranks_can_answer_a_signal_to_their_whole_group(tmp_path):
    """As `timeout` sends it; the process that forks them must not end by it, and end them."""
    code = f"""
import os, signal, sys, time
def end(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(9)
signal.signal(signal.SIGTERM, end)
open({str(tmp_path)!r} + "/ready" + os.environ["RANK"], "w").close()
time.sleep(600)
"""
    (tmp_path / "in_a_rank.py").write_text(code)
    env = RANKS_ENV | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    parent = subprocess.Popen(
        launching(2), env=env, start_new_session=True, stderr=subprocess.DEVNULL
    )
    wait_until(lambda: len(list(tmp_path.glob("ready*"))) == 2, 120, "two ranks started")
    os.killpg(parent.pid, signal.SIGTERM)
    assert parent.wait(60) == 9


PROBE = """
import os, random, sys, numpy, torch
mine, home = os.environ.get("MINE"), os.environ.get("HOME")
print(__name__, __file__, sys.argv, os.getcwd(), mine, home, sys.path[:2])
print(torch.get_num_threads(), sys.stdin.read(), os.isatty(1))
assert len({random.random(), numpy.random.rand()}) == 2
print("an error", file=sys.stderr)
sys.exit(7)
"""


def test_a_forked_command_has_its_own_folder_environment_output_and_status(tmp_path):
    (tmp_path / "probe.py").write_text(PROBE)
    (tmp_path / "here").mkdir()
    env = {key: value for key, value in os.environ.items() if key != "HOME"}
    env |= {
        "MINE": "yes",
        "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}",
        "OMP_NUM_THREADS": "1",
    }
    how = {"cwd": tmp_path / "here", "env": env, "timeout": 60}
    argv = ["-m", "probe", "an argument"]
    fresh = subprocess.run(
        [sys.executable, *argv], capture_output=True, text=True, stdin=subprocess.DEVNULL, **how
    )
    for _ in range(2):  # the first run must not affect the second
        done = forked(argv, **how)
        assert (done.stdout, done.stderr, done.returncode) == (fresh.stdout, fresh.stderr, 7)


def test_a_new_python_can_send_output_and_errors_to_one_file(tmp_path):
    with (tmp_path / "log").open("wb") as log:
        files = {"stdout": log.fileno(), "stderr": log.fileno()}
        process = start_python(["-c", "import sys; print('out'); sys.exit('error')"], **files)
        process.join(60)
    assert process.exitcode == 1
    assert sorted((tmp_path / "log").read_text().split()) == [
        "error",
        "out",
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="forks on Linux alone")
def test_the_server_that_forks_ranks_ends_when_it_is_told_to_and_another_one_starts(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("""
import os
from multiprocessing import forkserver
from aiscale.processes import end_server, start_python

ended = []
for _ in range(2):
    process = start_python(["-c", "pass"], preload=["json"])
    process.join()
    ended.append((process.exitcode, forkserver._forkserver._forkserver_pid))
    end_server()
for status, pid in ended:
    assert status == 0 and not os.path.exists(f"/proc/{pid}"), ended
assert ended[0][1] != ended[1][1]
end_server()  # there is none
""")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_freed_memory_goes_back_to_the_system():
    program = """
import psutil
from aiscale.processes import give_back_memory

blocks = [bytes(100_000) for _ in range(1000)]  # too small for pages of their own
last = bytes(100_000)
del blocks
before = psutil.Process().memory_info().rss
give_back_memory()
assert before - psutil.Process().memory_info().rss > 50e6
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
