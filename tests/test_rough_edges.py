"""Bad circumstances end a command with one line and an exit status, and leave nothing half-written.

CASES holds each kind of circumstance for each way in which commands read and write. Signals need real processes, and
are in the extended tier.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from aiscale import cli
from ranks import processes_with, run_ranks, wait_until

ROOT = Path(__file__).parents[1]
extended = pytest.mark.extended
TINY = ["--quiet", "--set", "model.n_layer=1", "--set", "loop.device=cpu"]


FILE, FULL = r"cannot be written \(Not a directory\): name another folder", r"free some space, or name another folder"
PRINTS = r"standard output, cannot be written \(No space left on device\): free some space"
#: a command line (its words may hold {folder}, {file}, {run}, ...), and what must be said: values, the rule, what to do
CASES = {
    "unwritable output": (
        ("train --runs-dir {file}/runs", rf"{FILE} with --runs-dir"),
        ("study quick --out {file}/s", rf"{FILE} with --out"),
        ("data prepare {text} --tokenizer byte --out {file}/corpus", rf"{FILE} with --out"),
        ("export {run} {file}/mine", rf"{FILE}$"),
        ("kernel install --site none --prefix {file}/k", rf"{FILE} with --prefix"),
        ("launchers --site generic --out {file}/l", rf"{FILE} with --out"),
        ("plan --page {file}/p", rf"{FILE} with --page"),
        ("models fetch a/b --out {file}/m", rf"{FILE} with --out"),
        ("exercises 03 --out {file}/e", rf"{FILE} with --out"),
        ("notebooks 01 --out {file}/b", rf"{FILE} with --out"),
        ("slides radius --out {file}/b", rf"{FILE} with --out"),
    ),
    "full disk": (
        ("train --runs-dir {full}/runs", rf"{FULL} with --runs-dir"),
        ("data prepare {text} --tokenizer byte --out {full}/corpus", rf"{FULL} with --out"),
        ("export {run} {full}/mine", rf"{FULL}$"),
        ("data show {corpus} >full", PRINTS),
    ),
    "missing input": (
        ("train --config {folder}/none.json", r"--config .*none.json cannot be read as JSON: .*No such file"),
        ("generate {folder}/none", r"none is not a run folder: .*; name one like runs/laptop"),
        ("data show {folder}/none", r"there is no folder .*none: name one that `aiscale data prepare` has made"),
        (
            "evaluate {folder}/none",
            r"none is neither a run folder \(run.json\) nor a Hugging Face folder",
        ),
        ("submit {folder}/none.sbatch", r"none.sbatch is not a file: name a launcher, such as"),
    ),
    "truncated input": (
        ("generate {half}", r"half is not a run folder: it has no readable run.json"),
        ("study {half}/site.toml", r"site.toml cannot be read \(.*\): name a TOML file, or laptop, node, quick"),
        ("data show {cut}", r"00000.tokens is truncated: .* bytes, the file has \d+: delete its folder and prepare"),
        ("evaluate {torn} --tasks aiscale_rolling", r"torn cannot be read \(SafetensorError: .*\): copy the whole"),
        ("export {damaged} {folder}/mine", r"step_00000002 is damaged \(.*\): delete it to use the one before"),
        ("launchers --site {half}/site.toml --out {folder}/l", r"site.toml"),
        ("exercises --grade {half}/half.ipynb", r"half.ipynb is not a notebook \(.*\): open and save it in Jupyter"),
    ),
    "wrong words": (
        ("trian", r"^aiscale: unknown command 'trian': did you mean train\?$"),
        ("train --nproc two", r"--nproc is 'two': it must be a whole number"),
        ("verify --lst", r"unknown option --lst: did you mean --list\?"),
        ("doctor --device gpu", r"--device is 'gpu': did you mean cpu\?"),
        ("data show {corpus} and more", r"'and' is one word too many: aiscale data show --help lists what there is"),
        ("export {run}", r"FOLDER is missing: aiscale export --help lists what there is"),
    ),
}


# what the commands read ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """The folders and files that the table names."""
    from aiscale.data.prepare import prepare_corpus
    from aiscale.recipes import recipe
    from aiscale.train import fit

    base = tmp_path_factory.mktemp("places")
    at = {name: base / name for name in ("file", "half", "text", "run", "damaged", "corpus", "cut", "torn", "full")}
    at["file"].write_text("a file where a folder is wanted")
    for name in ("half", "text", "torn", "full"):
        at[name].mkdir()
    (at["text"] / "a.txt").write_text("a few words " * 200)
    tiny = recipe("laptop").override(
        "model.n_layer=1", "loop.steps=2", "loop.eval_batches=1", "loop.device=cpu", "name=run"
    )
    fit(tiny, runs_dir=base, progress=False)
    shutil.copytree(at["run"], at["damaged"])
    _cut(next((at["damaged"] / "checkpoints/step_00000002").glob("*.distcp")))
    prepare_corpus(at["text"], at["corpus"], tokenizer="byte", progress=False)
    shutil.copytree(at["corpus"], at["cut"])
    _cut(at["cut"] / "00000.tokens")
    (at["half"] / "run.json").write_text((at["run"] / "run.json").read_text()[:500])
    (at["half"] / "site.toml").write_text('name = "half"\n[node')
    (at["half"] / "half.ipynb").write_text('{"cells": [')
    (at["half"] / "a.txt").write_text("words")
    return at


def _cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


@pytest.fixture(scope="module")
def full(places):
    """A folder on a full disk; without root's rights, files of this process may not grow instead."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(places["full"])]
    if os.geteuid() == 0 and subprocess.run(mount, capture_output=True).returncode == 0:
        with open(places["full"] / "filler", "wb", buffering=0) as file, pytest.raises(OSError):
            while True:
                file.write(bytes(4096))
        yield lambda: contextmanager(lambda: iter([None]))()
        subprocess.run(["umount", str(places["full"])], check=True)
    else:
        yield _no_growing


