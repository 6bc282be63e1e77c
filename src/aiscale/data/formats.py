"""The documents of files in the formats of published corpora, streamed.

Text files and JSON lines are read directly; the rest (parquet, JSON, packed by gzip, xz, zstd) by the library
`datasets`. A text file is one document, in pieces.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from aiscale.config import ConfigError
from aiscale.data.corpus import read_files

BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}  #: suffix -> name of the format in `datasets`
PACKED = (".gz", ".xz", ".zst", ".bz2")

Document = Iterable[str]  #: in pieces, since a document may be larger than memory


def documents_of(file: Path, field: str) -> Iterator[Document]:
    """The documents of one file: the file itself, or the `field` of its records."""
    records = records_of(file, field)
    yield from [read_files([file])] if records is None else ([record[field]] for record in records)


def records_of(file: Path, field: str) -> Iterator[dict] | None:
    """The records of a file, each with a text in `field`; None: it is plain text."""
    suffixes = [suffix for suffix in file.suffixes if suffix not in PACKED]
    builder = BUILDERS.get(suffixes[-1]) if suffixes else None
    if file.suffix == ".jsonl":
        rows = _lines(file)
    elif builder:
        rows = load_rows(str(file), path=builder, data_files=str(file), streaming=True)
    elif file.suffix in PACKED:
        packed = load_rows(str(file), path="text", data_files=str(file), streaming=True, sample_by="document")
        rows = ({field: row["text"]} for row in packed)
    else:
        return None
    return with_text(rows, str(file), field)


def _lines(file: Path) -> Iterator[dict]:
    with open(file, "rb") as stream:
        for line in stream:
            if line.strip():
                yield json.loads(line)


def load_rows(what: str, **arguments) -> Iterable[dict]:
    from datasets import load_dataset

    try:
        return load_dataset(split="train", **arguments)
    except Exception as error:  # the library passes on the errors of its many back ends
        raise ConfigError(
            f"{what} cannot be read by `datasets` ({str(error)[:120]!r}): check the name and the network, or fetch "
            "its files elsewhere and name them instead"
        ) from None


def with_text(rows: Iterable[dict], what: str, field: str) -> Iterator[dict]:
    for row in rows:
        if not isinstance(row.get(field), str):
            raise ConfigError(
                f"a record of {what} has no text in field {field!r}: its fields are {', '.join(row)}; "
                "name the right one with --field"
            )
        yield row
