"""Clean a corpus before it is tokenized: filters, near duplicates, test sets; then BPE and tokens.

aiscale data prepare papers/ --clean --against test.jsonl --processes 8 --out corpora/papers

filters      English and the quality rules of Gopher (Rae et al. 2021, table A1)
test sets    a document that shares 13 words in a row with a text of `against` is dropped (Brown et
             al. 2020)
duplicates   MinHash of 5 words in a row, 14 bands of 8 rows (as FineWeb, Penedo et al. 2024): of
             documents with similarity s a share of 1 - (1 - s^8)^14 is found; the first stays
tokens       BPE learnt from an even sample, then folders as of `stored.py`: one folder for
             all, and one for each domain; documents in an order drawn at random, which is always
             the same
"""

from __future__ import annotations

import json
import math
import multiprocessing
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

from aiscale.errors import ConfigError, require_writable, write_whole
from aiscale.train.prepare import science
from aiscale.train.prepare.corpus import find_files, open_text
from aiscale.train.prepare.filters import NGRAM, band_keys, mix, ngrams, why_dropped
from aiscale.train.prepare.formats import LeftOut, records_of
from aiscale.train.prepare.stored import TOKENIZER, replacing, write_corpus
from aiscale.train.prepare.tokenizers import learn

CUT_CHARS = 2**15  #: a text file is cut at empty lines into documents of about this size
LEARN_CHARS = 2**25  #: BPE is learnt from a sample of this size
DOCUMENTS, PLACES, REPORT = "documents.jsonl", "kept.npy", "report.json"


def _documents(
    sources: Sequence[str],
    field: str,
    left_out: LeftOut | None,
) -> Iterator[dict[str, str]]:
    if list(sources) == ["science"]:
        sources = [f"package:{package}" for package in science.installed()]
    for source in sources:
        if source.startswith("package:"):
            yield from science.package_documents(source.removeprefix("package:"))
        else:
            for file in find_files(source):
                yield from _in_file(file, field, left_out)


def _in_file(file: Path, field: str, left_out: LeftOut | None) -> Iterator[dict[str, str]]:
    records = records_of(file, field, left_out)
    if records is None:
        records = ({field: text} for text in _cut(file))
    for number, row in enumerate(records):
        yield {
            "id": str(row.get("id", f"{file.name}:{number}")),
            # it names a folder
            "domain": re.sub(r"\W+", "_", str(row.get("domain", file.parent.name))),
            "source": str(row.get("source", file.name)),
            "text": row[field],
        }


def _cut(file: Path) -> Iterator[str]:
    block, size = [], 0
    with open_text(file) as stream:
        for line in stream:
            block.append(line)
            size += len(line)
            if size >= CUT_CHARS and (not line.strip() or size >= 32 * CUT_CHARS):
                yield "".join(block)
                block, size = [], 0
    yield "".join(block)


def _examined(
    document: dict[str, str], against: np.ndarray
) -> tuple[dict[str, str], str, np.ndarray | None]:
    """(the document with its text put into one form, the rule it breaks or "", its band keys)."""
    text = unicodedata.normalize("NFC", document["text"]).replace("\r\n", "\n").strip()
    reason = why_dropped(text)
    if not reason and len(against):
        grams = ngrams(text, NGRAM)
        places = np.minimum(np.searchsorted(against, grams), len(against) - 1)
        reason = "in a test set" if (against[places] == grams).any() else ""
    return {**document, "text": text}, reason, None if reason else band_keys(text)


def clean_corpus(
    sources: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    against: Iterable[str] = (),
    bpe_vocab_size: int = 8192,
    field: str = "text",
    processes: int = 1,
    left_out: LeftOut | None = None,
    progress: bool = True,
) -> dict:
    """Clean `sources` (science, or files and folders) into `out`; returns what OUT/report.json has.

    `out` then holds folders for --text: OUT/all, and OUT/DOMAIN for each domain if there are
    several. A record's domain is its field of that name, or the folder it lies in. left_out: as
    prepare_corpus has it. Raises ConfigError with one line.
    """
    sources = [str(s) for s in ([sources] if isinstance(sources, str | Path) else sources)]
    if processes < 1:
        raise ConfigError(f"--processes is {processes}: it must be at least 1")
    folder, texts = Path(out), list(against)
    require_writable(folder, "--out")
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty: choose another --out, or delete it")
    grams = np.unique(
        np.concatenate([np.empty(0, np.uint64), *(ngrams(text, NGRAM) for text in texts)])
    )
    report = {"read": Counter(), "kept": Counter(), "dropped": {}, "domains": {}, "sources": {}}
    documents = _documents(sources, field, left_out)
    examine = partial(_examined, against=grams)
    with tqdm(desc="clean", unit="document", disable=not progress) as bar:
        if processes == 1:
            _filter(map(examine, documents), folder, report, bar)
        else:  # a forked child would share torch's threads
            with multiprocessing.get_context("spawn").Pool(processes) as pool:
                _filter(pool.imap(examine, documents, chunksize=64), folder, report, bar)
    if not report["kept"]["documents"]:
        raise ConfigError(f"no document of {', '.join(sources)} is left: {describe(report)}")
    report |= {"test_texts": len(texts), "test_ngrams": len(grams), "left_out": len(left_out or ())}
    _tokenize(folder, report, bpe_vocab_size, progress)
    write_whole(folder / REPORT, json.dumps(report, indent=1))
    return report


