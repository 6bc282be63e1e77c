"""A notebook's ranks in a Slurm job: from the login node, inside it, and in one sent by hand."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

from aiscale.lesson import cluster
from aiscale.lesson.cluster import engine
from aiscale.lesson.cluster.slurm import Job, SlurmLauncher, first_end, public
from aiscale.site.profiles import names as site_names
from aiscale.site.profiles import site
from ranks import wait_until

ROOT = Path(__file__).parents[1]
SMALL = [ROOT / "notebooks/03_ddp.ipynb", "--parameter=n_ranks=2"]
NOTEBOOKS = [sys.executable, "-m", "aiscale", "notebooks", *SMALL]


def on_login(nodes, place: Path, program: str, **env: str) -> subprocess.CompletedProcess:
    """Run a program on the login node, in a new session as Jupyter's kernels are.
    Linux divides cores among sessions, and would otherwise divide this one's share among pytest's
    workers and all that their tests start."""
    return nodes.login(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=place,
        env={"SBATCH_ACCOUNT": "ABC123", "SBATCH_TIMELIMIT": "10", "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        start_new_session=True,
        timeout=600,
    )


def jobs(nodes) -> dict[str, str]:
    command = ["squeue", "--noheader", "--states=all", "--format=%i %T"]
    while (done := nodes.login(command, capture_output=True)).returncode:  # slurmctld is busy
        time.sleep(1)
    return dict(line.split() for line in done.stdout.splitlines())


def texts(notebook: Path) -> str:
    cells = json.loads(notebook.read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    return "".join(
        "".join(o.get("text", o.get("data", {}).get("text/plain", []))) + "\n" for o in outputs
    )


@pytest.mark.extended
@pytest.mark.slurm
@pytest.mark.notebook
@pytest.mark.timeout(620)
def test_lesson_03_runs_unchanged_under_slurm_from_the_login_node(frontier):
    """As in the README: without AISCALE_RUNS, in a folder that compute nodes see."""
    env = {"AISCALE_ENGINES": "slurm", "SBATCH_ACCOUNT": "ABC123", "SBATCH_TIMELIMIT": "10"}
    with tempfile.TemporaryDirectory(prefix="aiscale-test-", dir="/var/tmp") as out:
        done = frontier.login(
            [*NOTEBOOKS, f"--out={out}"], env=env, cwd=Path(out), capture_output=True, timeout=600
        )
        assert done.returncode == 0, done.stdout + done.stderr
        shown = texts(Path(out, "notebooks/03_ddp.ipynb"))
        assert re.search(r"2 ranks on node1 in [\d.]+ s \(gloo", shown)
        job = re.search(r"job (\d+) is RUNNING on node1", shown)[1]
        assert frontier.wait(job) == "CANCELLED"
        runs = Path(out, "runs")  # in the starting folder, and cleaned up
        wait_until(lambda: not list(runs.iterdir()), 180, "runs is empty")


@pytest.mark.extended
@pytest.mark.slurm
@pytest.mark.notebook
@pytest.mark.timeout(1800)
def test_a_lesson_in_a_batch_job_prints_what_its_ranks_print_without_slurm(
    frontier, perlmutter, place
):
    command = [*NOTEBOOKS, "--core", f"--out={place}/without"]
    subprocess.run(command, cwd=place, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
    for nodes in (frontier, perlmutter):
        name = nodes.settings.site.name
        env = {"AISCALE_ENVIRONMENT": sys.prefix, "AISCALE_RUNS": str(place / name)}
        job = nodes.submit(
            ROOT / f"launchers/{name}/notebook.sbatch", args=[*SMALL, "--core"], cwd=place, env=env
        )
        assert nodes.wait(job, timeout_s=900) == "COMPLETED", (
            place / f"notebook-{job}.out"
        ).read_text()
    # distances of gradients, messages, bytes
    exact = r"(?m)^(?:step \d+ loss|\[rank \d+\]|\w+: calls) .*"
    there, *without = [re.findall(exact, texts(path)) for path in place.rglob("03_ddp.ipynb")]
    assert [there, there] == without and len(there) >= 8, (there, without)


@pytest.mark.slurm
def test_from_the_login_node(frontier, place):
    """A single kernel, as starts are expensive: private files, a dead rank, a killed kernel."""
    program = """
        import contextlib, glob, json, os, psutil, signal, stat, sys, threading, time
        from aiscale.lesson import cluster
        ranks = cluster.start(2, engines="slurm", nodes=2, device="cpu", threads=1)
        print("HOSTS", [info["host"] for info in ranks.info], "torch" in sys.modules)
        ranks.execute("import os; total = torch.tensor([rank + 1.0]); dist.all_reduce(total)")
        print("SUM", ranks["total.item()"])

        folder, = glob.glob("runs/engines-*")
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700, oct(os.stat(folder).st_mode)
        files = [path for path in glob.glob(folder + "/**", recursive=True) if os.path.isfile(path)]
        secret = [path for path in files if path.endswith(("engine.json", "client.json"))]
        assert [stat.S_IMODE(os.stat(path).st_mode) for path in secret] == [0o600, 0o600]
        key = json.load(open(secret[0]))["key"]
        others = [path for path in files if path not in secret]
        assert not [path for path in others if key in open(path, errors="replace").read()]
        here, listening = os.readlink("/proc/self/ns/net"), set()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):  # it has just ended
                assert not any(key in word for word in process.cmdline())
                proc = f"/proc/{process.pid}"
                where = "login" if os.readlink(proc + "/ns/net") == here else "node"
                is_python = "python" in process.name()
                own = {os.readlink(fd) for fd in glob.glob(proc + "/fd/*")} if is_python else ()
                for line in (*open(proc + "/net/tcp"), *open(proc + "/net/tcp6")):
                    _, local, _, state, *_, inode = line.split()[:10]
                    if state == "0A" and f"socket:[{inode}]" in own:  # it listens
                        listening.add(f"{where} {int(local.partition(':')[0][-2:], 16)}")
        print("LISTENING", sorted(listening))
        print("TOLD", ranks["'JPY_API_TOKEN' in os.environ"])

        def stop():  # once both ranks are in their loops
            while len(glob.glob("looping*")) < 2:
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGINT)
        threading.Thread(target=stop, daemon=True).start()
        try:
            looping = f"open({os.getcwd()!r} + f'/looping{{rank}}', 'w').close()"
            ranks.execute(f"kept = rank; {looping}\\n"
                          "while True: __import__('time').sleep(0.05)")
        except KeyboardInterrupt as error:
            print("STOPPED", error)
        print("KEPT", ranks["kept"])

        try:
            ranks.execute("if rank == 1: os.kill(os.getpid(), 9)\\ndist.barrier()")
        except cluster.RankDied as error:
            print("DIED", error)
        try:
            ranks.execute("print('again', world.size)")
        except cluster.ClusterError as error:
            print("ENDED", error)
        cluster.start(2, engines="slurm", nodes=2, device="cpu", threads=1)
        os.kill(os.getpid(), 9)
    """
    before = set(jobs(frontier))
    done = on_login(frontier, place, program, JPY_API_TOKEN="of the hub")
    # without torch, whose import takes a second of a core, which may be a minute on a busy machine
    assert "HOSTS ['node1', 'node2'] False" in done.stdout, done.stdout + done.stderr
    assert "(gloo, 1 thread each)" in done.stdout
    assert "SUM [3.0, 3.0]" in done.stdout
    # on the nodes at their own address 10.77.0.x; on the login node only on the loopback
    assert re.search(r"LISTENING \[('login 127', )?'node 10'(, 'node 127')?\]", done.stdout), (
        done.stdout
    )
    assert "TOLD [False, False]" in done.stdout
    assert "STOPPED ranks 0-1 interrupted" in done.stdout and "KEPT [0, 1]" in done.stdout, (
        done.stdout
    )
    assert "DIED rank 1 ended: Killed" in done.stdout, done.stderr
    assert (
        "ENDED rank 1 ended: Killed; their job has ended: cluster.start(2, ...) submits another"
        in done.stdout
    )
    _, job = sorted(set(jobs(frontier)) - before, key=int)
    # the kernel was killed, so the guard process cleans up
    assert frontier.wait(job) == "CANCELLED"
    wait_until(lambda: not list(place.glob("runs/engines-*")), 180, "its folder is gone")


@pytest.mark.slurm
def test_a_pending_job_says_why_and_is_cancelled_when_nobody_waits_for_it(frontier, place):
    program = """
        import os, signal, sys, threading
        from aiscale.lesson import cluster
        said_why = threading.Event()
        class Log:
            isatty, flush = sys.__stderr__.isatty, sys.__stderr__.flush
            def write(self, text):
                sys.__stderr__.write(text)
                if "(Resources)" in text:
                    said_why.set()
        sys.stderr = Log()
        def stop():
            said_why.wait()
            os.kill(os.getpid(), signal.SIGINT)
        def attempt(**options):
            try:
                cluster.start(2, engines="slurm", **options)
            except BaseException as error:
                print(type(error).__name__, error)
        threading.Thread(target=stop, daemon=True).start()
        attempt()
        attempt(account="XYZ999")
        attempt(time="3:00:00")
        attempt(nodes=1, partition="gpu")
        attempt(acount="ABC123")
    """
    other = frontier.submit(
        place / write(place / "other.sh", "#!/bin/bash\nsleep 100\n"),
        "-AABC123",
        "-N2",
        "-t5",
        "--output=/dev/null",
    )
    done = on_login(frontier, place, program)
    frontier.login(["scancel", other])
    lines = done.stdout.splitlines()
    assert re.search(r"job \d+ is PENDING \(Resources\)", done.stderr), done.stderr
    assert re.fullmatch(
        r"RanksInterrupted job \d+ had not started, and has been cancelled", lines[0]
    ), lines
    assert re.match(
        r"ClusterError Slurm refused the job: .*Invalid account.*\(asked for: .*--account=XYZ999",
        lines[1],
    )
    assert re.match(r"ClusterError Slurm refused the job: .*time limit is invalid", lines[2])
    assert lines[3].startswith(
        "ClusterError cluster.start: partition gpu is not among scheduler.partition"
    )
    assert (
        lines[4] == "ClusterError cluster.start: there is no option acount: did you mean account?"
    )
    assert len(lines) == 5
    wait_until(
        lambda: set(jobs(frontier).values()) <= {"CANCELLED", "COMPLETED"},
        180,
        "all jobs have ended",
    )


@pytest.mark.extended
@pytest.mark.slurm
def test_inside_a_job_ranks_are_a_step_of_it(frontier, place):
    program = """
        from aiscale.lesson import cluster
        with cluster.start(2, engines="slurm", nodes=2, device="cpu", threads=1) as ranks:
            ranks.execute("import os; job = os.environ['SLURM_JOB_ID'], world.launcher, "
                          "world.local_rank")
            print([info["host"] for info in ranks.info], ranks["job"])
        try:
            cluster.start(17, engines="slurm")
        except cluster.ClusterError as error:
            print(error)
    """
    write(place / "kernel.py", textwrap.dedent(program))
    script = write(place / "job.sh", f"#!/bin/bash\n{shlex.quote(sys.executable)} kernel.py\n")
    job = frontier.submit(script, "-AABC123", "-N2", "-t5", f"--output={place}/out", cwd=place)
    assert frontier.wait(job) == "COMPLETED", (place / "out").read_text()
    lines = (place / "out").read_text().splitlines()
    assert lines[1] == f"['node1', 'node2'] [('{job}', 'srun', 0), ('{job}', 'srun', 0)]"
    assert f"17 ranks need 3 nodes of Frontier (OLCF), and job {job} has 2: start fewer" in lines[2]


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_the_reason_a_step_ended_is_read_from_its_log():
    killed = "srun: error: node2: task 3: Killed\nsrun: Terminating StepId=1.0\n"
    killed += "srun: error: node1: tasks 0-1: Killed\n"
    time_up = "slurmstepd: error: *** JOB 7 ON node1 CANCELLED AT 2026-07-01T10:00:00 "
    time_up += "DUE TO TIME LIMIT ***\n" + killed
    assert first_end(killed, "7") == ("rank 3 ended: Killed", "rank3")
    assert first_end(time_up, "7").message.endswith(
        "CANCELLED AT 2026-07-01T10:00:00 DUE TO TIME LIMIT"
    )
    assert first_end("torch says: task 3 is slow\n", "7") is None


def test_a_job_does_not_receive_the_notebook_servers_token():
    env = {
        "JPY_API_TOKEN": "x",
        "JUPYTERHUB_API_TOKEN": "x",
        "SLURM_JOB_ID": "1",
        "SLURM_CONF": "c",
        "HOME": "h",
    }
    assert public(env) == {"SLURM_CONF": "c", "HOME": "h"}
    assert public(env, keep="SLURM_") == {"SLURM_JOB_ID": "1", "SLURM_CONF": "c", "HOME": "h"}


def test_a_login_node_without_slurm_or_site_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("AISCALE_SITE", "SBATCH_ACCOUNT", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    for options, text in (
        (
            {"site": "frontier"},
            "engines='slurm' at Frontier (OLCF) needs account=..., or SBATCH_ACCOUNT",
        ),
        (
            {"site": "frontier", "account": "a"},
            "engines='slurm' needs sbatch, and there is none on PATH",
        ),
        (
            {"site": "frontier", "account": "a", "nodes": 1},
            "17 ranks on 1 nodes of Frontier (OLCF), which has 8",
        ),
    ):
        with pytest.raises(cluster.ClusterError, match=re.escape(text)) as error:
            cluster.start(17, engines="slurm", **options)
        assert "\n" not in str(error.value)
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.parametrize(
    "size, nodes, lines",
    [(16, 0, ("--nodes=4", "--time=00:30:00")), (3, 2, ("--nodes=2", "--time=00:30:00"))],
)
def test_the_job_uses_the_sites_options_and_as_many_nodes_as_the_ranks_need(size, nodes, lines):
    files = Job(account="m1_g", site="perlmutter", qos="debug", nodes=nodes).files(size)
    assert all(f"#SBATCH {line} " in files["engines.sbatch"] for line in lines)
    assert "#SBATCH --qos=debug" in files["engines.sbatch"]
    assert "module load pytorch" in files["site.sh"]


def test_a_few_ranks_ask_for_their_part_of_a_node_where_jobs_share_nodes(monkeypatch):
    monkeypatch.delenv("SBATCH_QOS", raising=False)
    files = Job(account="m1", site="perlmutter", qos="shared").files(2)
    part = files["engines.sbatch"]
    asked = (
        "--nodes=1",
        "--ntasks-per-node=2",
        "--gpus-per-node=2",
        "--cpus-per-task=32",
        "--qos=shared",
    )
    assert all(f"#SBATCH {line} " in part.replace("\n", " \n") for line in asked)
    assert "0.375 GPU node-hours" in part and "CUDA_VISIBLE_DEVICES" not in files["site.sh"]
    for other in (
        Job(account="m1", site="perlmutter").files(2),
        Job(account="m1", site="perlmutter", qos="shared").files(3),
    ):
        assert "#SBATCH --gpus-per-node=4" in other["engines.sbatch"], (
            "a whole node: in QOS regular, or beyond half of one"
        )
    monkeypatch.setenv("SBATCH_QOS", "shared")  # sbatch would read it too
    assert Job(account="m1", site="perlmutter").files(2) == files


@pytest.mark.parametrize(
    "name, asked, size, lines",
    [
        (
            "perlmutter",
            {"constraint": "cpu"},
            4,
            ("ntasks-per-node=4", "cpus-per-task=4", "qos=shared", "nodes=1"),
        ),
        (
            "lumi",
            {"partition": "small"},
            8,
            ("ntasks-per-node=8", "cpus-per-task=2", "partition=small", "nodes=1"),
        ),
    ],
)
def test_ranks_on_cpus_ask_for_cores_of_a_node_without_gpus(name, asked, size, lines, monkeypatch):
    for variable in ("SBATCH_QOS", "SBATCH_CONSTRAINT", "SBATCH_PARTITION"):
        monkeypatch.delenv(variable, raising=False)
    files = Job(account="m1", site=name, **asked).files(size)
    text = files["engines.sbatch"]
    options = dict(
        line.split()[1].partition("=")[::2]
        for line in text.splitlines()
        if line.startswith("#SBATCH ")
    )
    assert (
        set(lines) <= {f"{key.lstrip('-')}={value}" for key, value in options.items()}
        and "--gpus-per-node" not in options
    )
    assert f"--cpus-per-task={options['--cpus-per-task']}" in files["site.sh"]
    ((variable, value),) = asked.items()
    monkeypatch.setenv(f"SBATCH_{variable.upper()}", value)  # as the kernel of a class has it
    assert Job(account="m1", site=name).files(size) == files


def test_a_rank_that_starts_before_rank_0_finds_its_profile(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(os, "umask", lambda mask: mask)
    engine.prepare(tmp_path, 1)
    assert (tmp_path / "profile/security").is_dir()


def test_a_node_is_reached_by_the_address_that_the_login_node_sees():
    assert engine.node_address({"SLURM_SUBMIT_HOST": "no-such-host.invalid"})  # at least its own
    assert engine.node_address({"SLURM_SUBMIT_HOST": "127.0.0.1"}) == engine.node_address({})


@pytest.mark.parametrize(
    "env, threads",
    [
        ({"AISCALE_THREADS": "3", "OMP_NUM_THREADS": "16"}, 3),
        # of 8 unbound cores
        ({"OMP_NUM_THREADS": "16", "SLURM_STEP_TASKS_PER_NODE": "2(x8),1"}, 4),
        ({"OMP_NUM_THREADS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x16)"}, 2),
        ({"SLURM_STEP_TASKS_PER_NODE": "16"}, 1),
    ],
)
def test_threads_of_a_rank_are_set_before_torch_is_loaded(env, threads):
    code = (
        "import os, sys; os.cpu_count, os.sched_getaffinity = lambda: 8, lambda _: range(8); "
        "from aiscale.lesson.cluster import engine; engine.limit_threads(); "
        "print(os.environ['OMP_NUM_THREADS'], 'torch' in sys.modules)"
    )
    bare = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**bare, **env}, capture_output=True, text=True
    )
    assert done.stdout.split() == [str(threads), "False"], done.stderr


@pytest.mark.parametrize("name", site_names())
def test_a_step_inside_a_job_has_the_sites_options_and_network(name, tmp_path, monkeypatch):
    srun = write(tmp_path / "srun", "#!/bin/sh\n")
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    shell = f"step=({site(name).srun}); printf '%s\\n' \"${{step[@]}}\""
    asked = subprocess.run(
        ["bash", "-c", shell], capture_output=True, text=True
    ).stdout.splitlines()
    monkeypatch.setenv("SLURM_NNODES", "2")
    words = SlurmLauncher(2, tmp_path, Job(site=name, nodes=2))._srun()
    prefix = site(name).step_prefix(2)
    assert words[len(words) - len(prefix) - len(asked) :] == asked + prefix
    told = subprocess.run([*prefix, "env"], capture_output=True, text=True).stdout
    wanted = {
        "frontier": {"NCCL_NET=OFI", "NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3"},
        "perlmutter": {
            "NCCL_NET=AWS Libfabric",
            "FI_MR_CACHE_MONITOR=userfaultfd",
            "CUDA_VISIBLE_DEVICES=3,2,1,0",
        },
    }
    assert wanted.get(name, set()) <= set(told.splitlines())
