"""Cleaning a corpus: planted duplicates and test texts are found, reasons are told."""

from __future__ import annotations

import json

import numpy as np
import pytest

from aiscale import cli
from aiscale.errors import ConfigError
from aiscale.train.data import read_tokens
from aiscale.train.prepare import (
    band_keys,
    clean,
    clean_corpus,
    found_share,
    kept,
    science,
    similarity,
)
from aiscale.train.prepare.filters import texts_in, why_dropped
from aiscale.train.prepare.stored import read_tokenizer
from aiscale.train.prepare.tokenizers import learn

STOP = "the of and to that with".split()


def prose(rng: np.random.Generator, words: int = 120) -> str:
    """English, by its stop words; no two runs of five words are alike."""
    return " ".join(
        rng.choice(STOP) if rng.random() < 0.3 else f"a{rng.integers(10**6)}x" for _ in range(words)
    )


def write(path, texts, domains=("physics", "chemistry")):
    rows = [
        {"text": text, "id": i, "domain": domains[i % len(domains)]} for i, text in enumerate(texts)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def bytes_of(folder) -> dict[str, bytes]:
    return {f.relative_to(folder).as_posix(): f.read_bytes() for f in sorted(folder.rglob("*.bin"))}


def test_planted_copies_and_a_planted_test_text_go_and_the_rest_stays(tmp_path):
    rng = np.random.default_rng(0)
    texts, test = [prose(rng) for _ in range(200)], prose(rng, 40)
    copies = [text.replace(text.split()[60], "changed", 1) for text in texts[:50]]
    leaks = [
        f"{prose(rng, 60)} {' '.join(test.upper().split()[10:23])} {prose(rng, 60)}"
        for _ in range(5)
    ]
    short = f"{prose(rng, 60)} {' '.join(test.split()[10:22])} {prose(rng, 60)}"  # 12 words of it
    file = write(tmp_path / "docs.jsonl", [*texts, *copies, *leaks, short])
    report = clean_corpus(
        file, tmp_path / "out", against=[test], bpe_vocab_size=300, progress=False
    )
    stayed = {int(d["id"]) for d in kept(tmp_path / "out")}
    assert report["dropped"]["in a test set"]["documents"] == 5
    # similarity 0.92: 99.99 % are found
    assert report["dropped"]["near duplicate"]["documents"] >= 48
    assert stayed >= {*range(200), 255} and not stayed & {*range(250, 255)}
    assert sum(report["domains"][d]["documents"] for d in ("physics", "chemistry")) == len(stayed)


def test_bad_records_and_files_stop_the_cleaning_or_are_counted(tmp_path):
    rng = np.random.default_rng(4)
    corpus, test = tmp_path / "corpus", tmp_path / "test.jsonl"
    corpus.mkdir()
    file = write(corpus / "docs.jsonl", [prose(rng) for _ in range(3)])
    file.write_text(file.read_text() + '{"text": "a", "id": "\\ud83d"}\n')
    options = {"bpe_vocab_size": 300, "progress": False}
    with pytest.raises(ConfigError, match="docs.jsonl:4 has .*ud83d in 'id'"):
        clean_corpus(corpus, tmp_path / "one", **options)
    left_out = {}
    report = clean_corpus(corpus, tmp_path / "two", left_out=left_out, **options)
    assert list(left_out) == [f"{file}:4"] and report["left_out"] == 1
    (corpus / "latin1.txt").write_bytes(prose(rng).encode() + b" caf\xe9")
    with pytest.raises(ConfigError, match="latin1.txt is not UTF-8"):
        clean_corpus(corpus, tmp_path / "three", left_out={}, **options)
    test.write_text('{"question": "a\u2028b"}\n["a"]\n')
    with pytest.raises(ConfigError, match="test.jsonl:2 is a list, not an object"):
        list(texts_in(test))
    assert list(texts_in(test, left_out)) == ["a\u2028b"]


def test_copies_are_found_as_often_as_the_bands_promise():
    rng, pairs = np.random.default_rng(1), []
    for _ in range(300):
        words = prose(rng).split()
        other = [f"b{rng.integers(10**6)}" if rng.random() < 0.03 else word for word in words]
        pairs.append((" ".join(words), " ".join(other)))
    found = np.mean([(band_keys(a) == band_keys(b)).any() for a, b in pairs])
    expected = np.mean([found_share(similarity(a, b)) for a, b in pairs])
    assert abs(found - expected) < 3 * (expected * (1 - expected) / 300) ** 0.5


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("the end of it", "too short"),
        (" ".join(f"wort{i} und" for i in range(60)), "not English"),
        ("the of " + " ".join(str(i) for i in range(1000, 1099)), "too few letters"),
        ("the of and to " + "#planned words here " * 60, "too many symbols"),
        ("the same line with words of it\n" * 20, "repeats its lines"),
        (
            "and so everything continues with that of many more others ...\n" * 10,
            "a list, or cut off",
        ),
        (prose(np.random.default_rng(2)), ""),
    ],
)
def test_the_report_says_which_rule_a_text_broke(text, reason):
    assert why_dropped(text).startswith(reason) and bool(reason) == bool(why_dropped(text))


