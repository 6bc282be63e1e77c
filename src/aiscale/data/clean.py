"""Clean a corpus before it is tokenized: filters, near duplicates, texts of a test set; then BPE and shards.

    aiscale data prepare science --out corpora/science
    aiscale data prepare papers/ --clean --against test.jsonl --processes 8 --out corpora/papers

    report = clean_corpus("papers/", "corpora/papers", against=[text, ...], processes=8)   # or ["package:numpy", ...]
    print(describe(report))                                 # what was dropped, and why
    for document in kept("corpora/papers"): ...             # id, domain, source, text

The steps, each by a published rule:

    filters      English and the quality rules of Gopher (Rae et al. 2021, table A1)
    test sets    a document that shares 13 words in a row with a text of `against` is dropped (Brown et al. 2020)
    duplicates   MinHash of 5 words in a row, 14 bands of 8 rows (as FineWeb, Penedo et al. 2024): of documents with
                 similarity s a share of 1 - (1 - s^8)^14 is found; the first stays
    tokens       BPE learnt from an even sample, then shards in `data/shards.py`'s format: one folder for all, and one
                 for each domain; documents in an order drawn at random, which is always the same

Processes share the parts (PART_BYTES of JSON lines; other files and packages are not divided) and write what they
find; after an interruption the same call goes on with the parts that are missing, and ends with the same bytes. What is
in memory does not grow with the corpus: the keys of a part's documents, a slice of SLICE keys while duplicates are
sought, a block of text while it is tokenized; the one exception is a byte a document.
"""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import os
import re
import unicodedata
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache, partial
from itertools import product
from pathlib import Path

import numpy as np
from tqdm import tqdm

from aiscale.config import ConfigError, require_writable
from aiscale.data import science
from aiscale.data.corpus import find_files, identity
from aiscale.data.filters import BANDS, NGRAM, band_keys, ngrams, why_dropped
from aiscale.data.formats import records_of
from aiscale.data.order import permute
from aiscale.data.shards import MANIFEST, TOKENIZER, Text, read_manifest, replacing, write_atomically, write_corpus
from aiscale.data.tokenizers import Tokenizer, learn
from aiscale.processes import die_with

PART_BYTES = 2**24
CUT_CHARS = 2**15  #: a text file is cut at empty lines into documents of about this size
LEARN_CHARS = 2**25  #: BPE is learnt from a sample of this size
SLICE = 2**21  #: of a band about so many keys are sorted at a time, 64 bytes each
PLAN, KEPT, REPORT, AGAINST = "plan.json", "kept.rows", "report.json", "against.npy"
_ROW = np.dtype([("offset", "<u8")] + [(name, "<u4") for name in ("part", "length", "bytes", "domain", "source")])

Piece = tuple[str, int, int]  #: of a file: name, first byte, byte after the last; a package has "package:" before it


def _plan(sources: Sequence[str]) -> tuple[str, list[list[Piece]]]:
    """(identity, parts of about PART_BYTES): JSON lines are divided, other files are not."""
    if list(sources) == ["science"]:
        sources = [f"package:{package}" for package in science.installed()]
    if all(source.startswith("package:") for source in sources):
        packages = [source.removeprefix("package:") for source in sources]
        if missing := [package for package in packages if not science.is_installed(package)]:
            raise ConfigError(f"package:{missing[0]} is not installed: install it, or name other packages")
        about = [(package, science.about(package)) for package in packages]
        return repr(about), [[(f"package:{package}", 0, 0)] for package in packages]
    files, parts, size = [file for source in sources for file in find_files(source)], [[]], 0
    for file in files:
        n = file.stat().st_size
        step = PART_BYTES if file.suffix == ".jsonl" else max(n, 1)
        for start in range(0, n, step):
            if size >= PART_BYTES:
                parts, size = [*parts, []], 0
            parts[-1].append((str(file), start, min(start + step, n)))
            size += min(step, n - start)
    return identity(files), parts


