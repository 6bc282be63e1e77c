"""`aiscale export`: a folder that transformers opens, whole or absent."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from aiscale.train import presets
from aiscale.train.data import read_windows
from aiscale.train.export import export
from aiscale.train.options import options
from aiscale.train.record import read_metrics
from aiscale.train.trained import open_folder
from ranks import aiscale

ROOT = Path(__file__).parents[1]
#: Megatron-Core's trainer, which knows one more model
ROTARY = """
import runpy
from pathlib import Path
from aiscale.train import presets
presets.TABLE = Path("presets.toml")
runpy.run_module("aiscale.train.megatron", run_name="__main__", alter_sys=True)
"""
SHAPE = """
[turned]
layers = 2
heads = 4
width = 32
vocabulary = 300
context = 64
rotary = true
"""


@pytest.fixture
def trained(tmp_path):
    done = aiscale("train", "serial", "--steps", "2", "--save", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return tmp_path


def test_a_folder_has_the_weights_and_the_tokenizer_and_replaces_no_other_unasked(trained):
    done = aiscale("export", "run", "hf", cwd=trained)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "hf"), done.stderr
    tokens = AutoTokenizer.from_pretrained(trained / "hf")("The ", return_tensors="pt")["input_ids"]
    assert tokens.tolist() == [list(b"The ")]
    ours, _ = open_folder(trained / "run")
    theirs = AutoModelForCausalLM.from_pretrained(trained / "hf")
    torch.testing.assert_close(theirs(tokens).logits, ours(tokens).logits)
    (trained / "hf/mine.txt").write_text("")
    again = aiscale("export", "run", "hf", cwd=trained)
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr == "aiscale: hf is not empty: name another folder, or add --overwrite\n"
    assert aiscale("export", "run", "hf", "--overwrite", cwd=trained).returncode == 0
    assert not (trained / "hf/mine.txt").exists()


@pytest.mark.parametrize("model", ["tiny", pytest.param("turned", marks=pytest.mark.extended)])
def test_what_megatron_core_trained_on_a_grid_has_the_same_loss_in_transformers(
    model, tmp_path, monkeypatch
):
    """With learned positions as GPT-2, with rotary ones as GPT-NeoX."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rotary.py").write_text(ROTARY)
    (tmp_path / "presets.toml").write_text(presets.TABLE.read_text() + SHAPE)
    words = f"--model {model} --steps 3 --lr 0.01 --held-out 0.2 --evaluate-every 3 --save run"
    start = "from aiscale.launch import launch; raise SystemExit(launch(4, {}))"
    command = start.format(["rotary.py", "--tp", "2", "--pp", "2", *words.split()])
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    monkeypatch.setattr(presets, "TABLE", tmp_path / "presets.toml")
    presets.presets.cache_clear()
    folder = export("run", "hf")
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    args = options("megatron").parse_args(words.split())
    _, held_out, _ = read_windows(args)
    presets.presets.cache_clear()
    rows = held_out[torch.arange(args.batch)]
    with torch.no_grad():
        logits = theirs(rows[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    [told] = read_metrics("run", "eval")
    assert loss.item() == pytest.approx(told["loss"], abs=1e-5)


@pytest.mark.extended
@pytest.mark.parametrize("trainer", ["fsdp", "zero"])
def test_the_librarys_own_converter_reads_a_run_and_training_goes_on_from_what_was_exported(
    trainer, tmp_path
):
    """The commands of launchers/README.md."""
    words = ("--nproc", "2", "--steps", "2", "--lr", "0.01", "--save", "run")
    done = aiscale("train", trainer, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    page = (ROOT / "launchers/README.md").read_text()
    [line] = re.findall(rf"`(python -m [^`]* runs/{trainer}/00000050 [^`]*)`", page)
    command = shlex.split(line.replace(f"runs/{trainer}/00000050", "run/00000002"))
    converted = subprocess.run([sys.executable, *command[1:]], cwd=tmp_path, capture_output=True)
    assert converted.returncode == 0, converted.stderr
    export(tmp_path / "run", tmp_path / "hf")
    more = ("--nproc", "2", "--steps", "3", "--lr", "0.01", "--length", "32", "--save", "more")
    on = aiscale("train", "fsdp", "--model", "hf", *more, cwd=tmp_path)
    first = re.search(r"^step 0 loss (\S+)", on.stdout, re.M)
    before = re.search(r"^step 0 loss (\S+)", done.stdout, re.M)
    assert first and float(first[1]) < float(before[1]) - 0.5, on.stderr


def test_what_cannot_be_exported_is_refused_in_a_line_and_leaves_nothing(trained):
    (trained / "file").write_text("")
    (trained / "empty").mkdir()
    before = sorted(path.name for path in trained.iterdir())
    for run, folder, said in (
        ("run", "file/hf", "file"),
        ("empty", "hf", "empty is no folder of a trainer"),
        ("nowhere", "hf", "nowhere is no folder of a trainer"),
    ):
        done = aiscale("export", run, folder, cwd=trained)
        assert done.returncode == 2 and said in done.stderr, done.stderr
        assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
    assert sorted(path.name for path in trained.iterdir()) == before


def test_generate_continues_a_text_beyond_the_models_context(trained):
    done = aiscale(
        "generate", "run", "--prompt", "The ", "--tokens", "100", "--temperature", "0", cwd=trained
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("The ") and len(done.stdout.encode()) >= 100