def test_a_run_trains_on_each_domain_and_on_all(tmp_path):
    rng = np.random.default_rng(3)
    file = write(tmp_path / "docs.jsonl", [prose(rng) for _ in range(40)])
    report = clean_corpus(file, tmp_path / "out", bpe_vocab_size=300, progress=False)
    for name, facts in [("all", report["kept"]), *report["domains"].items()]:
        tokens, *_ = read_tokens(tmp_path / "out" / name)
        assert len(tokens) == facts["tokens"]
        text = read_tokenizer(tmp_path / "out" / name).decode(tokens)
        assert text.count("<|endoftext|>") == facts["documents"]


def test_a_tokenizer_is_learnt_from_about_the_stated_number_of_characters(tmp_path, monkeypatch):
    rng, learnt_chars = np.random.default_rng(6), []

    def noting(kind, sample, **how):
        text = "".join(sample)
        learnt_chars.append(len(text))
        return learn(kind, [text], **how)

    monkeypatch.setattr(clean, "LEARN_CHARS", 20_000)
    monkeypatch.setattr(clean, "learn", noting)
    file = write(tmp_path / "docs.jsonl", [prose(rng) for _ in range(200)])
    report = clean_corpus(file, tmp_path / "out", bpe_vocab_size=300, progress=False)
    assert report["kept"]["bytes"] > 100_000 and 10_000 < learnt_chars[0] < 22_000


@pytest.mark.extended
def test_two_processes_give_the_shards_of_one(tmp_path):
    rng = np.random.default_rng(5)
    file = write(tmp_path / "docs.jsonl", [prose(rng) for _ in range(600)])
    for processes in (1, 2):
        clean_corpus(
            file, tmp_path / str(processes), processes=processes, bpe_vocab_size=300, progress=False
        )
    assert bytes_of(tmp_path / "1") == bytes_of(tmp_path / "2")


def test_packages_are_read_as_text(tmp_path, capsys):
    documents = list(science.package_documents("networkx"))
    assert len(documents) > 1000 and {d["domain"] for d in documents} == {"mathematics"}
    import networkx

    known = networkx.pagerank.__doc__.strip().split("\n")[0]
    assert any(d["text"].startswith(known) for d in documents)
    (tmp_path / "test.jsonl").write_text(json.dumps({"question": documents[100]["text"]}) + "\n")
    command = [
        "data",
        "prepare",
        "package:mpmath",
        "--clean",
        "--against",
        str(tmp_path / "test.jsonl"),
    ]
    assert cli.main([*command, "--out", str(tmp_path / "out"), "--vocab-size", "300"]) == 0
    assert "| **kept** |" in capsys.readouterr().out
    assert (
        json.loads((tmp_path / "out/report.json").read_text())["sources"]["mpmath"]["documents"]
        > 50
    )
