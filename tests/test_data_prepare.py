"""`aiscale data prepare`: local files in the formats of published corpora become shards that a run trains on."""

import functools
import gzip
import http.server
import json
import sys
import threading

import pytest

from aiscale import cli
from aiscale.config import ConfigError, DataConfig
from aiscale.data import learn, open_corpus, prepare_corpus, toy_text
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


@pytest.mark.parametrize(
    ("name", "local"),
    [
        ("shakespeare", {"path": "text", "data_files": "works.txt", "sample_by": "document"}),
        ("openwebtext", {"path": "parquet", "data_files": "pages.parquet"}),
        ("oscar", {"path": "parquet", "data_files": "pages.parquet"}),
        ("pile", {"path": "parquet", "data_files": "pages.parquet"}),
    ],
)
def test_published_corpora_are_read_in_their_publishers_formats(name, local, tmp_path, datasets, monkeypatch):
    (tmp_path / "works.txt").write_text(toy_text()[:20_000])
    datasets.Dataset.from_dict({"id": [0, 1], "text": [toy_text()[:10_000], toy_text()[10_000:20_000]]}).to_parquet(
        tmp_path / "pages.parquet"
    )
    local = {key: str(tmp_path / value) if key == "data_files" else value for key, value in local.items()}
    monkeypatch.setitem(prepare_module.HUB, name, local)
    monkeypatch.chdir(tmp_path)
    prepare_corpus(name, tokenizer="byte", progress=False)
    text = text_of(f"corpora/{name}", "byte")
    assert text.replace("\n\n", "") == toy_text()[:20_000].replace("\n\n", "")


def test_a_corpus_at_a_web_address_is_fetched_once(tmp_path, datasets, monkeypatch):
    (tmp_path / "served").mkdir()
    (tmp_path / "served/works.txt").write_text(toy_text()[:5000])
    serve = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path / "served")
    monkeypatch.setattr(http.server.SimpleHTTPRequestHandler, "log_message", lambda *_: None)
    monkeypatch.setenv("AISCALE_CACHE", str(tmp_path / "aiscale"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/works.txt"
        monkeypatch.setitem(prepare_module.HUB["shakespeare"], "data_files", url)
        prepare_corpus("shakespeare", tmp_path / "one", tokenizer="char", progress=False)
        server.shutdown()
    assert text_of(tmp_path / "one") == toy_text()[:5000]
    prepare_corpus("shakespeare", tmp_path / "two", tokenizer="char", progress=False)
    (tmp_path / "aiscale/downloads/works.txt").unlink()
    with pytest.raises(ConfigError, match=r"works.txt cannot be fetched .*refused.*: check the network, or fetch it"):
        prepare_corpus("shakespeare", tmp_path / "three", tokenizer="char", progress=False)


@pytest.mark.parametrize(
    ("name", "says"),
    [("docs.json", "docs.json cannot be read"), ("docs.jsonl", "docs.jsonl has a line that is not JSON: b")],
)
def test_a_file_whose_content_does_not_match_its_suffix_is_refused_in_one_line(name, says, tmp_path, datasets):
    (tmp_path / name).write_text("{broken\n")
    with pytest.raises(ConfigError, match=says):
        prepare_corpus(tmp_path / name, tmp_path / "out", tokenizer="byte", progress=False)


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


def test_a_tokenizer_file_from_elsewhere_is_used(tmp_path):
    bpe = learn("bpe", [toy_text()], bpe_vocab_size=300)
    (tmp_path / "tokenizer.json").write_text(bpe.to_json())
    (tmp_path / "toy.txt").write_text(toy_text()[:5000])
    arguments = dict(tokenizer=str(tmp_path / "tokenizer.json"), progress=False)
    manifest = prepare_corpus(tmp_path / "toy.txt", tmp_path / "out", **arguments)
    assert manifest.tokenizer_sha256 == bpe.sha256 and text_of(tmp_path / "out", "bpe") == toy_text()[:5000]
    assert prepare_corpus(tmp_path / "toy.txt", tmp_path / "out", **arguments) == manifest


def test_a_finished_folder_is_not_overwritten_by_another_corpus(tmp_path):
    (tmp_path / "one.txt").write_text("one")
    (tmp_path / "two.txt").write_text("two")
    prepare_corpus(tmp_path / "one.txt", tmp_path / "out", tokenizer="byte", progress=False)
    with pytest.raises(ConfigError, match="already holds corpus one in byte tokens.*: choose another --out, or delete"):
        prepare_corpus(tmp_path / "two.txt", tmp_path / "out", tokenizer="byte", progress=False)


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
