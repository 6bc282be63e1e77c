"""A run's life: how it stops, goes on, ends and is refused, and what is on the disk then."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from aiscale.train import options, record
from aiscale.train.record import read_metrics, read_note
from ranks import begun, forked, free_port, said_on_two_nodes, taken, wait_until

SMALL = ("--model", "1x16", "--length", "16", "--batch", "4", "--micro-batch", "1")
ENDLESS = (*SMALL, "--steps", "100000", "--save-every", "0")
extended = pytest.mark.extended


def train(folder, *options, trainer="serial", ranks=1, status=0):
    """A trainer that ends with `status`; --save is folder/run, unless the options say otherwise."""
    command = ["-m", f"aiscale.train.{trainer}"]
    if ranks > 1:
        command = ["-m", "aiscale", "train", trainer, "--nproc", str(ranks)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = forked([*command, *SMALL, *map(str, options)], timeout=600, cwd=folder, env=env)
    assert done.returncode == status, done.stderr
    return done


def losses(folder):
    return [line["loss"] for line in read_metrics(folder)]


# What it computes --------------------------------------------------------------------------------


def test_gradient_accumulation_changes_nothing_but_rounding(tmp_path):
    train(tmp_path, "--steps", 4, "--fp64", "--micro-batch", 4, "--save", "whole")
    train(tmp_path, "--steps", 4, "--fp64", "--micro-batch", 1, "--save", "parts")
    whole, parts = losses(tmp_path / "whole"), losses(tmp_path / "parts")
    assert parts == pytest.approx(whole, rel=0, abs=1e-12)
    assert parts != whole


def test_every_precision_trains(tmp_path):
    """fp16, which scales the loss, is Megatron's (test_train_megatron)."""
    found = {}
    for precision in ("fp32", "fp64", "bf16"):
        train(
            tmp_path,
            "--steps",
            4,
            *([] if precision == "fp32" else [f"--{precision}"]),
            "--save",
            precision,
        )
        found[precision] = losses(tmp_path / precision)
        assert found[precision] == pytest.approx(found["fp32"], abs=0.03)
    assert len(set(map(tuple, found.values()))) == 3


