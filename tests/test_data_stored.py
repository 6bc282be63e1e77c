"""A corpus on disk reads back as written, in constant memory.
A truncated one, or one of another tokenizer, is refused."""

import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from aiscale.errors import ConfigError
from aiscale.plan.config import DataConfig
from aiscale.train.prepare import (
    Batches,
    embedded_text,
    find_text,
    learn,
    open_corpus,
    read_corpus,
    train_tokenizer,
)
from aiscale.train.prepare import stored as stored_module
from aiscale.train.prepare.corpus import Text
from aiscale.train.prepare.stored import write_corpus

BYTE = learn("byte", ())


def source(*pieces: str, name: str = "test") -> Text:
    return Text(name, "identity", lambda: iter(pieces))


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(stored_module, "BLOCK_CHARS", 100)


@pytest.fixture
def folder(tmp_path, small_blocks) -> Path:
    """The first 5000 bytes of the embedded corpus, written in blocks of 100."""
    write_corpus(source(embedded_text()[:5000]), BYTE, tmp_path / "corpus")
    return tmp_path / "corpus"


def test_tokens_read_back_as_written(folder):
    tokens, manifest, tokenizer = read_corpus(folder)
    assert len(tokens) == manifest.tokens == 5000 and tokenizer.kind == "byte"
    assert bytes(tokens.astype(np.uint8)) == embedded_text()[:5000].encode()


def test_progress_is_told_in_bytes_of_the_whole_text(tmp_path, small_blocks):
    told, text = [], "é" * 50 + " word" * 100
    write_corpus(source(text), BYTE, tmp_path, report=told.append)
    assert told == sorted(told) and len(told) > 3 and told[-1] == len(text.encode())


def test_a_corpus_larger_than_the_memory_allowed_is_written_and_read(tmp_path, monkeypatch):
    monkeypatch.setattr(stored_module, "BLOCK_CHARS", 2**17)
    # 16 MiB, 32 MiB of tokens
    text = Text("big", "identity", lambda: (embedded_text()[:65536] for _ in range(256)))
    tracemalloc.start()
    try:
        write_corpus(text, BYTE, tmp_path)
        tokens, _, _ = read_corpus(tmp_path)
        order = Batches(tokens, seq_len=256, global_batch=16, seed=1)
        for step in range(50):
            order.batch(step)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(tokens) == 2**24 and peak_bytes < 2**22


def test_a_truncated_corpus_is_refused_by_name(folder):
    os.truncate(folder / "tokens.bin", 9998)
    with pytest.raises(
        ConfigError, match=r"tokens.bin is not whole: 5000 tokens of 2 bytes, .* 9998 bytes"
    ):
        read_corpus(folder)


def test_a_folder_is_refused_to_a_run_with_another_tokenizer(folder):
    with pytest.raises(ConfigError, match="has another vocabulary"):
        open_corpus(DataConfig(corpus=str(folder)), tokenizer=learn("char", [embedded_text()]))
    with pytest.raises(
        ConfigError, match="prepared with a byte tokenizer of 256 tokens, but data.tokenizer is bpe"
    ):
        train_tokenizer(DataConfig(corpus=str(folder), tokenizer="bpe"))


@pytest.mark.parametrize("kind", ["byte", "char", "bpe"])
def test_a_corpus_is_split_once_and_loses_nothing(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("AISCALE_CACHE", str(tmp_path))
    data = DataConfig(corpus="embedded", tokenizer=kind, val_fraction=0.2)
    corpus = open_corpus(data)
    total = len(corpus.train) + len(corpus.val)
    assert len(corpus.val) == int(total * 0.2)
    assert corpus.tokenizer.decode([*corpus.train[:], *corpus.val[:]]) == embedded_text()
    assert corpus.name == "embedded"
    assert corpus.sha256 == find_text("embedded").identity
    again = open_corpus(data, tokenizer=train_tokenizer(data))
    assert (
        np.array_equal(again.val[:], corpus.val[:])
        and len(list((tmp_path / "tokens").glob("embedded*"))) == 1
    )


def test_a_changed_file_is_tokenized_again(tmp_path, monkeypatch):
    monkeypatch.setenv("AISCALE_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "text.txt"
    data = DataConfig(corpus=str(file))
    file.write_text("one " * 100)
    first = open_corpus(data)
    file.write_text("two, " * 100)
    second = open_corpus(data)
    assert len(first.train) == 360 and len(second.train) == 450 and first.sha256 != second.sha256


def test_concurrent_processes_get_the_same_corpus(tmp_path):
    (tmp_path / "text.txt").write_text(text := embedded_text() * 3)
    code = (
        "from aiscale.plan.config import DataConfig; from aiscale.train.prepare import open_corpus; import sys;"
        "c = open_corpus(DataConfig(corpus=sys.argv[1], tokenizer='char'));"
        "print(len(c.train), c.sha256, int(c.train[:].sum()))"
    )
    environment = os.environ | {"AISCALE_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / "text.txt")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    said = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0], said
    assert len({out for out, _ in said}) == 1
    assert said[0][0].startswith(f"{len(text) - len(text) // 10} ")
    _assert_one_complete_folder(tmp_path / "cache")


def _assert_one_complete_folder(cache: Path) -> None:
    folders = [path for path in (cache / "tokens").iterdir() if path.is_dir()]
    assert len(folders) == 1 and (folders[0] / "manifest.json").exists(), folders