def _documents(piece: Piece, field: str) -> Iterator[dict[str, str]]:
    name, start, stop = piece
    if name.startswith("package:"):
        yield from science.package_documents(name.removeprefix("package:"))
        return
    file = Path(name)
    domain = file.parent.name
    records = records_of(file, field, start, stop)
    for number, row in enumerate(({field: text} for text in _cut(file)) if records is None else records):
        yield {
            "id": str(row.get("id", f"{file.name}:{start}:{number}")),
            "domain": re.sub(r"\W+", "_", str(row.get("domain", domain))),  # it names a folder
            "source": str(row.get("source", file.name)),
            "text": row[field],
        }


def _cut(file: Path) -> Iterator[str]:
    held, size = [], 0
    with open(file, encoding="utf-8-sig", errors="replace") as stream:
        for line in stream:
            held.append(line)
            size += len(line)
            if size >= CUT_CHARS and (not line.strip() or size >= 32 * CUT_CHARS):
                yield "".join(held)
                held, size = [], 0
    yield "".join(held)


def _clean_part(part: tuple[int, list[Piece]], folder: Path, field: str) -> None:
    """Filter a part; writes its documents, their band keys and, last, its counts."""
    (number, pieces), against, counts = part, np.load(folder / AGAINST), Counter()
    rows, keys, offset = [], [], 0
    with replacing(folder / f"{number:05d}.jsonl") as lines:
        for document in (document for piece in pieces for document in _documents(piece, field)):
            text = unicodedata.normalize("NFC", document["text"]).replace("\r\n", "\n").strip()
            reason = why_dropped(text)
            if not reason and len(against):
                grams = ngrams(text, NGRAM)
                places = np.minimum(np.searchsorted(against, grams), len(against) - 1)
                reason = "in a test set" if (against[places] == grams).any() else ""
            where, n_bytes = (document["domain"], document["source"]), len(text.encode())
            counts[(*where, reason, "documents")] += 1
            counts[(*where, reason, "bytes")] += n_bytes
            if not reason:
                line = json.dumps({**document, "text": text}, ensure_ascii=False).encode() + b"\n"
                rows.append((offset, number, len(line), n_bytes, *(zlib.crc32(name.encode()) for name in where)))
                offset += lines.write(line)
                keys.append(band_keys(text))
    _write(folder / f"{number:05d}.rows.npy", np.array(rows, _ROW))
    _write(folder / f"{number:05d}.keys.npy", np.array(keys, np.uint64).reshape(-1, BANDS).T.copy())
    write_atomically(folder / f"{number:05d}.json", json.dumps([[*key, n] for key, n in counts.items()]).encode())


def _shared(work: Callable, jobs: Sequence, processes: int) -> Iterator[None]:
    """work(job) for each job, by so many processes."""
    if processes == 1 or len(jobs) < 2:
        yield from map(work, jobs)
        return
    spawn = multiprocessing.get_context("spawn")  # a forked child would share torch's threads
    with ProcessPoolExecutor(processes, spawn, die_with, (os.getpid(),)) as pool:
        yield from pool.map(work, jobs)


