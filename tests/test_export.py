"""Every strategy's checkpoint exports to the same Hugging Face folder, and transformers generates from it as we do."""

import dataclasses

import pytest
import torch

from aiscale.config import Run
from aiscale.recipes import recipe
from aiscale.train import fit, open_trained
from aiscale.train.export import export
from ranks import aiscale, run_ranks

TINY = ("model.n_layer=2", "model.n_head=2", "model.d_model=32", "model.vocab_size=257", "model.position=learned")
TINY += ("loop.steps=2", "loop.global_batch=8", "loop.seq_len=32", "loop.eval_every=0", "loop.eval_batches=1")
TINY += ("loop.device=cpu", "name=tiny", "optimizer.lr=0.05")  # a high rate, so that stale weights would show

STRATEGIES = {
    "ddp": ("parallel.strategy=ddp",),
    "zero1": ("parallel.strategy=zero", "parallel.zero_stage=1"),
    "zero3": ("parallel.strategy=zero", "parallel.zero_stage=3"),
    "fsdp": ("parallel.strategy=fsdp",),
    "pipeline": ("parallel.strategy=pipeline", "parallel.pp=2", "loop.micro_batch=4"),
    "tp2": ("parallel.strategy=megatron", "parallel.tp=2"),
    "pp2": ("parallel.strategy=megatron", "parallel.pp=2", "loop.micro_batch=4"),
}

TRAIN = """
from aiscale.recipes import recipe
from aiscale.train import fit
fit(recipe("laptop").override(*SETTINGS), world, runs_dir=".", progress=False)
"""


def assert_transformers_agrees(run_folder, exported) -> None:
    from transformers import AutoModelForCausalLM

    ours, tokenizer = open_trained(run_folder)
    theirs = AutoModelForCausalLM.from_pretrained(exported)
    prompt = torch.tensor([tokenizer.encode("The ")])
    torch.testing.assert_close(theirs(prompt).logits, ours(prompt), atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def serial(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serial")
    fit(recipe("laptop").override(*TINY), runs_dir=folder, progress=False)
    return open_trained(folder / "tiny")[0].state_dict()


#: The other strategies' weights come out of checkpoints in the same way, each by a reader of its own.
FAST = ("ddp",)
TIERS = [pytest.param(name, marks=[] if name in FAST else pytest.mark.extended) for name in STRATEGIES]


@pytest.mark.parametrize("strategy", TIERS)
def test_the_folder_holds_the_trained_weights_and_transformers_generates_from_it(strategy, serial, tmp_path):
    settings = (*TINY, *STRATEGIES[strategy])
    name = Run().override(*(s for s in settings if s.startswith("parallel.strategy"))).parallel.strategy
    done = run_ranks(TRAIN.replace("SETTINGS", repr(settings)), 2, tmp_path, strategy=name)
    assert done.returncode == 0, done.stderr
    folder = export(tmp_path / "tiny", tmp_path / "hf")
    assert_transformers_agrees(tmp_path / "tiny", folder)
    for key, tensor in open_trained(tmp_path / "tiny")[0].state_dict().items():
        torch.testing.assert_close(tensor, serial[key], atol=2e-4, rtol=0, msg=key)


@pytest.mark.extended
def test_a_rotary_recipe_is_exported_and_no_existing_folder_is_replaced_unasked(tmp_path):
    run = recipe("laptop").override(*TINY, "model.position=rotary", "loop.steps=1")
    fit(run, runs_dir=tmp_path, progress=False)
    done = aiscale("export", "tiny", "hf", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "hf\n", "")
    assert_transformers_agrees(tmp_path / "tiny", tmp_path / "hf")
    (tmp_path / "hf" / "mine.txt").write_text("")
    again = aiscale("export", "tiny", "hf", cwd=tmp_path)
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr == "aiscale: hf is not empty: name another folder, or add --overwrite\n"
    assert aiscale("export", "tiny", "hf", "--overwrite", cwd=tmp_path).returncode == 0
    assert not (tmp_path / "hf" / "mine.txt").exists()


def test_a_failed_export_leaves_nothing_behind(tmp_path):
    run = recipe("laptop").override(*TINY, "loop.steps=1")
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, parallel_residual=True))
    fit(run, runs_dir=tmp_path, progress=False)
    done = aiscale("export", "tiny", "hf", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("aiscale: no format of transformers holds model.position")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]
    (tmp_path / "file").write_text("")
    done = aiscale("export", "tiny", "file/hf", cwd=tmp_path)
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
