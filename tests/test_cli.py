"""A command answers bad circumstances by one line and status 2; nothing is left half-written."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from aiscale import cli
from ranks import aiscale, processes_with, run_ranks, wait_until


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Files and folders of which a part is missing."""
    base = tmp_path_factory.mktemp("places")
    at = {name: base / name for name in ("file", "half", "run", "damaged")}
    at["file"].write_text("a file where a folder is wanted")
    at["half"].mkdir()
    done = aiscale("train", "serial", "--steps", "2", "--save", str(at["run"]))
    assert done.returncode == 0, done.stderr
    shutil.copytree(at["run"], at["damaged"])
    _cut(next((at["damaged"] / "00000002").glob("*.distcp")))
    (at["half"] / "run.json").write_text((at["run"] / "run.json").read_text()[:500])
    (at["half"] / "half.ipynb").write_text('{"cells": [')
    return at


def _cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "train --recipe laptop",
            r"--recipe: first the trainer, then its options: aiscale train ddp",
        ),
        ("train dpp", r"dpp is no trainer: choose one of serial, ddp, "),
        ("train ddp --nproc 0", r"--nproc is 0: it must be at least 1"),
        (
            "generate {half}",
            r"half is no folder of a trainer \(--save\): it has no readable run.json",
        ),
        (
            "export {damaged} {folder}/mine",
            r"00000002 is damaged \(.*\): delete it to use the one before",
        ),
        (
            "evaluate {folder}",
            r"is neither a run folder \(run.json\) nor a Hugging Face folder \(config.json\)",
        ),
        ("launchers --site frontir", r"unknown site 'frontir': did you mean frontier\?"),
        ("verify zero1x2", r"unknown case 'zero1x2': did you mean zero1-x2\?"),
        ("exercises --grade {half}/half.ipynb", r"half.ipynb is not a notebook \("),
        (
            "plan --model gpt2 --machine frontir",
            r"unknown machine 'frontir': did you mean frontier\?",
        ),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(words, line, places, tmp_path, capsys):
    words = words.format(folder=tmp_path, **places).split()
    before = {*places["file"].parent.rglob("*")} - {places["run"] / ".lock"}
    capsys.readouterr()
    try:
        status = cli.main(words)
    except SystemExit as end:  # a trainer's way to say no
        status = end.code
    assert status == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert re.search(f"^aiscale: .*{line}", told)
    assert {*places["file"].parent.rglob("*")} - {places["run"] / ".lock"} == before
    assert not [*tmp_path.iterdir()]


def test_a_word_that_argparse_does_not_know_ends_with_status_2(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["trian"])
    assert end.value.code == 2 and "invalid choice: 'trian'" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_full_disk_is_one_line(tmp_path, capsys):
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(small)], capture_output=True
    ).returncode:
        pytest.skip("mount is not allowed here")
    try:
        with open(small / "filler", "wb", buffering=0) as file, pytest.raises(OSError):
            while True:
                file.write(bytes(4096))
        words = ["data", "prepare", __file__, "--out", str(small / "corpus")]
        assert cli.main(words) == 2
    finally:
        subprocess.run(["umount", str(small)], check=True)
    assert "(No space left on device): free some space, or name another" in capsys.readouterr().err


def test_a_reader_that_closes_the_pipe_is_no_error(tmp_path):
    python, out = shlex.quote(sys.executable), shlex.quote(str(tmp_path))
    shell = f"{python} -m aiscale launchers --out {out} | head -1; "
    shell += "exit ${PIPESTATUS[0]}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60)
    assert done.returncode in (0, 141) and done.stderr == ""


def test_a_refusal_does_not_import_torch():
    code = (
        "import sys; from aiscale.cli import main; status = main(['train', '--recipe', 'laptop']); "
    )
    code += "raise SystemExit(status + 10 * ('torch' in sys.modules))"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode
        == 2
    )


@pytest.mark.extended
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_training_that_is_interrupted_leaves_no_process_and_no_half_file(number, tmp_path):
    words = [
        "train",
        "serial",
        "--save",
        str(tmp_path / "run"),
        "--steps",
        "100000",
        "--save-every",
        "0",
    ]
    job = subprocess.Popen(
        [sys.executable, "-m", "aiscale", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "AISCALE_TEST": str(tmp_path)},
    )
    wait_until((tmp_path / "run/metrics.jsonl").exists, 90, "it works")
    time.sleep(1)
    os.kill(job.pid, number)
    _, err = job.communicate(timeout=60)
    assert job.returncode == 0 and "Traceback" not in err, (job.returncode, err)  # it has saved
    left = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")]
    assert [path for path in left if not re.fullmatch(r"run(/.*)?", path)] == []
    wait_until(lambda: not processes_with(str(tmp_path)), 20, "no process is left")


@pytest.mark.extended
def test_ranks_of_mpiexec_on_one_machine_open_no_port_to_the_network(tmp_path):
    """hydra's own port, which every child inherits, is open to all: mpiexec cannot prevent it."""
    code = """
    import listening
    from mpi4py import MPI
    MPI.COMM_WORLD.barrier()
    lines = listening.beyond_loopback([os.getpid()])
    say([line for line in lines if not line.endswith(" 0.0.0.0")])
    """
    env = {"PYTHONPATH": str(Path(__file__).parent)}
    done = run_ranks(code, 2, tmp_path, launcher="mpiexec", env=env)
    assert done.stdout.split() == ["[]", "[]"], (done.stdout, done.stderr)
