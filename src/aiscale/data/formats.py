"""The documents of files in the formats of published corpora, with the library `datasets` where it is needed.

    for document in documents_of(Path("pages.parquet"), "text"):      # also JSON lines, and packed by gzip, xz, zstd
        "".join(document)

Text files are read directly; the rest needs `pip install 'aiscale[data]'`. Documents come in pieces and are streamed,
so that neither a file nor a document need fit in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from aiscale.config import ConfigError
from aiscale.data.corpus import read_files

BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}  #: suffix -> name of the format in `datasets`
PACKED = (".gz", ".xz", ".zst", ".bz2")

Document = Iterable[str]  #: in pieces, since a document may be larger than memory


def documents_of(file: Path, field: str) -> Iterator[Document]:
    """The documents of one file: the file itself, or the `field` of its records."""
    suffixes = [suffix for suffix in file.suffixes if suffix not in PACKED]
    builder = BUILDERS.get(suffixes[-1]) if suffixes else None
    if builder:
        yield from texts_of(load_rows(str(file), path=builder, data_files=str(file), streaming=True), str(file), field)
    elif file.suffix in PACKED:
        rows = load_rows(str(file), path="text", data_files=str(file), streaming=True, sample_by="document")
        yield from texts_of(rows, str(file), "text")
    else:
        yield read_files([file])


def load_rows(what: str, **arguments) -> Iterable[dict]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise ConfigError(f"reading {what} needs the library `datasets`: `make setup` installs it") from None
    try:
        return load_dataset(split="train", **arguments)
    except Exception as error:  # the library passes on the errors of its many back ends
        raise ConfigError(
            f"{what} cannot be read by `datasets` ({first_line(error)}): check the name and the network, or fetch "
            "its files elsewhere and name them instead"
        ) from None


def texts_of(rows: Iterable[dict], what: str, field: str) -> Iterator[Document]:
    try:
        for row in rows:
            if not isinstance(row.get(field), str):
                raise ConfigError(
                    f"a record of {what} has no text in field {field!r}: its fields are {', '.join(row)}; "
                    "name the right one with --field"
                )
            yield [row[field]]
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{what} cannot be read by `datasets`: {first_line(error)}") from None


def first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
