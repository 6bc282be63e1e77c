"""`aiscale data prepare`: local files in corpora's formats become tokens that a run trains on."""

import gzip
import json
import sys

import pytest

from aiscale import cli
from aiscale.errors import ConfigError
from aiscale.train.data import read_tokens, read_windows
from aiscale.train.options import options
from aiscale.train.prepare import prepare_corpus
from aiscale.train.prepare.stored import read_tokenizer

DOCUMENTS = ["First document.\nTwo lines of it.", "Second: été.", "Third, the last one."]


def text_of(folder) -> str:
    tokens, *_ = read_tokens(folder)
    return read_tokenizer(folder).decode(tokens)


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
    manifest = prepare_corpus(
        tmp_path / "texts", tmp_path / "out", tokenizer="char", progress=False
    )
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
    (tmp_path / "docs.jsonl").write_text(
        "".join(json.dumps({"body": text}) + "\n" for text in DOCUMENTS)
    )
    prepare_corpus(
        [tmp_path / "docs.jsonl"],
        tmp_path / "out",
        tokenizer="bpe",
        bpe_vocab_size=300,
        field="body",
        progress=False,
    )
    assert text_of(tmp_path / "out") == "<|endoftext|>".join(DOCUMENTS)


def test_the_command_prints_how_to_train_on_what_it_made(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text("a b a b")
    command = ["data", "prepare", "words.txt", "--tokenizer", "char"]
    assert cli.main(command) == 0
    first, train = capsys.readouterr().out.splitlines()
    assert first == "corpora/words: 7 tokens of a vocabulary of 3, from 7 bytes of text"
    aiscale, command_name, trainer, *words = train.split()
    assert (aiscale, command_name, trainer) == ("aiscale", "train", "ddp")
    args = options(trainer).parse_args([*words, "--length", "2"])
    tokens, vocabulary, _ = read_tokens(args.text)
    assert (len(tokens), vocabulary) == (7, 3)
    read_windows(args)  # the model's vocabulary is large enough
    assert cli.main(command) == 2
    assert "already holds a corpus: choose another --out, or delete it" in capsys.readouterr().err


BAD_LINES = {  # a line -> why it is no record
    b'["a"]': "is a list, not an object",
    b'"a"': "is a text, not an object",
    b'{"body": "a"}': "has no field 'text' .its fields: 'body'; --field",
    b'{"text": null}': "has null in field 'text', not a text",
    b'{"text": 5}': "has a number in field 'text'",
    b'{"text": NaN}': "has a number in field 'text'",
    b'{"text": ' + b"1" * 5000 + b"}": "has a number in field 'text'",
    b'{"text": {"a": 1}}': "has an object in field 'text'",
    b'{"text": "a", "text": "b"}': "has the key 'text' twice",
    rb'{"text": "\ud83d"}': r"has \\ud83d in 'text', half of a surrogate pair",
    rb'{"text": "a", "id": "\ud83d"}': r"has \\ud83d in 'id'",
    b'{"text": "a': "is not JSON .Unterminated string",
    b'{"text": "a\x00"}': "is not JSON .Invalid control character",
    b'{"text": "\xff"}': "is not UTF-8 .byte 0xff at offset 10 of the line",
    b"[" * 100_000: "is not readable JSON .too deeply nested",
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("line", BAD_LINES, ids=BAD_LINES.get)
def test_a_bad_line_is_named_or_left_out(line, packed, tmp_path):
    file = tmp_path / ("docs.jsonl.gz" if packed else "docs.jsonl")
    good = json.dumps({"text": "good", "n": 0}).encode()
    content = b"\n".join([b"\xef\xbb\xbf" + good, b"", line, good])
    file.write_bytes(gzip.compress(content) if packed else content)
    options = {"tokenizer": "char", "progress": False}
    message = f"{file}:3 {BAD_LINES[line]}.*--skip-bad-records"
    with pytest.raises(ConfigError, match=message) as error:
        prepare_corpus(file, tmp_path / "out", **options)
    assert "\n" not in str(error.value)
    left_out = {}
    prepare_corpus(file, tmp_path / "out", left_out=left_out, **options)
    assert list(left_out) == [f"{file}:3"] and text_of(tmp_path / "out") == "good\n\ngood"


def test_whole_lines_are_not_bad(tmp_path):
    """Numbers and characters that JSON allows, and Python or a text editor does not expect."""
    file = tmp_path / "docs.jsonl"
    file.write_text('{"text": "a\u2028b", "n": ' + "1" * 5000 + "}")
    prepare_corpus(file, tmp_path / "out", tokenizer="char", progress=False)
    assert text_of(tmp_path / "out") == "a\u2028b"


@pytest.mark.parametrize("suffix", [".json", ".parquet"])
def test_a_bad_record_of_the_library_is_named_or_left_out(suffix, tmp_path, datasets):
    file = tmp_path / f"docs{suffix}"
    rows = datasets.Dataset.from_list([{"text": "good"}, {"text": None}, {"text": "good"}])
    rows.to_parquet(file) if suffix == ".parquet" else rows.to_json(file)
    options = {"tokenizer": "char", "progress": False}
    with pytest.raises(ConfigError, match=f"docs{suffix}, record 2 has null in field 'text'"):
        prepare_corpus(file, tmp_path / "out", **options)
    prepare_corpus(file, tmp_path / "out", left_out={}, **options)
    assert text_of(tmp_path / "out") == "good\n\ngood"


def test_a_broken_file_of_the_library_is_refused_in_one_line(tmp_path, datasets):
    (tmp_path / "docs.json").write_text('{"text": "good"}\n{"text": "go')
    with pytest.raises(ConfigError, match="docs.json cannot be read by `datasets`") as error:
        prepare_corpus(tmp_path / "docs.json", tmp_path / "out", progress=False)
    assert "\n" not in str(error.value)


def test_the_command_counts_the_records_it_leaves_out(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs.jsonl").write_text('{"text": null}\n{"text": "a b a b"}\n[]\n')
    command = ["data", "prepare", "docs.jsonl", "--tokenizer", "char"]
    assert cli.main(command) == 2
    assert "docs.jsonl:1 has null in field 'text', not a text" in capsys.readouterr().err
    assert cli.main([*command, "--skip-bad-records"]) == 0
    first = "2 records are left out; the first: docs.jsonl:1 has null in field 'text', not a text"
    assert first in capsys.readouterr().err
