"""Downstream evaluation: the lm-eval harness scores our model as the model itself does."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from aiscale import cli, published
from aiscale.config import ConfigError, HFModelConfig, ModelConfig, Run
from aiscale.data import Tokenizer, embedded_text
from aiscale.data.tokenizers import ByteTokenizer, learn
from aiscale.model import GPT
from aiscale.model.build import build_model
from aiscale.train.evaluate import command, evaluate
from aiscale.train.evaluate.command import OURS, end_of_text, hugging_face_tokenizer, rows

pytest.importorskip("lm_eval", reason="pip install 'aiscale[eval]'")

TASKS = ["aiscale_last_word", "aiscale_rolling", "aiscale_two_choice"]
WINDOW = 48
#: Tolerance for log-likelihoods of up to 100 tokens in fp32, by two implementations of attention.
TOLERANCE = {"rel": 1e-5, "abs": 1e-4}


def tiny(window: int = WINDOW, vocab_size: int = 256) -> GPT:
    """A GPT with weights large enough that its predictions differ from token to token."""
    torch.manual_seed(0)
    model = GPT(ModelConfig(n_layer=2, n_head=2, d_model=32, vocab_size=vocab_size, max_seq_len=window))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model


def requests(*arguments: tuple) -> list:
    return [SimpleNamespace(args=args) for args in arguments]


def exported(model: GPT, tokenizer: Tokenizer, folder: Path) -> Path:
    model.save_pretrained(folder)
    (folder / "aiscale_tokenizer.json").write_text(tokenizer.to_json())
    return folder


# by hand --------------------------------------------------------------------------------------------------------------


def test_an_all_zero_model_gives_the_values_computed_by_hand(tmp_path):
    """All weights zero: each of 256 bytes is equally likely, always."""
    model = tiny()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    folder = exported(model, ByteTokenizer(), tmp_path)
    value = {(row["task"], row["metric"]): row["value"] for row in rows(evaluate(folder, TASKS, device="cpu"))}
    data = {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in OURS.glob("*.jsonl")}
    texts = [document["text"] for document in data["rolling"]]
    size, words = sum(len(text) for text in texts), sum(len(text.split()) for text in texts)
    last = [len(document["text"].split(" ")[-1]) + 1 for document in data["last_word"]]
    first = [document["answer"] == "1" for document in data["two_choice"]]  # ties go to the first choice
    assert value == pytest.approx(
        {
            ("aiscale_last_word", "perplexity"): 256 ** (sum(last) / len(last)),
            ("aiscale_last_word", "acc"): 0,
            ("aiscale_rolling", "word_perplexity"): 256 ** (size / words),
            ("aiscale_rolling", "byte_perplexity"): 256,
            ("aiscale_rolling", "bits_per_byte"): 8,
            ("aiscale_two_choice", "acc"): sum(first) / len(first),
        },
        rel=1e-5,
    )


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_a_whole_text_has_the_loglikelihood_that_the_model_gives_its_tokens(kind, tmp_path):
    tokenizer = learn(kind, [embedded_text()[:50_000]], bpe_vocab_size=300)
    model = tiny(vocab_size=tokenizer.vocab_size + 3)  # padded, as Megatron does
    lm = command._open(exported(model, tokenizer, tmp_path), 4, "cpu")
    text = embedded_text()[3000:3040]
    tokens = torch.tensor([end_of_text(tokenizer), *tokenizer.encode(text)])
    logp = model(tokens[None, :-1])[0].log_softmax(-1)
    expected = logp.gather(1, tokens[1:, None]).sum().item()
    assert lm.loglikelihood_rolling(requests((text,)), disable_tqdm=True) == pytest.approx([expected], **TOLERANCE)


# tokenizers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_transformers_gets_a_tokenizer_of_the_same_ids(kind):
    text = embedded_text()[:20_000] + "Zwölf naïve “quotes”\tand  two spaces\n\n"
    tokenizer = learn(kind, [text], bpe_vocab_size=400)
    theirs = hugging_face_tokenizer(tokenizer)
    assert theirs.encode(text) == tokenizer.encode(text)
    assert theirs.decode(tokenizer.encode(text)) == text
    assert theirs.eos_token_id == end_of_text(tokenizer) == theirs.pad_token_id


def test_a_tokenizer_that_knows_only_its_corpus_is_refused(tmp_path):
    words = learn("word", ["some text"])
    with pytest.raises(ConfigError, match="^the model's word tokenizer knows its own corpus alone.* byte or bpe$"):
        evaluate(exported(tiny(vocab_size=words.vocab_size), words, tmp_path), TASKS, device="cpu")


def test_each_tokenizer_has_an_end_of_text_token_that_starts_a_text():
    bpe = learn("bpe", ["some text"], bpe_vocab_size=300)
    assert bpe.decode([end_of_text(bpe)]) == "<|endoftext|>"
    assert ByteTokenizer().decode([end_of_text(ByteTokenizer())]) == "\n"


# the command ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    from aiscale.train import fit

    sets = ["name=small", "loop.steps=3", "loop.seq_len=32", "loop.global_batch=4", "model.max_seq_len=32"]
    run = Run().override(*sets, "loop.eval_batches=1", "model.n_layer=1", "model.d_model=32")
    return fit(run, runs_dir=tmp_path_factory.mktemp("runs"), progress=False).path


def test_the_command_takes_a_run_or_its_export(trained, tmp_path, capsys):
    assert cli.main(["export", str(trained), str(tmp_path / "mine")]) == 0
    found = []
    for path in (trained, tmp_path / "mine"):
        capsys.readouterr()
        options = ["--tasks", "aiscale_rolling,aiscale_last_word", "--limit", "3", "--json", "--device", "cpu"]
        assert cli.main(["evaluate", str(path), *options]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["n-samples"]["aiscale_rolling"] == {"original": 6, "effective": 3} and found[0]["limit"] == 3
    for ours, theirs in zip(rows(found[0]), rows(found[1]), strict=True):
        assert ours["metric"] == theirs["metric"] and ours["value"] == pytest.approx(theirs["value"], rel=1e-4)


@pytest.mark.extended
def test_one_rank_evaluates_a_checkpoint_of_four_radius_ranks(tmp_path, capsys):
    sets = ["loop.steps=6", "compression.warmup_steps=2", "compression.interval=3", "loop.eval_batches=1"]
    options = [word for assignment in sets for word in ("--set", assignment)]
    command = ["train", "--recipe", "radius-tiny", "--nproc", "4", "--quiet", "--runs-dir", str(tmp_path), *options]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", "aiscale", *command], check=True, timeout=120, env=env)
    assert cli.main(["evaluate", str(tmp_path / "radius-tiny"), "--tasks", "aiscale_rolling", "--limit", "1"]) == 0
    bits = float(re.search(r"bits_per_byte +(\S+)", capsys.readouterr().out)[1])
    assert 4 < bits < 8, "six steps: better than chance"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["x", "--tasks", " , "], "--tasks is empty: name at least one task, such as lambada_openai"),
        (["x", "--limit", "-1"], "--limit is -1: it must be at least 0"),
        (["x", "--device", "cuda:7"], "--device cuda:7, but torch sees no GPU here: use --device cpu"),
    ],
)
def test_bad_input_ends_in_one_line(trained, arguments, line, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    tasks = [] if "--tasks" in arguments else ["--tasks", "aiscale_rolling"]
    arguments = [str(trained) if word == "x" else word for word in arguments]
    assert cli.main(["evaluate", *arguments, *tasks]) == 2
    assert re.fullmatch(f"aiscale: {line}\n", capsys.readouterr().err)


def test_an_unknown_task_names_the_nearest(monkeypatch, trained):
    index = SimpleNamespace(all_tasks=["lambada_openai", "wikitext"])
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda **options: index)
    with pytest.raises(ConfigError, match="^no task of lm-eval is called 'nosuch': the nearest are .*wikitext"):
        evaluate(trained, ["nosuch"])


@pytest.mark.extended
def test_the_ten_tasks_of_forge_are_lm_evals_and_without_a_network_one_line_says_so(monkeypatch, trained, capsys):
    def refuse(*args, **options):
        raise ConnectionError("no\nhub")

    monkeypatch.setattr("datasets.load_dataset", refuse)
    assert cli.main(["evaluate", str(trained), "--tasks", "forge"]) == 2
    (said,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("aiscale:"))
    names = re.match(
        r"aiscale: the documents of (.*) cannot be read \(no\): connect to a network, or name tasks", said
    )[1]
    printed = [name for name in published.table("forge_lm_eval")[0] if re.match("arc|ht_|obqa|piqa|sciq", name)]
    assert len(printed) == 10 and names.split(", ") == list(command.SETS["forge"])


def test_an_encoder_is_refused_since_it_predicts_no_next_token(tmp_path):
    build_model(HFModelConfig.like(tiny().config, "bert")).save_pretrained(tmp_path)
    (tmp_path / "aiscale_tokenizer.json").write_text(ByteTokenizer().to_json())
    with pytest.raises(ConfigError, match="^BERT guesses hidden tokens, and lm-eval scores the next one"):
        evaluate(tmp_path, ["aiscale_rolling"], device="cpu")