def _filter(examined: Iterable, folder: Path, report: dict, bar: tqdm) -> None:
    """Write the documents that break no rule, and the places of those similar to no earlier one.
    Count what was read, what stays, and what each rule drops. Similar: a band's key in common."""
    rows, keys = [], []
    with replacing(folder / DOCUMENTS) as lines:
        for document, reason, bands in examined:
            size = {"documents": 1, "bytes": len(document["text"].encode())}
            report["read"].update(size)
            for kind in ("domain", "source"):
                empty = Counter(read_bytes=0, documents=0, bytes=0)
                report[f"{kind}s"].setdefault(document[kind], empty)["read_bytes"] += size["bytes"]
            if reason:
                report["dropped"].setdefault(reason, Counter()).update(size)
            else:
                rows.append((lines.tell(), document["domain"], document["source"], size))
                keys.append(bands)
                lines.write(json.dumps(document, ensure_ascii=False).encode() + b"\n")
            bar.update()
    again = np.zeros(len(rows), dtype=bool)
    for column in np.array(keys, np.uint64).reshape(len(rows), -1).T:
        order = np.argsort(column, kind="stable")
        again[order[1:][column[order[1:]] == column[order[:-1]]]] = True
    places = []
    duplicates = report["dropped"].setdefault("near duplicate", Counter(documents=0, bytes=0))
    for (offset, domain, source, size), drop in zip(rows, again.tolist(), strict=True):
        groups = (report["kept"], report["domains"][domain], report["sources"][source])
        for group in (duplicates,) if drop else groups:
            group.update(size)
        if not drop:
            places.append((offset, list(report["domains"]).index(domain)))
    with replacing(folder / PLACES) as stream:
        np.save(stream, np.array(places, np.int64).reshape(-1, 2))


def kept(folder: str | Path, domain: int | None = None) -> Iterator[dict[str, str]]:
    """The documents that stayed, in an order drawn at random: id, domain, source, text.

    domain: its place among the report's; None: all.
    """
    places = np.load(Path(folder) / PLACES)
    places = places[np.argsort(mix(np.arange(len(places), dtype=np.uint64)))]
    with open(Path(folder) / DOCUMENTS, "rb") as lines:
        for offset in places[places[:, 1] == domain, 0] if domain is not None else places[:, 0]:
            lines.seek(offset)
            yield json.loads(lines.readline())


def _tokenize(folder: Path, report: dict, vocab_size: int, progress: bool) -> None:
    """BPE of every k-th document, then tokens of all and of each domain, counted in the report."""
    every = math.ceil(report["kept"]["bytes"] / LEARN_CHARS)
    sample = (d["text"] + "\n" for number, d in enumerate(kept(folder)) if number % every == 0)
    tokenizer = learn("bpe", sample, bpe_vocab_size=vocab_size)
    write_whole(folder / TOKENIZER, tokenizer.to_json())
    domains = [
        (name, facts, number)
        for number, (name, facts) in enumerate(report["domains"].items())
        if facts["documents"] and name != "all"
    ]
    for name, facts, number in [
        ("all", report["kept"], None),
        *(domains if len(domains) > 1 else []),
    ]:
        with tqdm(
            desc=name, total=facts["bytes"], unit="B", unit_scale=True, disable=not progress
        ) as bar:
            written = write_corpus(
                name,
                _texts(folder, number, tokenizer.separator),
                tokenizer,
                folder / name,
                report=lambda n, bar=bar: bar.update(n - bar.n),
            )
        facts["tokens"] = written.tokens


def _texts(folder: Path, domain: int | None, separator: str) -> Iterator[str]:
    return (document["text"] + separator for document in kept(folder, domain))


def describe(report: dict) -> str:
    """The report as a table in Markdown."""
    read, rows = report["read"], []
    dropped = sorted(report["dropped"].items(), key=lambda item: -item[1]["bytes"])
    for name, facts in [("read", read), *dropped]:
        share = 100 * facts["bytes"] / max(read["bytes"], 1)
        rows.append((name, facts["documents"], facts["bytes"] / 1e6, share, ""))
    for name, facts in [("**kept**", report["kept"]), *sorted(report["domains"].items())]:
        share = 100 * facts["bytes"] / max(read["bytes"], 1)
        rows.append(
            (name, facts["documents"], facts["bytes"] / 1e6, share, f"{facts.get('tokens', 0):,}")
        )
    lines = ["| | documents | MB | % | tokens |", "|---|--:|--:|--:|--:|"]
    lines += [
        f"| {what} | {n:,} | {mb:.1f} | {share:.1f} | {tokens} |"
        for what, n, mb, share, tokens in rows
    ]
    return "\n".join(lines)