def _again(folder: Path, sizes: list[int]) -> np.ndarray:
    """Whether each document of the parts, `sizes` many in each, shares a band's key with an earlier one."""
    again, n_slices = np.zeros(sum(sizes), dtype=bool), np.uint64(1 + sum(sizes) // SLICE)
    for band, number in product(range(BANDS), np.arange(n_slices)):
        columns, places, start = [], [], 0
        for n, size in enumerate(sizes):
            column = np.load(folder / f"{n:05d}.keys.npy", mmap_mode="r")[band]
            inside = np.flatnonzero(column % n_slices == number)
            columns.append(column[inside])
            places.append(inside + start)
            start += size
        column, place = np.concatenate(columns), np.concatenate(places)
        order = np.argsort(column, kind="stable")
        again[place[order[1:][column[order[1:]] == column[order[:-1]]]]] = True
    return again


def _deduplicate(folder: Path, n_parts: int) -> Counter:
    """Writes the rows of the documents that stay; counts them by domain and by source, and the duplicates."""
    parts = [folder / f"{n:05d}.rows.npy" for n in range(n_parts)]
    again, counts, start = _again(folder, [len(np.load(part, mmap_mode="r")) for part in parts]), Counter(), 0
    with replacing(folder / KEPT) as stream:
        for part in parts:
            rows = np.load(part)
            gone = again[start : start + len(rows)]
            start += len(rows)
            stays = rows[~gone]
            stream.write(stays.tobytes())
            counts["again", 0, "documents"] += int(gone.sum())
            counts["again", 0, "bytes"] += int(rows["bytes"][gone].sum())
            for kind in ("domain", "source"):
                names, group = np.unique(stays[kind], return_inverse=True)
                sizes = np.bincount(group).tolist(), np.bincount(group, stays["bytes"]).tolist()
                for name, n_documents, n_bytes in zip(names.tolist(), *sizes, strict=True):
                    counts[kind, name, "documents"] += n_documents
                    counts[kind, name, "bytes"] += int(n_bytes)
    return counts


def clean_corpus(
    sources: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    against: Iterable[str] = (),
    bpe_vocab_size: int = 8192,
    field: str = "text",
    processes: int = 1,
    shard_tokens: int = 2**24,
    progress: bool = True,
) -> dict:
    """Clean `sources` (science, or files and folders) into `out`; returns the report, which is also OUT/report.json.

    `out` then holds shards for DataConfig.corpus: OUT/all, and OUT/DOMAIN for each domain if there are several. A
    record's domain is its field of that name, or the folder it lies in. Raises ConfigError with one line.
    """
    sources = [str(s) for s in ([sources] if isinstance(sources, str | Path) else sources)]
    for option, number in (("--processes", processes), ("--shard-tokens", shard_tokens)):
        if number < 1:
            raise ConfigError(f"{option} is {number}: it must be at least 1")
    folder, texts = Path(out), list(against)
    source, parts = _plan(sources)
    plan = {"source": source, "field": field, "bpe": bpe_vocab_size, "shard": shard_tokens}
    plan["layout"] = 3  # of the files between, and of the rules
    grams = np.unique(np.concatenate([np.empty(0, np.uint64), *(ngrams(text, NGRAM) for text in texts)]))
    plan["against"] = hashlib.sha256(grams.tobytes()).hexdigest()
    if _begin(folder, plan, grams):
        return json.loads((folder / REPORT).read_text())
    todo = [n for n in range(len(parts)) if not (folder / f"{n:05d}.json").exists()]
    work = partial(_clean_part, folder=folder, field=field)
    with tqdm(total=len(parts), initial=len(parts) - len(todo), desc="clean", unit="part", disable=not progress) as bar:
        for _ in _shared(work, [(n, parts[n]) for n in todo], processes):
            bar.update()
    report = _report(folder, len(parts), _deduplicate(folder, len(parts)))
    if not report["kept"]["documents"]:
        raise ConfigError(f"no document of {', '.join(sources)} is left: see the counts in {folder}/00000.json")
    report |= {"test_texts": len(texts), "test_ngrams": len(grams)}
    for package in report["sources"] if parts[0][0][0].startswith("package:") else ():
        report["sources"][package] |= science.about(package)
    _tokenize(folder, report, bpe_vocab_size, shard_tokens, processes, progress)
    write_atomically(folder / REPORT, json.dumps(report, indent=1).encode())
    return report


def _begin(folder: Path, plan: dict, grams: np.ndarray) -> bool:
    """Whether the folder is finished; raises ConfigError if it was begun with another plan."""
    text = json.dumps(plan, sort_keys=True)
    require_writable(folder, "--out")
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / PLAN).exists() and (folder / PLAN).read_text() != text:
        raise ConfigError(f"{folder} was begun with other texts or sizes: choose another --out, or delete it")
    for unfinished in folder.rglob(".*.*.*.????????"):  # what a killed process was writing
        unfinished.unlink()
    if not (folder / PLAN).exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty and was not made by this command: choose another --out")
    write_atomically(folder / PLAN, text.encode())
    _write(folder / AGAINST, grams)
    return (folder / REPORT).exists()


def _write(file: Path, array: np.ndarray) -> None:
    with replacing(file) as stream:
        np.save(stream, array)


def kept(folder: str | Path, domain: str = "") -> Iterator[dict[str, str]]:
    """The documents that stayed, of one domain or all, in an order drawn at random: id, domain, source, text."""
    folder, rows = Path(folder), np.memmap(Path(folder) / KEPT, _ROW, "r")
    open_part = lru_cache(maxsize=256)(lambda part: open(folder / f"{part:05d}.jsonl", "rb"))
    for start in range(0, len(rows), 2**16):
        some = rows[permute(np.arange(start, min(start + 2**16, len(rows))), len(rows), 0, 0)]
        chosen = some[some["domain"] == zlib.crc32(domain.encode())] if domain else some
        for offset, part, length, *_ in chosen.tolist():
            stream = open_part(part)
            stream.seek(offset)
            yield json.loads(stream.read(length))


