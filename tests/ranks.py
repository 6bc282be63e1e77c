"""Runs a piece of code as several connected ranks."""

from __future__ import annotations

import importlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from aiscale.processes import start_python

HEADER = f"""
import os, sys, torch, torch.distributed as dist
sys.path.append({str(Path(__file__).parents[1] / "notebooks")!r})  # instruments
from aiscale.measure.distributed import connect
world = connect()
def say(*values):  # in one write, so that ranks do not mix their lines
    os.write(1, ("\\x02" + " ".join(map(str, values)) + "\\n").encode())
"""


AT_FIRST = dict(os.environ)
#: Prefixes of variables that are read while Python or a library is imported.
READ_EARLY = (
    "PYTHON",
    "LD_",
    "OPENBLAS_",
    "MKL_",
    "TORCH_",
    "DS_",
    "HF_",
    "CUDA_",
    "HIP_",
    "ROCR_",
)
#: Modules from whose process `forked` forks. Libraries that patch torch are left out: who needs one
#: imports it.
PRELOAD = (
    "torch._dynamo",
    "safetensors.torch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "aiscale.train.data",
)


def read_early(env: Mapping[str, str]) -> dict[str, str]:
    return {
        key: value
        for key, value in env.items()
        if key.startswith(READ_EARLY) and key != "PYTHONPATH"
    }


