"""The documents of files in the formats of published corpora, streamed.

    for document in documents_of(Path("papers.jsonl"), "text"):   # the first bad record is an error
    left_out = {}
    for document in documents_of(Path("papers.jsonl"), "text", left_out):  # notes it there, goes on

Text files and JSON lines, these also packed by gzip, xz or bzip2, are read directly; the rest
(parquet, JSON, zstd) by the library `datasets`. A text file is one document, in pieces.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import json
import lzma
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from aiscale.errors import ConfigError
from aiscale.train.prepare.corpus import PACKED, read_files, refuse_utf16

#: suffix -> name of the format in `datasets`
BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}
OPENERS = {".jsonl": open, ".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}

Document = Iterable[str]  #: in pieces, since a document may be larger than memory
LeftOut = dict[str, str]  #: "FILE:LINE" of a record that is left out -> why


def documents_of(file: Path, field: str, left_out: LeftOut | None = None) -> Iterator[Document]:
    """The documents of one file: the file itself, or the `field` of its records."""
    records = records_of(file, field, left_out)
    if records is None:
        yield read_files([file])
    else:
        yield from ([record[field]] for record in records)


def records_of(file: Path, field: str, left_out: LeftOut | None = None) -> Iterator[dict] | None:
    """The records of a file, each with a text in `field`; None: it is plain text."""
    suffixes = [suffix for suffix in file.suffixes if suffix not in PACKED]
    builder = BUILDERS.get(suffixes[-1]) if suffixes else None
    if suffixes[-1:] == [".jsonl"] and file.suffix in OPENERS:
        return good_records(json_lines(file), field, left_out)
    if builder:
        rows = load_rows(str(file), path=builder, data_files=str(file), streaming=True)
    elif file.suffix in PACKED:
        packed = load_rows(
            str(file), path="text", data_files=str(file), streaming=True, sample_by="document"
        )
        rows = ({field: row["text"]} for row in packed)
    else:
        return None
    return good_records(numbered(rows, str(file)), field, left_out)


def json_lines(file: Path) -> Iterator[tuple[str, bytes]]:
    """("FILE:LINE", line) of the lines that are not empty."""
    if file.suffix == ".jsonl":
        refuse_utf16(file)
    try:
        with OPENERS[file.suffix](file, "rb") as stream:
            for number, line in enumerate(stream, 1):
                line = line.removeprefix(codecs.BOM_UTF8).strip()  # where files were joined
                if line:
                    yield f"{file}:{number}", line
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        what = f"{file} cannot be read ({error}): fetch it again, or leave it out"
        raise ConfigError(what) from None


def load_rows(what: str, **arguments) -> Iterable[dict]:
    from datasets import load_dataset

    try:
        return load_dataset(split="train", **arguments)
    except Exception as error:  # the library passes on the errors of its many back ends
        raise ConfigError(
            f"{what} cannot be read by `datasets` ({str(error)[:120]!r}): check the name and the "
            "network, or fetch its files elsewhere and name them instead"
        ) from None


def numbered(rows: Iterable[dict], what: str) -> Iterator[tuple[str, dict]]:
    """("WHAT, record N", row) of the rows that `datasets` reads."""
    number = 0
    try:
        for number, row in enumerate(rows, 1):
            yield f"{what}, record {number}", row
    except Exception as error:  # see load_rows
        reason = str(error.__cause__ or error)[:120]
        raise ConfigError(
            f"{what} cannot be read by `datasets` after record {number} ({reason!r}): mend it, or "
            "write its records as JSON lines"
        ) from None


def good_records(
    rows: Iterable[tuple[str, bytes | dict]], field: str | None, left_out: LeftOut | None = None
) -> Iterator[dict]:
    """The records with a text in `field` (None: any object). The first other one raises
    ConfigError or, with `left_out`, each is noted there."""
    for place, row in rows:
        try:
            record = parse(row) if isinstance(row, bytes) else row
            if field is not None:
                check_text(record, field)
        except ValueError as error:
            if left_out is None:
                raise ConfigError(
                    f"{place} {error}: mend it, or leave such records out with --skip-bad-records"
                ) from None
            left_out[place] = str(error)
        else:
            yield record


def parse(line: bytes) -> dict:
    """The object of a JSON line; ValueError says what else the line is."""
    try:
        hooks = {"object_pairs_hook": _without_repeated_keys, "parse_int": _whole_number}
        record = json.loads(line.decode(), **hooks)
    except UnicodeDecodeError as error:
        bad = f"byte {line[error.start]:#04x} at offset {error.start} of the line"
        raise ValueError(f"is not UTF-8 ({bad})") from None
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")
        raise ValueError(f"is not JSON ({what} at character {error.colno})") from None
    except RecursionError:
        raise ValueError("is not readable JSON (too deeply nested)") from None
    if not isinstance(record, dict):
        raise ValueError(f"is {_kind(record)}, not an object {{...}}")
    for key, value in record.items():
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError as error:
                half = f"\\u{ord(value[error.start]):04x}"
                what = f"has {half} in {key!r}, half of a surrogate pair, which is no character"
                raise ValueError(what) from None
    return record


def _without_repeated_keys(pairs: list[tuple[str, object]]) -> dict:
    record = dict(pairs)
    if len(record) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"has the key {repeated!r} twice")
    return record


def _whole_number(digits: str) -> int | float:
    """Python makes no int of more than 4,300 digits."""
    return int(digits) if len(digits) < 4300 else float(digits)


def check_text(record: dict, field: str) -> None:
    """Raise ValueError if a record has no text in `field`."""
    if field not in record:
        keys = ", ".join(map(repr, record)) or "none"
        raise ValueError(f"has no field {field!r} (its fields: {keys}; --field names the text's)")
    if not isinstance(record[field], str):
        raise ValueError(f"has {_kind(record[field])} in field {field!r}, not a text")


def _kind(value: object) -> str:
    """What JSON calls a value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    kinds = {int: "a number", float: "a number", str: "a text", list: "a list"}
    return kinds.get(type(value), "an object")