def _tokenize(folder: Path, report: dict, vocab_size: int, shard_tokens: int, processes: int, progress: bool) -> None:
    """BPE from every k-th document, then the shards of all and of each domain; their tokens go into the report."""
    file, every = folder / TOKENIZER, math.ceil(report["kept"]["bytes"] / LEARN_CHARS)
    if not file.exists():
        sample = (d["text"] + "\n" for number, d in enumerate(kept(folder)) if number % every == 0)
        write_atomically(file, learn("bpe", sample, bpe_vocab_size=vocab_size).to_json().encode())
    names = [name for name, facts in report["domains"].items() if facts["documents"] and name != "all"]
    facts = {"all": report["kept"], **{name: report["domains"][name] for name in names if len(names) > 1}}
    jobs = [(row, name, facts[name]["bytes"]) for row, name in enumerate(facts)]
    for _ in _shared(partial(_write_shards, folder, shard_tokens, progress), jobs, processes):
        pass
    for name in facts:
        facts[name]["tokens"] = read_manifest(folder / name).tokens


def _write_shards(folder: Path, shard_tokens: int, progress: bool, job: tuple[int, str, int]) -> None:
    row, name, n_bytes = job
    if (folder / name / MANIFEST).exists():
        return
    tokenizer = Tokenizer.from_json((folder / TOKENIZER).read_text(encoding="utf-8"))
    domain, key = "" if name == "all" else name, hashlib.sha256((folder / PLAN).read_bytes()).hexdigest()
    text = Text(name, key, lambda: (document["text"] + tokenizer.separator for document in kept(folder, domain)))
    with tqdm(desc=name, total=n_bytes, unit="B", unit_scale=True, position=row, disable=not progress) as bar:
        write_corpus(text, tokenizer, folder / name, shard_tokens=shard_tokens, report=lambda n: bar.update(n - bar.n))


def _report(folder: Path, n_parts: int, stayed: Counter) -> dict:
    """What was read, what stayed, and what each rule dropped: documents and bytes, by domain and by source."""
    report: dict = {"read": Counter(), "kept": {}, "dropped": {}, "domains": {}, "sources": {}}
    for n in range(n_parts):
        for domain, source, reason, unit, count in json.loads((folder / f"{n:05d}.json").read_text()):
            report["read"][unit] += count
            for kind, name in (("domains", domain), ("sources", source)):
                report[kind].setdefault(name, {"read_bytes": 0})["read_bytes"] += count * (unit == "bytes")
            if reason:
                report["dropped"].setdefault(reason, Counter())[unit] += count
    units = ("documents", "bytes")
    report["dropped"]["near duplicate"] = {unit: stayed["again", 0, unit] for unit in units}
    for kind in ("domains", "sources"):
        for name, facts in report[kind].items():
            facts |= {unit: stayed[kind[:-1], zlib.crc32(name.encode()), unit] for unit in units}
    report["kept"] = {unit: sum(facts[unit] for facts in report["domains"].values()) for unit in units}
    return report


def describe(report: dict) -> str:
    """The report as a table in Markdown."""
    read, rows = report["read"], []
    for name, facts in [("read", read), *sorted(report["dropped"].items(), key=lambda item: -item[1]["bytes"])]:
        rows.append((name, facts["documents"], facts["bytes"] / 1e6, 100 * facts["bytes"] / max(read["bytes"], 1), ""))
    for name, facts in [("**kept**", report["kept"]), *sorted(report["domains"].items())]:
        share = 100 * facts["bytes"] / max(read["bytes"], 1)
        rows.append((name, facts["documents"], facts["bytes"] / 1e6, share, f"{facts.get('tokens', 0):,}"))
    lines = ["| | documents | MB | % | tokens |", "|---|--:|--:|--:|--:|"]
    lines += [f"| {what} | {n:,} | {mb:.1f} | {share:.1f} | {tokens} |" for what, n, mb, share, tokens in rows]
    return "\n".join(lines)