@contextmanager
def _no_growing():
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        pytest.param(*case, id=f"{circumstance}: {case[0]}", marks=[extended] if "{torn}" in case[0] else [])
        for circumstance, cases in CASES.items()
        for case in cases
    ],
)
def test_bad_circumstances_are_one_line_and_nothing_is_left(command, said, places, full, tmp_path, monkeypatch, capsys):
    words, _, redirection = command.partition(" >")
    if "{torn}" in words:
        _tear(places)
    if redirection:
        monkeypatch.setattr(sys, "stdout", open("/dev/full", "w"))
    own = TINY if command.startswith("train") else []
    before = _files(places, tmp_path)
    capsys.readouterr()
    with full():
        status = cli.main([*words.format(folder=tmp_path, **places).split(), *own])
    err = capsys.readouterr().err
    told = [line for line in err.splitlines() if line.startswith("aiscale")]
    assert status == 2 and len(told) == 1 and re.search(said, told[0]), err
    assert "Traceback" not in err and _files(places, tmp_path) == before


def _files(places: dict[str, Path], folder: Path) -> set[Path]:
    return {*folder.rglob("*"), *places["file"].parent.rglob("*")} - {places["run"] / ".lock"}


def _tear(places: dict[str, Path]) -> None:
    """Make the Hugging Face folder of which a part is missing."""
    from aiscale.train.export import export

    export(places["run"], places["torn"], overwrite=True)
    _cut(places["torn"] / "model.safetensors")


# signals -------------------------------------------------------------------------------------------------------------

#: command -> (words, a file that says that it works)
LONG = {
    "train": ("--runs-dir {folder} --set loop.steps=100000 --set loop.checkpoint_every=1", "laptop/metrics.jsonl"),
    "verify": ("ddp-x2", ""),
    "data prepare": ("{long} --tokenizer byte --shard-tokens 100000 --out {folder}/corpus", "corpus/progress.json"),
    "export": ("{run} {folder}/mine", ""),
    "notebooks": ("01 --out {folder}/b", ""),
}
#: What may stay: a run that can be resumed, a corpus that can be gone on with, and the results of notebooks.
STAYS = re.compile(r"laptop(/[^.].*|/\.lock)?|laptop/checkpoints/step_\d+/\.metadata|corpus(/[^.].*)?|b(/notebooks.*)?")
PRESSES = {"SIGTERM": [signal.SIGTERM], "Ctrl-C": [signal.SIGINT], "Ctrl-C twice": [signal.SIGINT] * 2}
#: `train` saves and says so with 130, as launchers expect.
STATUS = {("train", "SIGTERM"): 130}


@extended
@pytest.mark.parametrize("press", PRESSES)
@pytest.mark.parametrize("command", LONG)
def test_a_command_that_is_interrupted_ends_in_order(command, press, places, tmp_path):
    words, sign = LONG[command]
    long = places["text"].with_name("long.txt")
    long.write_text("many words " * 3_000_000)
    words = words.format(folder=tmp_path, long=long, **places).split()
    job = subprocess.Popen(
        [sys.executable, "-m", "aiscale", *command.split(), *words, *(TINY if command == "train" else [])],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "AISCALE_TEST": str(tmp_path)},
    )
    wait_until(lambda: _catches(job.pid) and (not sign or (tmp_path / sign).exists()), 90, "it works")
    for number in PRESSES[press]:
        os.kill(job.pid, number)
        time.sleep(0.1)  # two presses, not one
    _, err = job.communicate(timeout=60)
    expected = STATUS.get((command, press), 143 if press == "SIGTERM" else 130)
    assert job.returncode == expected and "Traceback" not in err, (job.returncode, err)
    left = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")]
    assert [path for path in left if not STAYS.fullmatch(path)] == []
    wait_until(lambda: not processes_with(str(tmp_path)), 20, "no process is left")


def _catches(pid: int) -> bool:
    """Whether a process has its own handler for SIGTERM: `main` has begun."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True
    return bool(int(re.search(r"SigCgt:\s*(\w+)", text)[1], 16) & 1 << signal.SIGTERM - 1)


# ranks under mpiexec --------------------------------------------------------------------------------------------------


@extended
def test_ranks_of_mpiexec_on_one_machine_open_no_port_to_the_network(tmp_path):
    """hydra's own port, which every child inherits, is open to all: mpiexec has no option against it."""
    code = """
    import listening
    from mpi4py import MPI
    MPI.COMM_WORLD.barrier()
    say([line for line in listening.beyond_loopback([os.getpid()]) if not line.endswith(" 0.0.0.0")])
    """
    env = {"PYTHONPATH": str(Path(__file__).parent)}
    done = run_ranks(code, 2, tmp_path, launcher="mpiexec", env=env)
    assert done.stdout.split() == ["[]", "[]"], (done.stdout, done.stderr)


# the rest -------------------------------------------------------------------------------------------------------------


def test_a_reader_that_closes_the_pipe_is_no_error(tmp_path):
    shell = f"{sys.executable} -m aiscale launchers --out {tmp_path} | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60)
    assert done.returncode in (0, 141) and done.stderr == ""


def test_a_refusal_does_not_import_torch(tmp_path):
    code = "import sys; from aiscale.cli import main; status = main(['train', '--recipe', 'laptp']); "
    done = subprocess.run(
        [sys.executable, "-c", f"{code} raise SystemExit(status + 10 * ('torch' in sys.modules))"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and "did you mean laptop?" in done.stderr
