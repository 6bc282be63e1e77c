"""The text of a corpus, in pieces: a file, a folder of files, or one of two that Python brings.

    for piece in find_text("my_texts/"):
        ...

`embedded` is the English documentation in CPython, `stdlib` the source of its modules. Both differ
between Python versions.
"""

from __future__ import annotations

import codecs
import hashlib
import importlib
import os
import re
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TextIO

from aiscale.errors import ConfigError

BUILT_IN = ("embedded", "stdlib")
PACKED = (".gz", ".xz", ".zst", ".bz2")
READ_CHARS = 2**20
UNDERLINE = re.compile(r"\s*([*=\-~^\"#])\1{2,}")


def find_text(corpus: str) -> Iterator[str]:
    """The text of a built-in corpus, a file or a folder; raises ConfigError if there is none."""
    if corpus == "embedded":
        return iter([embedded_text()])
    files = stdlib_files() if corpus == "stdlib" else find_files(corpus)
    if records := [file for file in files if file.suffix in (".jsonl", ".parquet", *PACKED)]:
        raise ConfigError(
            f"corpus {corpus} has {records[0]}, which holds records or is packed: name plain text"
        )
    return read_files(files)


def find_files(corpus: str) -> list[Path]:
    """That file, or every file below that folder, sorted by name, without hidden ones."""
    path = Path(corpus).expanduser()
    if not path.exists():
        raise ConfigError(f"corpus {corpus!r} does not exist: name a file or a folder of files")
    files = [path]
    if path.is_dir():
        files = sorted(_files_below(path))
        if not files:
            raise ConfigError(f"corpus folder {path} holds no files: put UTF-8 text files into it")
    if not any(file.stat().st_size for file in files):
        raise ConfigError(f"corpus {path} is empty: put UTF-8 text into it")
    return files


def _files_below(folder: Path, above: tuple[Path, ...] = ()) -> Iterator[Path]:
    """The files of a folder and of the folders in it, hidden ones left out; links are followed."""
    here = folder.resolve()
    if here in above:
        return  # a link to a folder above it, whose files are read anyway
    try:
        inside = list(folder.iterdir())
    except OSError as error:
        what = f"corpus folder {folder} cannot be read ({error.strerror})"
        raise ConfigError(f"{what}: make it readable, or move it away") from None
    for path in inside:
        if path.name.startswith("."):
            continue
        if path.is_dir():
            yield from _files_below(path, (*above, here))
        elif path.is_file():
            yield path
        elif path.is_symlink():
            what = f"{path} is a link to {os.readlink(path)}, which is not there"
            raise ConfigError(f"{what}: mend the link or delete it")


def read_files(files: list[Path]) -> Iterator[str]:
    """The text of all files, joined by line ends."""
    for number, file in enumerate(files):
        if number:
            yield "\n"
        yield from _read_file(file)


def _read_file(file: Path) -> Iterator[str]:
    with open_text(file) as stream:
        while piece := stream.read(READ_CHARS):
            yield piece


@contextmanager
def open_text(file: Path) -> Iterator[TextIO]:
    """A stream of UTF-8 text without a byte-order mark, with Unix line ends; it raises ConfigError
    at other bytes."""
    try:
        refuse_utf16(file)
        with open(file, encoding="utf-8-sig") as stream:
            try:
                yield stream
            except UnicodeDecodeError as error:
                offset = stream.buffer.tell() - len(error.object) + error.start
                raise ConfigError(
                    f"{file} is not UTF-8 text (byte {error.object[error.start]:#04x} at offset "
                    f"{offset}): convert it from its own encoding with `iconv -f ENCODING -t "
                    "utf-8`, or take it out of the corpus"
                ) from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None


def refuse_utf16(file: Path) -> None:
    """Raise ConfigError if a file begins as UTF-16 or UTF-32 text does: with their byte-order mark
    or, without one, with ASCII characters and the zeros beside them."""
    with open(file, "rb") as stream:
        start = stream.read(1024)
    zeros = start.count(0)
    if start.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        encoding, sign = "UTF-32", f"begins with bytes {start[:4].hex(' ')}"
    elif start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding, sign = "UTF-16", f"begins with bytes {start[:2].hex(' ')}"
    elif start and zeros >= len(start) / 3:
        encoding = "UTF-32" if zeros > 0.6 * len(start) else "UTF-16"
        encoding += "LE" if start[0] else "BE"
        sign = f"has {zeros} zeros in its first {len(start)} bytes"
    else:
        return
    raise ConfigError(
        f"{file} {sign}, as {encoding} text does, but a corpus is UTF-8: convert it with "
        f"`iconv -f {encoding} -t utf-8`, or take it out of the corpus"
    )


# Typographic characters of the documentation -> ASCII, so that one character is one byte.
_ASCII = {
    "‘": "'",
    "’": "'",
    "“": '"',
    "”": '"',
    "–": "-",
    "—": "--",
    "…": "...",
    "°": " degrees",
    "ß": "ss",
}


@cache
def embedded_text() -> str:
    """CPython's documentation topics, sorted by name, as ASCII prose, about 350 kB.

    Depends only on Python's version. Many topics include others: repeated paragraphs are left out,
    since they would leak into validation.
    """
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        raise ConfigError(
            "this Python has no pydoc_data.topics, the text of corpus embedded: "
            "use stdlib, or a text file"
        ) from None
    seen: set[str] = set()
    paragraphs = []
    for name in sorted(topics):
        for paragraph in re.split(r"\n\s*\n", topics[name].strip("\n")):
            lines = [
                line.rstrip() for line in paragraph.splitlines() if not UNDERLINE.fullmatch(line)
            ]
            key = " ".join(" ".join(lines).split())
            if key and key not in seen and "::=" not in key:
                seen.add(key)
                paragraphs.append("\n".join(lines))
    text = "\n\n".join(paragraphs) + "\n"
    return text.translate(str.maketrans(_ASCII)).encode("ascii", errors="ignore").decode()


def stdlib_files() -> list[Path]:
    """The modules of CPython's standard library, about 11 MB, in an order that mixes its packages.
    Without tests and tables (encodings, and the documentation that is corpus embedded)."""
    root = Path(sysconfig.get_paths()["stdlib"])
    out = {
        "test",
        "tests",
        "idle_test",
        "site-packages",
        "dist-packages",
        "__pycache__",
        "encodings",
        "pydoc_data",
    }
    files = [
        path
        for path in root.rglob("*.py")
        if out.isdisjoint(path.relative_to(root).parts) and path.is_file()
    ]
    return sorted(
        files, key=lambda path: hashlib.sha256(path.relative_to(root).as_posix().encode()).digest()
    )