def forked(
    argv: Sequence[str],
    *,
    timeout: float,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess:
    """Run `python ARGV` as subprocess.run does, forked if its environment allows that.
    It is forked from a process that has imported PRELOAD."""
    env = dict(os.environ if env is None else env)
    preload = PRELOAD if read_early(env) == read_early(AT_FIRST) else ()
    if not preload:
        how = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
        return subprocess.run([sys.executable, *argv], timeout=timeout, cwd=cwd, env=env, **how)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        files = {"stdout": out.fileno(), "stderr": err.fileno()}
        process = start_python(argv, env, preload=preload, cwd=cwd or ".", **files)
        process.join(timeout)
        timed_out = process.exitcode is None
        process.kill()
        process.join()
        texts = [(file.seek(0), file.read())[1].decode() for file in (out, err)]
    if timed_out:
        raise subprocess.TimeoutExpired(argv, timeout, *texts)
    return subprocess.CompletedProcess(argv, process.exitcode, *texts)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def said_on_two_nodes(folders: Sequence[Path], *words, ranks: int = 1) -> str:
    """What the ranks of a torchrun in each of two folders print; both fail.
    It is as on nodes that share no folder."""
    port = free_port()
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    jobs = []
    for number, folder in enumerate(folders):
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
        command += [f"--node-rank={number}", f"--nproc-per-node={ranks}"]
        command += ["--master-addr=127.0.0.1", f"--master-port={port}", *map(str, words)]
        how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        jobs.append(subprocess.Popen(command, cwd=folder, env=env, **how))
    try:
        said = "".join(job.communicate(timeout=300)[0] for job in jobs)
    finally:
        for job in jobs:
            job.kill()
    assert all(job.returncode for job in jobs), said
    return said


START = """
import aiscale.launch
raise SystemExit(aiscale.launch.launch({n}, ["-m", "ranks"], preload={preload}))
"""


def begun(
    folder: Path, trainer: str, nproc: int, *options: str, steps: int = 1
) -> tuple[subprocess.Popen, list[int]]:
    """`aiscale train` after some steps, and its ranks' process ids. Results go to folder/run."""
    command = [sys.executable, "-m", "aiscale", "train", trainer, "--nproc", str(nproc)]
    job = subprocess.Popen(
        [*command, "--save", str(folder / "run"), *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # for Ctrl-C, which a terminal sends to all
        # for processes_with
        env={**os.environ, "OMP_NUM_THREADS": "1", "AISCALE_TEST": str(folder)},
    )
    metrics = folder / "run/metrics.jsonl"
    try:
        wait_until(lambda: taken(metrics) >= steps or job.poll() is not None, 300, "a step taken")
        assert job.poll() is None, job.communicate()[1]
        processes = json.loads((folder / "run/run.json").read_text())["processes"]
    except BaseException:
        job.kill()  # and its ranks with it
        raise
    return job, [pid for _, pid in processes]


def taken(metrics: Path) -> int:
    """So many lines has a file of metrics."""
    return metrics.read_text().count("\n") if metrics.exists() else 0


def run_ranks(
    code: str,
    n: int,
    folder: Path,
    *,
    launcher: str = "forked",
    timeout: float = 400,
    env=None,
    connected=True,
    strategy: str = "serial",
):
    """Run `code` as `n` ranks; returns the finished process.
    In `code`, `world` is connected and `say` prints, unless `connected` is False. By default ranks
    are forked from a process that has imported PRELOAD and the library of `strategy`."""
    script = folder / "ranks.py"
    code = textwrap.dedent(code)
    script.write_text(HEADER + code + "\nworld.close()\n" if connected else code)
    env = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    if launcher == "forked":
        libraries = {"megatron": ["megatron.core"], "zero": ["deepspeed"]}.get(strategy, [])
        (folder / "start.py").write_text(START.format(n=n, preload=[*PRELOAD, *libraries]))
        done = forked(["-m", "start"], timeout=timeout, cwd=folder, env=env)
    else:
        launch = (
            f"from aiscale.launch import launch; raise SystemExit(launch({n}, [{str(script)!r}]))"
        )
        python = sys.executable
        command = {
            "aiscale": [python, "-c", launch],
            "torchrun": [
                python,
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc-per-node={n}",
                str(script),
            ],
            "mpiexec": [str(Path(python).parent / "mpiexec"), "-n", str(n), python, str(script)],
        }[launcher]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, cwd=folder, env=env
        )
    done.stdout, done.stderr = _said(done.stdout), without_greetings(done.stderr)
    return done


#: Up to torch 2.12, gloo prints its greeting in these pieces, with those of other ranks in between.
GREETING = (
    r"(\[Gloo\] Rank |\d| is connected to | peer ranks\. |"
    r"Expected number of connected peer ranks is : )*\n?"
)


def without_greetings(stderr: str) -> str:
    """stderr without gloo's greetings, which `connect` redirects there."""
    if "[Gloo]" not in stderr:
        return stderr
    return "".join(
        line for line in stderr.splitlines(keepends=True) if not re.fullmatch(GREETING, line)
    )


def _said(stdout: str) -> str:
    """The lines of `say`, which have a mark; without any, all that do not look like a greeting."""
    lines = stdout.splitlines(keepends=True)
    if marked := [line.rpartition("\x02")[2] for line in lines if "\x02" in line]:
        return "".join(marked)
    return "".join(
        line for line in lines if not line.startswith("[Gloo]") and "peer ranks" not in line
    )


def aiscale(
    *arguments: str, timeout: float = 400, cwd: Path | None = None, env=None
) -> subprocess.CompletedProcess:
    """Run the command line as a user does, but forked after the import of torch."""
    done = forked(
        ["-m", "aiscale", *arguments], timeout=timeout, cwd=cwd, env={**os.environ, **(env or {})}
    )
    done.stderr = without_greetings(done.stderr)
    return done


def processes_with(marker: str) -> list[psutil.Process]:
    """Living processes with `marker` in their environment, command line or working folder."""
    found = []
    for process in psutil.process_iter():
        try:
            text = " ".join([*process.cmdline(), *process.environ().values(), process.cwd()])
            if (
                marker in text
                and process.pid != os.getpid()
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def wait_until(condition, timeout: float, what: str) -> None:
    """Poll until `condition()` is true; fails the test with `what` after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"after {timeout} s still not: {what}"
        time.sleep(0.1)


def script(name: str):
    """The module benchmarks/NAME.py, as benchmarks.NAME: another folder may have its name."""
    if (root := str(Path(__file__).parents[1])) not in sys.path:
        sys.path.append(root)
    for shared in ("common", "ways"):  # under the names that the scripts import
        sys.modules[shared] = importlib.import_module(f"benchmarks.{shared}")
    return importlib.import_module(f"benchmarks.{name}")


#: For code of ranks: every collective with a payload of `nbytes`, and a message from rank 0 to rank
#: 1; all call each.
COLLECTIVES = """
def collectives(world, nbytes):
    n, r, size = world.size, world.rank, nbytes // 4
    x, share = torch.ones(size), torch.ones(size // n)
    parts = lambda: list(torch.empty(size).chunk(n)) if r == 0 else None
    return {
        "all_reduce": lambda: dist.all_reduce(x),
        "all_gather": lambda: dist.all_gather(list(torch.empty(size).chunk(n)), share),
        "reduce_scatter": lambda: dist.reduce_scatter(torch.empty(size // n), list(x.chunk(n))),
        "broadcast": lambda: dist.broadcast(x, 0),
        "reduce": lambda: dist.reduce(x, 0),
        "gather": lambda: dist.gather(share, parts(), 0),
        "scatter": lambda: dist.scatter(torch.empty(size // n), parts(), 0),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty(size), x),
        "send": lambda: dist.send(x, 1) if r == 0 else dist.recv(x, 0) if r == 1 else None,
    }
"""
