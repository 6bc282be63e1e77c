"""Background checkpoints: equal to blocking ones, and either complete or absent."""

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from aiscale import checkpoint
from aiscale.config import Run
from aiscale.distributed import connect
from aiscale.parallel import build
from aiscale.train import fit, read_metrics
from aiscale.train.saving import Saver
from aiscale.verify import jobs
from ranks import before_each_step, run_ranks, without_greetings

TINY = (
    *("model.n_layer=2", "model.n_head=2", "model.d_model=16", "model.max_seq_len=16", "loop.seq_len=16"),
    *("loop.global_batch=4", "loop.eval_batches=1", "loop.eval_every=0", "loop.device=cpu", "name=tiny"),
    *("loop.steps=4", "loop.checkpoint_every=2", "loop.keep_checkpoints=3", "optimizer.warmup_steps=1"),
)
STRATEGIES = {
    "serial": (),
    "ddp": ("compression.method=top-k",),
    "zero": ("parallel.zero_stage=3",),
    "fsdp": (),
    "pipeline": ("parallel.pp=2", "loop.micro_batch=2"),
    "megatron": ("parallel.tp=2",),
}


def words(*settings):
    return [word for setting in settings for word in ("--set", setting)]


#: Two strategies run in make test, the others only in make test-all.
IN_TIERS = [s if s in ("serial", "ddp") else pytest.param(s, marks=pytest.mark.extended) for s in STRATEGIES]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """trained(strategy): its folder, losses of four steps, and the last two again after resuming from step 2."""

    @functools.cache
    def losses(strategy):
        folder, log = tmp_path_factory.mktemp(strategy), tmp_path_factory.mktemp("log") / "said.log"
        arguments = ["train", "--runs-dir", str(folder), "--quiet", "--nproc", "1" if strategy == "serial" else "2"]
        arguments += words(*TINY, f"parallel.strategy={strategy}", *STRATEGIES[strategy])
        found = []
        for more in ([], ["--resume"]):
            status = jobs.train([*arguments, *more], log)
            said = without_greetings(log.read_text())
            assert (status, said) == (0, ""), (strategy, said)
            found.append([(line["step"], line["loss"]) for line in read_metrics(folder / "tiny")])
            shutil.rmtree(folder / "tiny/checkpoints/step_00000004")
        return folder, *found

    yield losses


@pytest.mark.parametrize("strategy", IN_TIERS)
def test_a_run_resumed_from_a_background_checkpoint_equals_an_uninterrupted_one(strategy, trained):
    _, first, again = trained(strategy)
    assert first == again and [step for step, _ in first] == [1, 2, 3, 4]


@pytest.fixture
def engine():
    run = Run().override(*TINY)
    world = connect("cpu")
    engine = build(run, world)
    yield engine
    engine.close()
    world.close()


def step(engine):
    tokens = torch.randint(0, 256, (4, 17))
    engine.step([(tokens[:, :-1], tokens[:, 1:])], 1e-2)


def weights(engine):
    return {name: tensor.clone() for name, tensor in engine.state(full=True).items()}


class Gate:
    """Blocks just before a checkpoint gets its final name."""

    def __init__(self, monkeypatch):
        self.open, self.names, real = threading.Event(), [], Path.rename

        def rename(path, target):
            if not (final := Path(target)).name.startswith("step_"):
                return real(path, target)
            assert self.open.wait(60)
            self.names.append(final.name)
            return real(path, target)

        monkeypatch.setattr(Path, "rename", rename)


