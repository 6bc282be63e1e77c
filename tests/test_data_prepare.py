"""`aiscale data prepare`: local files in the formats of published corpora become tokens that a run trains on."""

import gzip
import json
import sys

import pytest

from aiscale import cli
from aiscale.config import DataConfig
from aiscale.data import open_corpus, prepare_corpus

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


def test_the_command_prints_how_to_train_on_what_it_made(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text("a b a b")
    command = ["data", "prepare", "words.txt", "--tokenizer", "char"]
    assert cli.main(command) == 0
    first, train = capsys.readouterr().out.splitlines()
    assert first == "corpora/words: 7 tokens of a vocabulary of 3, from 7 bytes of text"
    assert cli.main([*train.split()[1:], "--show"]) == 0
    run = json.loads(capsys.readouterr().out)
    assert (run["data"]["corpus"], run["data"]["tokenizer"], run["model"]["vocab_size"]) == ("corpora/words", "char", 3)
    assert cli.main(command) == 2
    assert "already holds a corpus: choose another --out, or delete it" in capsys.readouterr().err
