"""A checkpoint that cannot be loaded is refused in one line, with exit status 2, and nothing is written."""

import functools
import hashlib
import shutil

import pytest

from aiscale import checkpoint
from aiscale.verify import jobs
from ranks import without_greetings

TINY = (
    *("model.n_layer=2", "model.n_head=2", "model.d_model=16", "model.max_seq_len=16", "loop.seq_len=16"),
    *("loop.global_batch=4", "loop.eval_batches=1", "loop.eval_every=0", "loop.device=cpu", "loop.steps=2"),
)
STRATEGIES = {
    "ddp": (),
    "zero": ("parallel.zero_stage=2",),
    "fsdp": (),
    "pipeline": ("parallel.pp=2", "loop.micro_batch=2"),
    "megatron": ("parallel.tp=2",),
}
#: checkpoint format -> its files that hold tensors
SHARDS = {"dcp": "*.distcp", "deepspeed": "deepspeed/*optim_states.pt", "megatron": "*.pt"}


def train(folder, strategy, *more, nproc=2, settings=None):
    """(exit status, output lines) of `aiscale train` in `folder`."""
    settings = (*TINY, f"parallel.strategy={strategy}", *(STRATEGIES[strategy] if settings is None else settings))
    words = [word for setting in settings for word in ("--set", setting)]
    log = folder / "said.log"
    log.unlink(missing_ok=True)
    arguments = ["train", "--runs-dir", str(folder), "--quiet", "--nproc", str(nproc), *more, *words]
    status = jobs.train(arguments, log)
    return status, without_greetings(log.read_text()).splitlines()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """trained(strategy): a folder with a run of two steps."""

    @functools.cache
    def start(strategy):
        folder = tmp_path_factory.mktemp(strategy)
        assert train(folder, strategy) == (0, []), strategy
        return folder

    return start


def contents(folder):
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "said.log")
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def refuse(folder, *arguments, **keywords) -> str:
    """The message of `aiscale train --resume`, after checking that it is one line and that nothing was written."""
    before = contents(folder)
    status, lines = train(folder, *arguments, "--resume", "--set", "loop.steps=4", **keywords)
    assert status == 2 and len(lines) == 1, lines
    assert contents(folder) == before
    return lines[0]


@pytest.mark.parametrize(
    "strategy", [s if s == "ddp" else pytest.param(s, marks=pytest.mark.extended) for s in STRATEGIES]
)
def test_a_truncated_shard_is_refused(strategy, trained, tmp_path):
    shutil.copytree(trained(strategy), tmp_path / "copy")
    newest = checkpoint.latest(next((tmp_path / "copy").glob("*/checkpoints")))
    shard = sorted(newest.glob(SHARDS[checkpoint.read_note(newest)["format"]]))[-1]  # not rank 0's
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    said = refuse(tmp_path / "copy", strategy)
    name = shard.relative_to(newest)
    assert said.startswith(f"aiscale: {newest} is damaged ({name} has ") and "nothing to resume from" in said, said


@pytest.mark.extended
@pytest.mark.parametrize(
    ("wrote", "reads", "options", "message"),
    [
        ("zero", "zero", {"settings": ("parallel.zero_stage=3",)}, "at ZeRO stage 2, but this job has 2 at stage 3"),
        ("zero", "zero", {"nproc": 4}, "was written by 2 ranks at ZeRO stage 2, but this job has 4 at stage 2"),
        ("zero", "ddp", {}, "is of strategy zero, which ddp cannot read: set parallel.strategy=zero"),
        ("megatron", "pipeline", {}, "is of strategy megatron, which pipeline cannot read"),
    ],
)
def test_a_checkpoint_of_another_layout_is_refused(wrote, reads, options, message, trained):
    assert message in refuse(trained(wrote), reads, **options)
