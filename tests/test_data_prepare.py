"""`aiscale data prepare`: local files in the formats of published corpora become shards that a run trains on."""

import gzip
import json
import sys

import pytest

from aiscale import cli
from aiscale.config import ConfigError, DataConfig
from aiscale.data import open_corpus, prepare_corpus, toy_text
from aiscale.data import prepare as prepare_module

DOCUMENTS = ["First document.\nTwo lines of it.", "Second: été.", "Third, the last one."]


def text_of(folder, kind="char") -> str:
    corpus = open_corpus(DataConfig(corpus=str(folder), tokenizer=kind))
    return corpus.tokenizer.decode([*corpus.train[:], *corpus.val[:]])


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    """The datasets library, without network and with a private cache."""
    library = pytest.importorskip("datasets")
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(library.config, "HF_HUB_OFFLINE", True)
    library.disable_progress_bars()
    return library


def test_text_files_need_no_library(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "texts").mkdir()
    for number, document in enumerate(DOCUMENTS):
        (tmp_path / f"texts/{number}.txt").write_text(document)
    manifest = prepare_corpus(tmp_path / "texts", tmp_path / "out", tokenizer="char", progress=False)
    assert text_of(tmp_path / "out") == "\n\n".join(DOCUMENTS)
    assert manifest.name == "texts" and manifest.text_bytes == len("\n\n".join(DOCUMENTS).encode())


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".json", ".parquet", ".txt.gz"])
def test_every_format_of_the_library_gives_its_documents(suffix, tmp_path, datasets):
    file = tmp_path / f"docs{suffix}"
    rows = [{"text": document, "id": i} for i, document in enumerate(DOCUMENTS)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(file)
    elif suffix == ".txt.gz":
        file.write_bytes(gzip.compress("\n\n".join(DOCUMENTS).encode()))
    else:
        file.write_bytes(gzip.compress(lines.encode()) if suffix.endswith("gz") else lines.encode())
    prepare_corpus(file, tmp_path / "out", tokenizer="char", progress=False)
    assert text_of(tmp_path / "out") == "\n\n".join(DOCUMENTS)


def test_documents_in_bpe_are_divided_by_its_own_token(tmp_path, datasets):
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in DOCUMENTS))
    prepare_corpus(
        [tmp_path / "docs.jsonl"], tmp_path / "out", tokenizer="bpe", bpe_vocab_size=300, field="body", progress=False
    )
    assert text_of(tmp_path / "out", "bpe") == "<|endoftext|>".join(DOCUMENTS)


def test_the_same_command_resumes_after_an_interruption_and_does_nothing_when_done(tmp_path, monkeypatch):
    from aiscale.data import shards

    monkeypatch.setattr(shards, "BLOCK_CHARS", 10_000)
    (tmp_path / "toy.txt").write_text(toy_text())
    out = tmp_path / "out"

    def prepare():
        return prepare_corpus(
            tmp_path / "toy.txt", out, tokenizer="bpe", bpe_vocab_size=400, shard_tokens=20_000, progress=False
        )

    class Interrupted(prepare_module.tqdm):
        def update(self, text_bytes):
            if text_bytes > 200_000:
                raise KeyboardInterrupt

    with monkeypatch.context() as interrupting:
        interrupting.setattr(prepare_module, "tqdm", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare()
    with pytest.raises(
        ConfigError, match="was begun with a bpe tokenizer, not char: choose another --out or delete it"
    ):
        prepare_corpus(tmp_path / "toy.txt", out, tokenizer="char", progress=False)
    monkeypatch.setattr(prepare_module, "learn", None)  # the vocabulary was learnt in the first run
    kept = {file: file.stat().st_mtime_ns for file in out.glob("*.tokens")}
    assert len(kept) >= 2
    manifest = prepare()
    assert all(file.stat().st_mtime_ns == time for file, time in kept.items())
    assert text_of(out, "bpe") == toy_text() and len(manifest.shards) > len(kept)
    assert prepare() == manifest


def test_the_command_prints_its_result_and_shows_it_again(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text("a b a b")
    assert cli.main(["data", "prepare", "words.txt", "--tokenizer", "word", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["tokens"] == 4 and "learning the word vocabulary" in said.err
    assert cli.main(["data", "show", "corpora/words"]) == 0
    assert (
        capsys.readouterr().out == "corpora/words: 4 tokens of a vocabulary of 3, from 7 bytes of text, in 1 shards\n"
    )
    assert cli.main(["data", "prepare", "words.txt", "--tokenizer", "word"]) == 0
    train = capsys.readouterr().out.splitlines()[-1].split()
    assert train[:2] == ["aiscale", "train"] and cli.main([*train[1:], "--show"]) == 0
    run = json.loads(capsys.readouterr().out)
    assert (run["data"]["corpus"], run["data"]["tokenizer"], run["model"]["vocab_size"]) == ("corpora/words", "word", 3)
    assert cli.main(["data", "prepare", "nowhere.txt"]) == 2
    assert capsys.readouterr().err.startswith("aiscale: corpus 'nowhere.txt' does not exist")
