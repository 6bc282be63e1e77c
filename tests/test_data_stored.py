"""A corpus on disk reads back as written, in constant memory. A truncated one is refused."""

import os
import tracemalloc
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

from aiscale.train.data import Windows, batches, read_tokens
from aiscale.train.prepare import embedded_text, learn
from aiscale.train.prepare import stored as stored_module
from aiscale.train.prepare.stored import read_tokenizer, write_corpus

BYTE = learn("byte", ())


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(stored_module, "BLOCK_CHARS", 100)


@pytest.fixture
def folder(tmp_path, small_blocks) -> Path:
    """The first 5000 bytes of the embedded corpus, written in blocks of 100."""
    write_corpus("test", [embedded_text()[:5000]], BYTE, tmp_path / "corpus")
    return tmp_path / "corpus"


def test_tokens_read_back_as_written(folder):
    tokens, vocabulary, _ = read_tokens(folder)
    assert (len(tokens), vocabulary, read_tokenizer(folder).kind) == (5000, 256, "byte")
    assert bytes(tokens.astype(np.uint8)) == embedded_text()[:5000].encode()


def test_progress_is_told_in_bytes_of_the_whole_text(tmp_path, small_blocks):
    told, text = [], "é" * 50 + " word" * 100
    write_corpus("test", [text], BYTE, tmp_path, report=told.append)
    assert told == sorted(told) and len(told) > 3 and told[-1] == len(text.encode())


def test_a_corpus_larger_than_the_memory_allowed_is_written_and_read(tmp_path, monkeypatch):
    monkeypatch.setattr(stored_module, "BLOCK_CHARS", 2**17)
    # 16 MiB, 32 MiB of tokens
    pieces = (embedded_text()[:65536] for _ in range(256))
    tracemalloc.start()
    try:
        write_corpus("big", pieces, BYTE, tmp_path)
        tokens, *_ = read_tokens(tmp_path)
        for _ in batches(Windows(tokens, 256), 0, Namespace(batch=16, steps=50), 0, 1):
            pass
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(tokens) == 2**24 and peak_bytes < 2**22


@pytest.mark.parametrize("nbytes", [9999, 9998, 0, None])
def test_a_truncated_corpus_is_refused_in_one_line(folder, nbytes, capsys):
    file = folder / "tokens.bin"
    if nbytes is None:
        file.unlink()
    else:
        os.truncate(file, nbytes)
    with pytest.raises(SystemExit):
        read_tokens(folder)
    found = f"{nbytes or 0:,} bytes, not 10,000: delete {folder} and prepare it again"
    assert capsys.readouterr().err == f"aiscale: {file} has {found}\n"
