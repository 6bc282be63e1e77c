"""Cleaning a corpus: planted duplicates and test texts are found, an interruption changes nothing, reasons are told."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import psutil
import pytest

from aiscale import cli
from aiscale.config import ConfigError, DataConfig
from aiscale.data import band_keys, clean, clean_corpus, found_share, kept, open_corpus, science, similarity
from aiscale.data.filters import why_dropped

MB = int(os.environ.get("AISCALE_CLEAN_MB", "4"))  #: of text for the benchmark, 1000 for a gigabyte
SMALL = MB < 20
MOST_MB = 1500  #: of three processes: torch in each, a part or a block of text with its tokens

STOP = "the of and to that with".split()


def prose(rng: np.random.Generator, words: int = 120) -> str:
    """English, by its stop words; no two runs of five words are alike."""
    return " ".join(rng.choice(STOP) if rng.random() < 0.3 else f"a{rng.integers(10**6)}x" for _ in range(words))


def write(path, texts, domains=("physics", "chemistry")):
    rows = [{"text": text, "id": i, "domain": domains[i % len(domains)]} for i, text in enumerate(texts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def bytes_of(folder) -> dict[str, bytes]:
    return {f.relative_to(folder).as_posix(): f.read_bytes() for f in sorted(folder.rglob("*.tokens"))}


def test_planted_copies_and_a_planted_test_text_go_and_the_rest_stays(tmp_path):
    rng = np.random.default_rng(0)
    texts, test = [prose(rng) for _ in range(200)], prose(rng, 40)
    copies = [text.replace(text.split()[60], "changed", 1) for text in texts[:50]]
    leaks = [f"{prose(rng, 60)} {' '.join(test.upper().split()[10:23])} {prose(rng, 60)}" for _ in range(5)]
    short = f"{prose(rng, 60)} {' '.join(test.split()[10:22])} {prose(rng, 60)}"  # 12 words of it
    file = write(tmp_path / "docs.jsonl", [*texts, *copies, *leaks, short])
    report = clean_corpus(file, tmp_path / "out", against=[test], bpe_vocab_size=300, progress=False)
    stayed = {int(d["id"]) for d in kept(tmp_path / "out")}
    assert report["dropped"]["in a test set"]["documents"] == 5
    assert report["dropped"]["near duplicate"]["documents"] >= 48  # similarity 0.92: 99.99 % are found
    assert stayed >= {*range(200), 255} and not stayed & {*range(250, 255)}
    assert sum(report["domains"][d]["documents"] for d in ("physics", "chemistry")) == len(stayed)


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
        ("and so everything continues with that of many more others ...\n" * 10, "a list, or cut off"),
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
        corpus = open_corpus(DataConfig(corpus=str(tmp_path / "out" / name), tokenizer="bpe"))
        assert len(corpus.train) + len(corpus.val) == facts["tokens"]
        assert corpus.tokenizer.decode([*corpus.train[:], *corpus.val[:]]).count("<|endoftext|>") == facts["documents"]


@pytest.mark.extended
def test_killed_at_any_part_it_goes_on_to_the_same_shards(tmp_path, monkeypatch):
    rng = np.random.default_rng(4)
    write(tmp_path / "docs.jsonl", [prose(rng) for _ in range(1500)])
    program = (
        "import sys; from aiscale.data import clean; clean.PART_BYTES = 2**16\n"
        "clean.clean_corpus(sys.argv[1], sys.argv[2], bpe_vocab_size=300, shard_tokens=2**16, progress=False)"
    )
    for wanted in ("00002.json", "kept.rows"):  # killed as soon as this file stands
        out = tmp_path / f"out-{wanted}"
        job = subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "docs.jsonl"), str(out)])
        while not (out / wanted).exists() and job.poll() is None:
            time.sleep(0.005)
        os.kill(job.pid, signal.SIGKILL)
        job.wait()
    monkeypatch.setattr(clean, "PART_BYTES", 2**16)
    options = {"bpe_vocab_size": 300, "shard_tokens": 2**16, "progress": False}
    for out in ("whole", "out-00002.json", "out-kept.rows"):
        clean_corpus(tmp_path / "docs.jsonl", tmp_path / out, **options)
    whole = bytes_of(tmp_path / "whole")
    assert len(whole) >= 3 and whole == bytes_of(tmp_path / "out-00002.json") == bytes_of(tmp_path / "out-kept.rows")
    with pytest.raises(ConfigError, match="was begun with other texts or sizes: choose another --out"):
        clean_corpus(tmp_path / "docs.jsonl", tmp_path / "whole", **options | {"bpe_vocab_size": 400})


@pytest.mark.extended
def test_two_processes_give_the_shards_of_one(tmp_path, monkeypatch):
    rng = np.random.default_rng(5)
    file = write(tmp_path / "docs.jsonl", [prose(rng) for _ in range(600)])
    monkeypatch.setattr(clean, "PART_BYTES", 2**16)
    for processes in (1, 2):
        clean_corpus(file, tmp_path / str(processes), processes=processes, bpe_vocab_size=300, progress=False)
    assert bytes_of(tmp_path / "1") == bytes_of(tmp_path / "2")


def planted(folder, mb: int) -> tuple[Counter, float]:
    """Writes test.jsonl, and docs.jsonl of `mb` MB: documentation (orig); that with 40 % of the words replaced (new),
    among them with 13 or 12 words of a test text (leak, near); and with 1 % replaced (copy). How many of each there
    are, and the share of the copies that MinHash promises to find. All keep to the rules."""
    rng, seen, base = np.random.default_rng(6), set(), []
    for package in science.installed() if not SMALL else ("networkx", "PIL"):
        for document in science.package_documents(package):
            keys = set() if why_dropped(document["text"].strip()) else set(band_keys(document["text"]).tolist())
            if keys and not keys & seen:
                base.append((document["domain"], document["text"]))
            seen |= keys
    words = np.array(" ".join(text for _, text in base[:5000]).split(), dtype=object)
    tests = [[f"q{number}" for number in rng.integers(10**6, size=40)] for _ in range(100)]  # in no documentation
    (folder / "test.jsonl").write_text("".join(json.dumps({"question": " ".join(test)}) + "\n" for test in tests))
    counts, promised, number = Counter(), [], 0
    with open(folder / "docs.jsonl", "wb") as stream:
        while stream.tell() < mb * 1e6:
            domain, original = base[number % len(base)]
            kind = (
                "orig"
                if number < len(base)
                else str(rng.choice(["new", "copy", "leak", "near"], p=[0.45, 0.53, 0.01, 0.01]))
            )
            text = original.split(" ")
            places = np.flatnonzero(rng.random(len(text)) < {"orig": 0, "copy": 0.01}.get(kind, 0.4))
            for place, word in zip(places, rng.choice(words, len(places)), strict=True):
                text[place] = word
            if kind in ("leak", "near"):
                test = tests[rng.integers(len(tests))][10 : 23 if kind == "leak" else 22]
                text.insert(rng.integers(len(text)), " ".join(test).upper())
            text, number = " ".join(text), number + 1
            if not why_dropped(text.strip()):
                row = {"id": f"{kind}-{number}", "domain": domain, "text": text}
                stream.write(json.dumps(row).encode() + b"\n")
                counts[kind] += 1
                if kind == "copy" and counts[kind] % (1 if SMALL else 50) == 0:
                    promised.append(found_share(similarity(original, text)))
    return counts, float(np.mean(promised))


def cleaned(folder, out: str, processes: int, killed_after_s: float = np.inf) -> tuple[float, float]:
    """The command on folder/docs.jsonl; seconds, and the most memory that its processes held at once, in MB."""
    small = "clean.PART_BYTES, clean.SLICE = 2**18, 2**9; " if SMALL else ""
    program = (
        f"import sys; from aiscale import cli; from aiscale.data import clean; {small}sys.exit(cli.main(sys.argv[1:]))"
    )
    words = f"data prepare {folder}/docs.jsonl --clean --against {folder}/test.jsonl --out {folder}/{out} --quiet"
    words += f" --processes {processes} --vocab-size {500 if SMALL else 8192} --shard-tokens {MB * 20_000}"
    start, most = time.monotonic(), 0
    job = psutil.Popen([sys.executable, "-c", program, *words.split()], stdout=subprocess.DEVNULL)
    while job.poll() is None:
        if time.monotonic() - start > killed_after_s:
            job.kill()
        with contextlib.suppress(psutil.Error):
            most = max(most, sum(p.memory_full_info().pss for p in (job, *job.children(recursive=True))))
        time.sleep(0.1)
    assert job.returncode == 0 or time.monotonic() - start > killed_after_s
    return time.monotonic() - start, most / 1e6


@pytest.mark.extended
@pytest.mark.timeout(900 if SMALL else 4 * 3600)
@pytest.mark.skipif(not psutil.LINUX, reason="measures proportional set sizes, which only Linux has")
def test_planted_copies_and_test_lines_are_found_in_bounded_memory_and_a_kill_changes_nothing(tmp_path):
    """Two processes, killed and called again, against one (from 20 MB on against two)."""
    counts, promised = planted(tmp_path, MB)
    seconds, _ = cleaned(tmp_path, "whole", 1 if SMALL else 2)
    moment = random.uniform(0.1, 0.9) * seconds
    cleaned(tmp_path, "killed", 2, moment)
    stood = sum(file.stat().st_size for file in (tmp_path / "killed").rglob("*.tokens"))
    again_s, most_mb = cleaned(tmp_path, "killed", 2)
    whole = bytes_of(tmp_path / "whole")
    assert len(whole) >= 3 and whole == bytes_of(tmp_path / "killed") and not list((tmp_path / "killed").rglob(".*"))
    report = json.loads((tmp_path / "killed/report.json").read_text())
    assert report == json.loads((tmp_path / "whole/report.json").read_text())
    stayed, dropped = Counter(d["id"].split("-")[0] for d in kept(tmp_path / "killed")), report["dropped"]
    recall = 1 - stayed["copy"] / counts["copy"]
    precision = (counts["copy"] - stayed["copy"]) / dropped["near duplicate"]["documents"]
    print(
        f"{MB} MB, {dict(counts)}; whole {seconds:.0f} s; killed after {moment:.0f} s, {stood / 1e6:.1f} MB of shards"
    )
    print(f"stood; then {again_s:.0f} s, {most_mb:.0f} MB at most. Copies found {recall:.4f}, promised {promised:.4f};")
    print(
        f"precision {precision:.4f}; test lines found {1 - stayed['leak'] / counts['leak']:.4f}; stayed {dict(stayed)}"
    )
    assert set(dropped) == {"near duplicate", "in a test set"} and report["read"]["documents"] == counts.total()
    assert dropped["in a test set"]["documents"] == counts["leak"] and not stayed["leak"]
    assert stayed["near"] == counts["near"] and abs(recall - promised) < 0.03 and precision > 0.99
    assert most_mb < MOST_MB


def test_packages_are_read_as_text_and_named_with_their_licence(tmp_path, capsys):
    documents = list(science.package_documents("networkx"))
    assert len(documents) > 1000 and {d["domain"] for d in documents} == {"mathematics"}
    import networkx

    known = networkx.pagerank.__doc__.strip().split("\n")[0]
    assert any(d["text"].startswith(known) for d in documents)
    (tmp_path / "test.jsonl").write_text(json.dumps({"question": documents[100]["text"]}) + "\n")
    command = ["data", "prepare", "package:mpmath", "--clean", "--against", str(tmp_path / "test.jsonl"), "--quiet"]
    assert cli.main([*command, "--out", str(tmp_path / "out"), "--vocab-size", "300", "--json"]) == 0
    source = json.loads(capsys.readouterr().out)["sources"]["mpmath"]
    assert source["licence"].startswith("BSD") and source["documents"] > 50
