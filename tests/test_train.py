"""fit: its numbers, its files, how it ends, and how it resumes."""

import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from aiscale import checkpoint, cost
from aiscale.cli import main
from aiscale.config import ConfigError, Run
from aiscale.data import Batches, open_corpus
from aiscale.distributed import connect
from aiscale.parallel import build
from aiscale.train import RunFolderError, TrainingError, fit, open_trained, read_metrics
from ranks import aiscale, before_each_step, processes_with, run_ranks, wait_until

TINY = Run().override(
    "name=tiny",
    "model.n_layer=2",
    "model.n_head=2",
    "model.d_model=32",
    "model.max_seq_len=32",
    "loop.seq_len=32",
    "loop.global_batch=4",
    "loop.steps=6",
    "loop.eval_every=3",
    "loop.eval_batches=2",
    "loop.device=cpu",
)


def train(tmp_path, *settings, **options):
    return fit(TINY.override(*settings), runs_dir=tmp_path, progress=False, **options)


def test_a_run_writes_its_records_to_disk(tmp_path):
    result = train(tmp_path)
    assert result.path == tmp_path / "tiny" and len(result.losses) == 6
    note = json.loads((result.path / "run.json").read_text())
    assert note["status"] == "finished" and Run.from_dict(note["run"]) == TINY
    assert len(note["corpus"]["sha256"]) == 64
    assert note["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert note["summary"]["tokens"] == 6 * 4 * 32
    lines = read_metrics(result.path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["loss"] for line in lines] == result.losses
    for line in lines:
        assert line["tokens"] == 128 and line["mfu"] > 0 and line["wire_bytes"] == 0
        assert line["held_bytes"]["gradients"] == line["held_bytes"]["parameters"]
    assert [line["step"] for line in read_metrics(result.path, "eval")] == [3, 6]
    assert [step for step, _ in result.val_losses] == [3, 6]


REPORT = """
import aiscale.meter
from aiscale.config import Run
from aiscale.train import fit
aiscale.meter.peak_flops = lambda *args, **options: (1e12, "data sheet")
fit(Run.from_dict(RUN), world, runs_dir=".", progress=False)
"""


def test_two_ranks_report_their_joint_speed_and_the_loss_of_all_validation_batches(tmp_path):
    run = TINY.override("parallel.strategy=ddp", "loop.micro_batch=1")
    done = run_ranks(REPORT.replace("RUN", repr(run.to_dict())), 2, tmp_path, strategy="ddp")
    assert done.returncode == 0, done.stderr
    lines, evaluated = (read_metrics(tmp_path / "tiny", kind) for kind in ("train", "eval"))
    summary = json.loads((tmp_path / "tiny/run.json").read_text())["summary"]
    flops = cost.flops_per_token(run.model, 32)
    for line in lines:
        assert line["tokens"] == 128 and line["tokens_per_s"] == pytest.approx(128 / line["step_s"])
        assert line["mfu"] == pytest.approx(line["tokens_per_s"] * flops / 2e12)
    assert summary["mfu"] == pytest.approx(6 * 128 / sum(line["step_s"] for line in lines) * flops / 2e12)
    assert summary["tokens_per_s"] == pytest.approx(6 * 128 / summary["seconds"])
    model, tokenizer = open_trained(tmp_path / "tiny")
    batches = Batches(open_corpus(run.data, tokenizer=tokenizer).val, seq_len=32, global_batch=4, seed=None)
    with torch.no_grad():
        expected = sum(model(*batches.batch(i)).item() for i in range(2)) / 2
    assert evaluated[-1]["loss"] == summary["val_loss"] == pytest.approx(expected, rel=1e-6)
    assert evaluated[-1]["perplexity"] == summary["val_perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)
    assert [line["tokens"] for line in evaluated] == [256, 256]


@pytest.mark.parametrize("precision", ["fp64", "bf16", "fp16", "tf32"])
def test_every_precision_trains(precision, tmp_path):
    exact = train(tmp_path, "name=fp32").losses
    losses = train(tmp_path, f"loop.precision={precision}").losses
    assert losses == pytest.approx(exact, abs=0.03)
    assert (losses == exact) == (precision == "tf32")  # tf32 exists only on GPUs: on a CPU it is fp32


def test_gradient_accumulation_changes_nothing_but_rounding(tmp_path):
    whole = train(tmp_path, "loop.precision=fp64")
    parts = train(tmp_path, "loop.precision=fp64", "loop.micro_batch=1", "name=parts")
    assert parts.losses == pytest.approx(whole.losses, abs=1e-12)
    assert parts.losses != whole.losses


def test_a_resumed_run_equals_one_that_never_stopped(tmp_path):
    whole = train(tmp_path, "name=whole")
    train(tmp_path, "name=parts", "loop.steps=6", "loop.checkpoint_every=2", "loop.keep_checkpoints=9")
    for newer in ("step_00000006", "step_00000004"):
        (tmp_path / "parts/checkpoints" / newer / "aiscale.json").unlink()
    resumed = train(tmp_path, "name=parts", resume=True)
    assert resumed.losses == whole.losses[2:]  # bit for bit
    assert [line["loss"] for line in read_metrics(tmp_path / "parts")] == whole.losses
    assert [line["step"] for kind in ("eval", "rank") for line in read_metrics(tmp_path / "parts", kind)] == [3, 6, 6]
    a, b = (open_trained(tmp_path / name)[0].state_dict() for name in ("whole", "parts"))
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_a_resumed_run_reports_the_tokens_that_it_read_itself(tmp_path):
    train(tmp_path, "loop.steps=2")
    summary = train(tmp_path, "loop.steps=6", resume=True).summary
    assert (summary["steps"], summary["tokens"]) == (6, 4 * 4 * 32)
    assert summary["tokens_per_s"] == pytest.approx(summary["tokens"] / summary["seconds"])


def test_checkpoints_by_the_clock_are_as_far_apart_as_asked_for(tmp_path, monkeypatch):
    minutes, saved = itertools.count(), []
    clock = SimpleNamespace(monotonic=lambda: 60.0 * next(minutes), perf_counter=time.perf_counter)
    monkeypatch.setattr("aiscale.train.loop.time", clock)
    monkeypatch.setattr(checkpoint, "save", lambda *_, step, keep: saved.append(step))
    train(tmp_path, "loop.steps=12", "loop.checkpoint_minutes=3", "loop.eval_every=0")
    # The clock is asked once a step and after each checkpoint; it is a minute later each time.
    assert saved == [3, 6, 9, 12]


def test_a_checkpoint_just_written_is_kept_despite_a_newer_partial_or_damaged_one(tmp_path):
    train(tmp_path, "loop.checkpoint_every=3", "loop.keep_checkpoints=1", "loop.steps=8")
    folder = tmp_path / "tiny/checkpoints"
    shutil.copytree(folder / "step_00000008", folder / "step_00000004")
    next((folder / "step_00000008").glob("*.distcp")).write_bytes(b"damaged")
    (folder / "step_00000009").mkdir()  # incomplete: no note
    engine = build(TINY, connect("cpu"))
    checkpoint.save(engine, folder, step=5, keep=1)
    assert sorted(path.name[-1] for path in folder.iterdir()) == ["5", "8", "9"]


@pytest.mark.parametrize("settings", [("loop.precision=fp16",), ("optimizer.name=sgd", "optimizer.momentum=0")])
def test_other_states_resume_to_the_bit_as_well(settings, tmp_path, monkeypatch):
    # A loss scale that grows every two steps: two steps are taken before the checkpoint, which holds twice the initial
    # scale. The next step is skipped with that scale, and would be taken with the initial one.
    real = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda *a, **k: real(*a, **k, growth_interval=2, init_scale=2.0**17))
    whole = train(tmp_path, "name=whole", *settings)
    train(tmp_path, "name=parts", "loop.checkpoint_every=2", "loop.keep_checkpoints=9", *settings)
    for newer in ("step_00000006", "step_00000004"):
        (tmp_path / "parts/checkpoints" / newer / "aiscale.json").unlink()
    resumed = train(tmp_path, "name=parts", *settings, resume=True)
    assert resumed.losses == whole.losses[2:]
    skipped = [line["skipped"] for line in read_metrics(tmp_path / "whole")]
    assert skipped[:3] == [False, False, "loop.precision=fp16" in settings]
    a, b = (open_trained(tmp_path / name)[0].state_dict() for name in ("whole", "parts"))
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_two_runs_never_write_to_one_folder(tmp_path):
    from aiscale.train.records import Records

    train(tmp_path)
    first = Records.open(tmp_path / "tiny", overwrite=False)
    for options in ({"resume": True}, {"overwrite": True}):
        with pytest.raises(RunFolderError, match="tiny is being written by another run: wait for it, stop it, or"):
            train(tmp_path, "loop.steps=9", **options)
    assert len(read_metrics(tmp_path / "tiny")) == 6
    first.close()
    assert len(train(tmp_path, "loop.steps=9", resume=True).losses) == 3


@pytest.mark.parametrize("setting", ["loop.global_batch=8", "loop.seq_len=16", "optimizer.name=sgd"])
def test_a_changed_training_is_not_resumed(setting, tmp_path):
    train(tmp_path)
    with pytest.raises(RunFolderError, match=f"tiny was trained with {setting.split('=')[0]}=.*, not .*: start"):
        train(tmp_path, "loop.steps=9", setting, resume=True)


def test_a_stopped_run_saves_and_does_not_evaluate(tmp_path, monkeypatch):
    before_each_step(monkeypatch, lambda step: step == 2 and os.kill(os.getpid(), signal.SIGTERM))
    result = train(tmp_path, "loop.eval_every=2")
    assert result.stopped and [step for step, _ in result.val_losses] == [2]
    assert [path.name for path in (result.path / "checkpoints").iterdir()] == ["step_00000003"]
    assert result.summary["val_loss"] is result.summary["val_perplexity"] is None
    result = train(tmp_path, "name=b", "loop.eval_every=3")
    assert result.stopped and [step for step, _ in result.val_losses] == [3]


def test_a_finished_job_that_is_started_again_succeeds(tmp_path, capsys):
    file = tmp_path / "run.json"
    file.write_text(TINY.to_json())
    words = ["train", "--config", str(file), "--runs-dir", str(tmp_path), "--quiet"]
    assert main([*words, "--resume-if-any"]) == 0
    assert main([*words, "--resume-if-any"]) == 0
    assert "tiny has already taken 6 of 6 steps" in capsys.readouterr().err
    assert main([*words, "--resume"]) == 2


def test_results_are_not_overwritten_silently(tmp_path):
    train(tmp_path)
    with pytest.raises(RunFolderError, match="tiny already holds a run: add --resume, --overwrite"):
        train(tmp_path)
    with pytest.raises(RunFolderError, match="tiny was trained with model.n_layer=2, not 3: start another run"):
        train(tmp_path, "model.n_layer=3", resume=True)
    with pytest.raises(ConfigError, match="tiny has already taken 6 of 6 steps: raise loop.steps to train longer"):
        train(tmp_path, resume=True)
    settings = ("parallel.strategy=ddp", "compression.method=powersgd", "compression.wire=bf16")
    with pytest.raises(ConfigError, match="torch's hook sends its factors"):  # a refusal removes nothing
        train(tmp_path, *settings, overwrite=True)
    assert len(read_metrics(tmp_path / "tiny")) == 6
    assert len(train(tmp_path, overwrite=True).losses) == 6
    with pytest.raises(RunFolderError, match="nowhere holds no run to resume: start it without --resume"):
        train(tmp_path, "name=nowhere", resume=True)


def test_a_nonfinite_loss_stops_the_run_and_says_where(tmp_path):
    with pytest.raises(TrainingError) as stop:
        train(tmp_path, "optimizer.lr=1e30", "optimizer.clip_norm=0", "optimizer.name=sgd")
    text = str(stop.value)
    assert "is nan at step" in text or "is inf at step" in text
    assert "the last finite loss was" in text and "lower optimizer.lr (now 1e+30)" in text
    note = json.loads((tmp_path / "tiny/run.json").read_text())
    assert note["status"] == "failed" and "TrainingError" in note["error"]


def test_nonfinite_gradients_change_no_weight():
    world = connect("cpu")
    engine = build(TINY, world)
    before = {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}
    engine.model.blocks[0].mlp.up.weight.register_hook(lambda gradient: gradient * float("nan"))
    tokens = torch.randint(0, 256, (4, 32))
    result = engine.step([(tokens, tokens)], lr=1e-3)
    assert result.skipped and math.isnan(result.grad_norm)
    assert all(torch.equal(before[name], tensor) for name, tensor in engine.model.state_dict().items())
    world.close()


def test_the_command_line_trains_and_prints_its_results(tmp_path):
    settings = [word for s in ("loop.steps=3", "model.n_layer=1", "loop.eval_batches=1") for word in ("--set", s)]
    done = aiscale("train", "--recipe", "laptop", "--json", "--runs-dir", str(tmp_path), *settings)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 3
    model, tokenizer = open_trained(tmp_path / "laptop")
    text, window = tokenizer.encode("abc"), model.config.max_seq_len
    for place in range(3, window + 4):  # beyond the window its older half drops out
        seen = torch.tensor([text[0 if place < window else place - place % (window // 2) - window // 2 :]])
        text.append(int(model(seen)[0, -1].argmax()))
    argv = ["generate", str(tmp_path / "laptop"), "--prompt", "abc", "--tokens", str(window + 1)]
    assert aiscale(*argv, "--temperature", "0").stdout == tokenizer.decode(text) + "\n"
    drawn = [aiscale(*argv, "--seed", seed).stdout for seed in "112"]
    assert drawn[0] == drawn[1] != drawn[2]
    assert aiscale("--version").stdout.strip() == version("aiscale")


def start_endless(runs_dir) -> subprocess.Popen:
    settings = ("parallel.strategy=ddp", "loop.steps=100000", "loop.eval_every=0")
    words = ["--runs-dir", str(runs_dir), "--nproc", "2", *(word for s in settings for word in ("--set", s))]
    job = subprocess.Popen(
        [sys.executable, "-m", "aiscale", "train", *words],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    metrics = runs_dir / "laptop/metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 3, 180, "some steps taken")
    return job


def test_ctrl_c_saves_and_the_run_can_resume(tmp_path):
    job = start_endless(tmp_path)
    os.killpg(job.pid, signal.SIGINT)  # what a terminal sends
    out, err = job.communicate(timeout=90)
    assert job.returncode == 130 and "with --resume to continue" in err, err
    assert json.loads((tmp_path / "laptop/run.json").read_text())["status"] == "stopped"
    taken = len(read_metrics(tmp_path / "laptop"))
    newest = checkpoint.latest(tmp_path / "laptop/checkpoints")
    assert checkpoint.read_note(newest)["step"] == taken


def test_a_killed_rank_fails_the_run_and_leaves_no_process(tmp_path):
    job = start_endless(tmp_path)
    _, pid = json.loads((tmp_path / "laptop/run.json").read_text())["world"]["processes"][1]
    os.kill(pid, signal.SIGKILL)
    start = time.monotonic()
    _, err = job.communicate(timeout=90)
    assert time.monotonic() - start < 20
    assert "rank 1 of 2 died: signal 9 (SIGKILL)" in err and job.returncode != 0
    assert not processes_with(str(tmp_path))


@pytest.mark.extended
def test_three_ranks_compute_the_same_bits_whoever_starts_them(tmp_path):
    settings = ("parallel.strategy=ddp", "model.n_layer=1", "model.d_model=32", "model.n_head=2", "loop.steps=4")
    settings += ("loop.global_batch=6", "loop.eval_every=0", "loop.eval_batches=1", "loop.device=cpu")
    arguments = ["-m", "aiscale", "train", "--quiet", "--runs-dir", str(tmp_path)]
    arguments += [word for setting in settings for word in ("--set", setting)]
    starts = {
        "nproc": [sys.executable, *arguments, "--nproc", "3"],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"],
        "mpiexec": [str(Path(sys.executable).parent / "mpiexec"), "-n", "3", sys.executable, *arguments],
    }
    starts["torchrun"] += arguments
    losses = {}
    for name, command in starts.items():
        done = subprocess.run(
            [*command, "--set", f"name={name}"],
            capture_output=True,
            text=True,
            timeout=400,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr
        losses[name] = [line["loss"] for line in read_metrics(tmp_path / name)]
    assert len(losses["nproc"]) == 4 and losses["nproc"] == losses["torchrun"] == losses["mpiexec"]
