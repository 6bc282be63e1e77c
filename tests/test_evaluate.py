"""Downstream evaluation: the lm-eval harness scores our model as the model itself does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from aiscale import cli
from aiscale.errors import ConfigError
from aiscale.train.evaluate import OURS, evaluate
from aiscale.train.export import hugging_face_tokenizer
from aiscale.train.prepare import Tokenizer, embedded_text
from aiscale.train.prepare.tokenizers import ByteTokenizer, learn
from aiscale.train.tasks import held_out
from ranks import aiscale

pytest.importorskip("lm_eval", reason="pip install 'aiscale[eval]'")

TASKS = ["aiscale_last_word", "aiscale_rolling", "aiscale_two_choice"]


def tiny(vocab_size: int = 256) -> GPT2LMHeadModel:
    """A GPT with weights large enough that its predictions differ from token to token."""
    torch.manual_seed(0)
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 48, "vocab_size": vocab_size}
    model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=None, eos_token_id=None)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model


def exported(model: GPT2LMHeadModel, tokenizer: Tokenizer, folder: Path) -> Path:
    model.save_pretrained(folder)
    hugging_face_tokenizer(tokenizer).save_pretrained(folder)
    return folder


def test_an_all_zero_model_gives_the_values_computed_by_hand(tmp_path):
    """All weights zero: each of 256 bytes is equally likely, always."""
    model = tiny()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    results = evaluate(exported(model, ByteTokenizer(), tmp_path), TASKS)["results"]
    data = {
        path.stem: [json.loads(line) for line in path.read_text().splitlines()]
        for path in OURS.glob("*.jsonl")
    }
    texts = [document["text"] for document in data["rolling"]]
    size, words = sum(len(text) for text in texts), sum(len(text.split()) for text in texts)
    last = [len(document["text"].split(" ")[-1]) + 1 for document in data["last_word"]]
    # ties go to the first choice
    first = [document["answer"] == "1" for document in data["two_choice"]]
    expected = {
        ("aiscale_last_word", "perplexity"): 256 ** (sum(last) / len(last)),
        ("aiscale_last_word", "acc"): 0,
        ("aiscale_rolling", "word_perplexity"): 256 ** (size / words),
        ("aiscale_rolling", "byte_perplexity"): 256,
        ("aiscale_rolling", "bits_per_byte"): 8,
        ("aiscale_two_choice", "acc"): sum(first) / len(first),
    }
    assert {key: results[key[0]][f"{key[1]},none"] for key in expected} == pytest.approx(
        expected, rel=1e-5
    )


@pytest.mark.extended
def test_items_of_the_text_held_out_come_by_the_hundred_and_only_of_a_run_that_has_one(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(embedded_text())
    words = ["--steps=1", f"--text={text}", "--length=32"]
    for name, share in (("run", "0.2"), ("all", "0")):
        run = tmp_path / name
        assert aiscale("train", "serial", *words, f"--save={run}", f"--held-out={share}")
    tasks = ["aiscale_continuation", "aiscale_repeated_word"]
    found = evaluate(tmp_path / "run", tasks)
    assert found["n-samples"]["aiscale_continuation"]["original"] == 400
    assert found["n-samples"]["aiscale_repeated_word"]["original"] > 200
    # It has learned nothing: chance, within four standard errors of 400 items.
    assert 0.4 < found["results"]["aiscale_continuation"]["acc,none"] < 0.6
    assert found["results"]["aiscale_repeated_word"]["acc,none"] == 0
    with pytest.raises(ConfigError, match="held out no text"):
        evaluate(tmp_path / "all", tasks)
    text.write_text("another")
    with pytest.raises(ConfigError, match="no longer the text"):
        evaluate(tmp_path / "run", tasks)


def test_an_item_of_repeated_words_has_its_answer_in_the_context(tmp_path):
    file = tmp_path / "held_out.txt"
    file.write_text(embedded_text()[:60_000], encoding="utf-8")
    items = list(held_out.repeated_words(str(file))["test"])
    assert items
    for item in items:
        assert item["context"] + item["word"] in file.read_text(encoding="utf-8")
        assert item["word"] in re.findall(r"\w+", item["context"])
    for item in held_out.continuations(str(file))["test"]:
        right = item["context"] + item["choices"][item["answer"]]
        assert right in file.read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_a_whole_text_has_the_loglikelihood_that_the_model_gives_its_tokens(kind, tmp_path):
    from lm_eval.models.huggingface import HFLM

    tokenizer = learn(kind, [embedded_text()[:50_000]], bpe_vocab_size=300)
    model = tiny(vocab_size=tokenizer.vocab_size + 3)  # padded, as Megatron does
    lm = HFLM(str(exported(model, tokenizer, tmp_path)), batch_size=4, device="cpu")
    text = embedded_text()[3000:3040]
    tokens = torch.tensor([*tokenizer.encode(tokenizer.separator)[-1:], *tokenizer.encode(text)])
    logp = model(tokens[None, :-1]).logits[0].log_softmax(-1)
    expected = logp.gather(1, tokens[1:, None]).sum().item()
    request = SimpleNamespace(args=(text,))
    assert lm.loglikelihood_rolling([request], disable_tqdm=True) == pytest.approx(
        [expected], rel=1e-5, abs=1e-4
    )


def test_the_command_takes_a_run_or_its_export(tmp_path, capsys):
    trained = tmp_path / "small"
    done = aiscale("train", "serial", "--steps", "3", "--save", str(trained))
    assert done.returncode == 0, done.stderr
    assert cli.main(["export", str(trained), str(tmp_path / "mine")]) == 0
    outputs = []
    for path in (trained, tmp_path / "mine"):
        capsys.readouterr()
        assert (
            cli.main(
                ["evaluate", str(path), "--tasks", "aiscale_rolling", "--limit", "3", "--json"]
            )
            == 0
        )
        outputs.append(json.loads(capsys.readouterr().out))
    assert outputs[0]["n-samples"]["aiscale_rolling"] == {"original": 6, "effective": 3}
    first, second = (
        output["results"]["aiscale_rolling"]["bits_per_byte,none"] for output in outputs
    )
    assert first == pytest.approx(second, rel=1e-4)
    with pytest.raises(
        ConfigError, match="^no task of lm-eval is called 'nosuch': `lm-eval ls tasks` lists all$"
    ):
        evaluate(trained, ["nosuch"])
