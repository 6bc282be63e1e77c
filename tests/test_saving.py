"""Checkpoints: a resumed run equals an uninterrupted one, and they are either complete or absent."""

import functools
import shutil
import signal
import subprocess
import sys

import pytest

from aiscale.train import read_metrics
from aiscale.verify import jobs
from ranks import begun, run_ranks, said_on_two_nodes, without_greetings

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
def test_a_run_resumed_equals_an_uninterrupted_one(strategy, trained):
    _, first, again = trained(strategy)
    assert first == again and [step for step, _ in first] == [1, 2, 3, 4]


def test_nodes_that_do_not_share_the_run_folder_take_no_step(tmp_path):
    nodes = [tmp_path / "0", tmp_path / "1"]
    for node in nodes:
        node.mkdir()
    train = ["-m", "aiscale", "train", "--quiet", *words(*TINY, "parallel.strategy=fsdp")]
    said = said_on_two_nodes(nodes, *train)
    assert "aiscale: rank 1 does not see runs/.tiny." in said, said
    assert "which another rank wrote: choose a folder that all nodes share (--runs-dir)" in said
    assert [path for node in nodes for path in node.rglob("*") if path.is_file()] == []


def test_a_checkpoint_is_not_finished_while_a_rank_writes_to_another_disk(tmp_path):
    code = f"""
    import os
    from aiscale import checkpoint
    from aiscale.config import Run
    from aiscale.parallel import build
    os.makedirs(f"node{{world.rank}}")
    os.chdir(f"node{{world.rank}}")
    checkpoint.store.SEEN_WITHIN_S = 0
    engine = build(Run().override(*{TINY!r}, "parallel.strategy=fsdp"), world)
    try:
        checkpoint.save(engine, "checkpoints", step=2)
    except checkpoint.CheckpointError as error:
        say(world.rank, error)
    engine.close()
    """
    done = run_ranks(code, 2, tmp_path, strategy="fsdp")
    assert done.returncode == 0, done.stderr
    said = sorted(done.stdout.splitlines())
    assert len(said) == 2 and all("does not see checkpoints/.step_00000002.partial/" in line for line in said)
    assert list((tmp_path / "node0/checkpoints").iterdir()) == []


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
@pytest.mark.parametrize("strategy", ["fsdp", "megatron"])
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


#: A job whose scheduler sends its signal while torch is being imported.
SIGNALLED = """
import os, signal, sys

class Finder:
    def find_spec(name, *rest):
        if name == "torch":
            sys.meta_path.remove(Finder)
            os.kill(os.getpid(), signal.SIGUSR1)

sys.meta_path.insert(0, Finder)
from aiscale.cli import main
raise SystemExit(main())
"""


def test_a_signal_that_comes_before_the_first_step_is_not_lost(tmp_path):
    arguments = ["train", "--runs-dir", tmp_path, "--quiet", *words(*TINY, "loop.checkpoint_every=0")]
    command = [sys.executable, "-c", SIGNALLED, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 130, done.stderr
    saved = [path.name for path in (tmp_path / "tiny/checkpoints").iterdir()]
    assert saved == ["step_00000001"]


def test_a_schedulers_signal_to_the_parent_of_the_ranks_makes_them_save_and_stop(tmp_path):
    settings = ("parallel.strategy=ddp", "loop.checkpoint_every=0", "loop.steps=100000")
    job, _ = begun(tmp_path, "tiny", 2, *TINY, *settings)
    try:
        job.send_signal(signal.SIGUSR1)
        _, said = job.communicate(timeout=120)
    finally:
        job.kill()
    assert job.returncode == 130, said
    (saved,) = (tmp_path / "tiny/checkpoints").iterdir()
    assert 0 < int(saved.name.removeprefix("step_")) < 100000