@extended
def test_three_ranks_compute_the_same_bits_whoever_starts_them(tmp_path):
    python = sys.executable
    trainer = ["-m", "aiscale.train.ddp", *SMALL, "--batch", "6", "--steps", "4", "--save"]
    starts = {
        "aiscale": [python, "-m", "aiscale", "train", "ddp", "--nproc", "3", *trainer[2:]],
        "torchrun": [
            python,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=3",
            *trainer,
        ],
        "mpiexec": [str(Path(python).parent / "mpiexec"), "-n", "3", python, *trainer],
    }
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    for name, command in starts.items():
        done = subprocess.run(
            [*command, name], cwd=tmp_path, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert read_note(tmp_path / name)["world_size"] == 3
    found = [losses(tmp_path / name) for name in starts]
    assert len(found[0]) == 4 and found[0] == found[1] == found[2]


# How it stops and goes on ------------------------------------------------------------------------


def test_a_run_that_goes_on_has_the_bits_of_one_that_never_stopped(tmp_path):
    train(tmp_path, "--steps", 6, "--save", "whole")
    train(tmp_path, "--steps", 2, "--save", "parts")
    train(tmp_path, "--steps", 6, "--save", "parts")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert read_note(tmp_path / "parts")["first_step"] == 2


@pytest.mark.parametrize(
    "how", ["a scheduler to the parent", pytest.param("Ctrl-C", marks=extended)]
)
def test_a_signal_makes_all_ranks_save_and_stop_and_the_run_goes_on(how, tmp_path):
    """A scheduler's signal may come to the ranks' parent alone; a terminal's Ctrl-C to all."""
    job, _ = begun(tmp_path, "ddp", 2, *ENDLESS)
    if how == "Ctrl-C":
        os.killpg(job.pid, signal.SIGINT)
    else:
        job.send_signal(signal.SIGUSR1)
    _, said = job.communicate()
    assert (job.returncode, "Traceback" in said) == (0, False), said
    assert read_note(tmp_path / "run")["status"] == "stopped"
    steps = len(losses(tmp_path / "run"))
    (saved,) = (tmp_path / "run").glob("[0-9]*")
    assert int(saved.name) == steps < 100000
    train(tmp_path, "--steps", steps + 2)
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == list(range(steps + 2))
    note = read_note(tmp_path / "run")
    assert (note["first_step"], note["status"]) == (steps, "finished")


def test_a_finished_job_that_is_started_again_succeeds_and_changes_nothing(tmp_path):
    train(tmp_path, "--steps", 2)
    before = (tmp_path / "run/metrics.jsonl").read_text()
    again = train(tmp_path, "--steps", 2)
    assert "run has seen all --steps 2: nothing to do" in again.stdout
    assert (tmp_path / "run/metrics.jsonl").read_text() == before


def test_a_loss_that_is_no_number_stops_the_run_and_says_where(tmp_path):
    done = train(tmp_path, "--steps", 20, "--save-every", 1, "--lr", "1e30", status=2)
    (line,) = done.stderr.splitlines()
    found = re.fullmatch(
        r"aiscale: the loss is (nan|inf) at step (\d+): lower --lr or raise --warm-up", line
    )
    assert found, line
    steps = int(found[2])
    assert len(losses(tmp_path / "run")) == steps  # those before
    assert max((tmp_path / "run").glob("[0-9]*")).name == f"{steps:08}"
    assert read_note(tmp_path / "run")["status"] == "failed"


def test_a_gradient_that_is_no_number_stops_the_run_although_its_loss_is_one(tmp_path):
    """Its step was the last one: no later loss would tell, and the weights are lost."""
    code = """
    import torch
    from aiscale.train import serial
    from aiscale.train.options import options
    as_it_was = torch.nn.utils.clip_grad_norm_
    torch.nn.utils.clip_grad_norm_ = lambda *args: as_it_was(*args) * float("nan")
    serial.main(options("serial").parse_args())
    """
    words = [*SMALL, "--steps", "1", "--save", str(tmp_path / "run")]
    done = forked(["-c", textwrap.dedent(code), *words], timeout=120)
    assert done.returncode == 2, done.stderr
    line = "aiscale: the gradient's norm is nan at step 0: lower --lr or raise --warm-up"
    assert done.stderr.splitlines() == [line]
    assert list((tmp_path / "run").glob("0*")) == [], "nothing is saved"


def test_what_a_killed_job_was_writing_goes_with_the_next_checkpoint(tmp_path):
    unfinished = tmp_path / "run/00000007.part"
    unfinished.mkdir(parents=True)
    (unfinished / "__0_0.distcp").write_bytes(b"half")
    train(tmp_path, "--steps", 2)
    assert sorted(path.name for path in (tmp_path / "run").glob("0*")) == ["00000002"]


# What is refused ---------------------------------------------------------------------------------


def test_two_runs_never_write_to_one_folder(tmp_path):
    job, _ = begun(tmp_path, "serial", 1, *ENDLESS)
    try:
        done = train(tmp_path, *ENDLESS, trainer="ddp", ranks=2, status=2)
        (line,) = done.stderr.splitlines()
        assert (
            line == "aiscale: --save run: another job writes there; wait, or choose another folder"
        )
        steps = taken(tmp_path / "run/metrics.jsonl")
        wait_until(
            lambda: taken(tmp_path / "run/metrics.jsonl") > steps, 300, "the first run goes on"
        )
        assert read_note(tmp_path / "run")["trainer"] == "serial"
    finally:
        job.kill()
        job.communicate()
    found = [line["step"] for line in read_metrics(tmp_path / "run")]
    assert found == list(range(len(found)))


@pytest.mark.parametrize("option", [f"--{name.replace('_', '-')}" for name in record.LASTING])
def test_a_changed_training_is_not_resumed(option, tmp_path):
    values = {"--model": "1x16", "--optimizer": "lamb", "--held-out": "0.5"}
    trainer = "megatron" if option in ("--fp16", "--no-zero1", "--experts") else "ddp"
    parse = options.options(trainer).parse_args
    was = parse(["--save", str(tmp_path)])
    record.Record(was, 0, 1, "digest").finish("finished")
    flag = isinstance(getattr(was, option[2:].replace("-", "_")), bool)
    changed = parse(["--save", str(tmp_path), option, *([] if flag else [values.get(option, "7")])])
    assert f"{option} " in record.other_training(changed, 1)
    assert record.other_training(was, 1) is None


def test_another_text_is_refused_by_all_ranks_and_nothing_is_lost(tmp_path):
    (tmp_path / "text").write_text("what else is there to read" * 40)
    train(tmp_path, "--steps", 2)
    before = {name: (tmp_path / "run" / name).read_text() for name in ("run.json", "metrics.jsonl")}
    done = train(tmp_path, "--steps", 4, "--text", "text", trainer="ddp", ranks=2, status=2)
    (line,) = done.stderr.splitlines()
    assert "--save run learns from another text" in line
    assert before == {name: (tmp_path / "run" / name).read_text() for name in before}


def test_nodes_that_do_not_share_the_folder_take_no_step(tmp_path):
    nodes = [tmp_path / "0", tmp_path / "1"]
    for node in nodes:
        node.mkdir()
    said = said_on_two_nodes(nodes, "-m", "aiscale.train.fsdp", *SMALL)
    assert "rank 1 does not see what rank 0 writes in" in said, said
    assert "choose a --save folder that all nodes share" in said
    files = [path.name for node in nodes for path in node.rglob("*") if path.is_file()]
    assert set(files) <= {".lock"}


@extended
@pytest.mark.parametrize("trainer", ["fsdp", "megatron", "zero"])
def test_a_full_disk_is_one_line_and_the_checkpoint_before_stays(trainer, tmp_path):
    """A limit on file size simulates a full disk: the same library calls fail."""
    grid = ("--tp", 2, "--pp", 1) if trainer == "megatron" else ()
    whole = ("--model", "2x64", *grid)
    train(tmp_path, "--steps", 2, *whole, trainer=trainer, ranks=2)
    words = [*SMALL, "--steps", "4", *whole]
    command = [sys.executable, "-m", "aiscale", "train", trainer, "--nproc", "2", *map(str, words)]
    limited = ["bash", "-c", 'ulimit -f 16; exec "$@"', "limited", *command]
    done = subprocess.run(limited, cwd=tmp_path, capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if line.startswith("aiscale")]
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    writers = {line.split()[2] for line in said}
    assert len(said) == len(writers)  # a line of each rank that could not write, or one for all
    for line in said:
        assert "could not write run/00000004.part: " in line
        assert "earlier checkpoints are untouched" in line
    assert [path.name for path in (tmp_path / "run").glob("0*")] == ["00000002"]
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    train(tmp_path, "--steps", 3, *whole, "--save", "again", trainer=trainer, ranks=2)
    assert json.loads((tmp_path / "again/run.json").read_text())["first_step"] == 2
