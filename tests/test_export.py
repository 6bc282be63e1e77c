"""`aiscale export`: a folder that transformers opens, whole or absent."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from aiscale.train.trained import open_folder
from ranks import aiscale


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