def test_training_continues_during_a_write_and_does_not_change_the_checkpoint(engine, tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    step(engine)
    before = weights(engine)
    with Saver(engine, tmp_path) as saver:
        saver.save(1)
        step(engine)
        assert checkpoint.latest(tmp_path) is None and not saver.failed
        gate.open.set()
    found = {name: torch.empty_like(tensor) for name, tensor in before.items()}
    checkpoint.load_weights(found, checkpoint.latest(tmp_path))
    assert all(torch.equal(found[name], before[name]) for name in before)
    assert any(not torch.equal(now, before[name]) for name, now in weights(engine).items())


def test_checkpoints_are_written_one_at_a_time_and_in_order(engine, tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    with Saver(engine, tmp_path) as saver:
        saver.save(1)
        second = threading.Timer(0.2, gate.open.set)
        second.start()
        saver.save(2)  # waits for the first
        assert gate.open.is_set() and gate.names[:1] == ["step_00000001"]
        saver.save(3, wait=True)
        assert gate.names == ["step_00000001", "step_00000002", "step_00000003"]


def test_a_failed_write_ends_the_run_at_its_next_step_and_keeps_the_previous_checkpoint(tmp_path, monkeypatch):
    real, failed = Path.rename, threading.Event()

    def full_at_step_4(path, target):
        if Path(target).name == "step_00000004":
            failed.set()
            raise OSError(28, "No space left on device")
        return real(path, target)

    monkeypatch.setattr(Path, "rename", full_at_step_4)
    # The fifth step ends only after the write has failed, so a sixth or seventh would mean that the failure was missed.
    before_each_step(monkeypatch, lambda step: step == 5 and failed.wait(60))
    run = Run().override(*TINY, "loop.steps=100", "loop.checkpoint_every=4")
    with pytest.raises(checkpoint.CheckpointError, match="cannot write .*step_00000004 .*No space left.*are untouched"):
        fit(run.override("loop.checkpoint_every=2"), runs_dir=tmp_path, progress=False)
    steps = [line["step"] for line in read_metrics(tmp_path / "tiny") if line["kind"] == "train"]
    assert steps[-1] in (5, 6, 7)
    assert [path.name for path in (tmp_path / "tiny/checkpoints").iterdir()] == ["step_00000002"]
    assert json.loads((tmp_path / "tiny/run.json").read_text())["status"] == "failed"


def test_a_signal_waits_for_the_current_write(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)

    def stop_at_4(step):
        if step == 3:
            os.kill(os.getpid(), signal.SIGUSR1)
            threading.Timer(0.2, gate.open.set).start()

    before_each_step(monkeypatch, stop_at_4)
    run = Run().override(*TINY, "loop.steps=100", "loop.checkpoint_every=3")
    assert fit(run, runs_dir=tmp_path, progress=False).stopped
    assert gate.names == ["step_00000003", "step_00000004"]


def test_a_rank_that_cannot_write_is_named_by_all_and_no_partial_checkpoint_remains(tmp_path):
    code = f"""
    from pathlib import Path
    from aiscale import checkpoint
    from aiscale.checkpoint import integrity
    from aiscale.config import Run
    from aiscale.train import fit
    real, count = integrity.fingerprints, []
    def full(*args):
        count.append(1)
        if world.rank == 1 and len(count) > 1:
            raise OSError(28, "No space left on device")
        return real(*args)
    integrity.fingerprints = full
    run = Run().override(*{TINY!r}, "parallel.strategy=ddp", "loop.steps=1000")
    try:
        fit(run, world, runs_dir="runs", progress=False)
    except checkpoint.CheckpointError as error:
        say(str(error).partition("(")[2])
    world.barrier()
    say([path.name for path in Path("runs/tiny/checkpoints").iterdir()])
    """
    done = run_ranks(code, 2, tmp_path, strategy="ddp")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    why = "rank 1 of 2 failed alone: OSError: [Errno 28] No space left on device): free some space or ask for it; "
    assert sorted(lines) == ["['step_00000002']"] * 2 + [why + "earlier checkpoints are untouched"] * 2


@pytest.mark.extended
@pytest.mark.parametrize("strategy", ["zero", "megatron"])
def test_a_full_disk_is_reported_in_one_line_and_the_previous_checkpoint_remains(strategy, trained, tmp_path):
    """A limit on file size simulates a full disk: the same library calls fail."""
    shutil.copytree(trained(strategy)[0], tmp_path / "runs")
    settings = (*TINY, f"parallel.strategy={strategy}", *STRATEGIES[strategy], "loop.steps=9")
    train = ["-m", "aiscale", "train", "--quiet", "--nproc", "2", "--resume", *words(*settings)]
    limited = ["bash", "-c", 'ulimit -f 16; exec "$@"', "limited", sys.executable, *train]
    done = subprocess.run(limited, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    said = without_greetings(done.stderr)
    assert done.returncode == 2 and said.count("\n") == 1, said
    assert "step_00000004 (" in said and "earlier checkpoints are untouched" in said, said
    assert [path.name for path in (tmp_path / "runs/tiny/checkpoints").iterdir()] == ["step_00000002"]
