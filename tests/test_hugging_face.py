"""Models of transformers: published sizes, and the script of Hugging Face's own Trainer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from aiscale.plan import cost
from aiscale.plan.presets import model_of
from aiscale.train.export import hugging_face_tokenizer
from aiscale.train.prepare import learn


def test_gptj_has_exactly_the_published_parameters():
    """By transformers and by the formula."""
    from aiscale.train.hugging_face import Transformer

    model = Transformer("gptj-6b")
    assert sum(p.numel() for p in model.parameters()) == 6_050_882_784
    assert all(p.is_meta for p in model.parameters()), "it is made without memory"
    assert cost.parameter_count(model_of("gptj-6b")) == pytest.approx(6_050_882_784, rel=1e-3)


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-xl", 1_557_611_200),
        ("radius-355m", 354_871_296),
        ("radius-2b", 2_019_640_320),
    ],
)
def test_a_preset_has_exactly_the_published_parameters(preset, parameters):
    assert cost.parameter_count(model_of(preset)) == parameters
    from aiscale.train.model import build
    from aiscale.train.options import options

    model = build(options().parse_args(["--model", preset]))
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.extended
def test_the_script_of_hugging_faces_trainer_saves_what_two_ranks_learned(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

    (tmp_path / "my_texts").write_text(text := Path(__file__).read_text())
    tokenizer = hugging_face_tokenizer(learn("bpe", [text], bpe_vocab_size=300))
    shape = {
        "n_layer": 2,
        "n_head": 2,
        "n_embd": 16,
        "n_positions": 64,
        "vocab_size": len(tokenizer),
    }
    before = GPT2LMHeadModel(GPT2Config(**shape))
    for part in (tokenizer, before):
        part.save_pretrained(tmp_path / "before")
    script = Path(__file__).parents[1] / "launchers/hf_trainer.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(script), "--model=before", "--window=64", "--max_steps=2", "--use_cpu"]
    command += ["--per_device_train_batch_size=1", "--ddp_backend=gloo", "--bf16=false"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    how = {"cwd": tmp_path, "env": env, "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run(command, **how)
    folder = tmp_path / "runs/hf_trainer"
    assert done.returncode == 0, done.stderr
    assert f"trained as DistributedDataParallel, saved in {folder.resolve()}" in done.stdout
    after = AutoModelForCausalLM.from_pretrained(folder)
    assert len(AutoTokenizer.from_pretrained(folder)) == len(tokenizer)
    assert not torch.equal(after.lm_head.weight, before.lm_head.weight)
    tokens = torch.arange(8)[None]
    assert torch.isfinite(after(tokens).logits).all()
