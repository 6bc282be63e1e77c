"""A corpus ready for training: tokenized once, cached, memory-mapped and split.

    tokenizer = train_tokenizer(run.data)                  # on rank 0, which sends its JSON to all
    corpus = open_corpus(run.data, tokenizer=tokenizer)    # every rank
    corpus.train, corpus.val                               # tokens; slices are numpy arrays

Tokens are cached in $AISCALE_CACHE, else $XDG_CACHE_HOME/aiscale, else ~/.cache/aiscale, else (with
a note on stderr) in a temporary folder that is deleted at exit. Several processes may open the same
corpus at once.
"""

from __future__ import annotations

import atexit
import codecs
import difflib
import fcntl
import hashlib
import importlib
import os
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TextIO

import numpy as np

from aiscale.errors import ConfigError, write_whole
from aiscale.plan.config import DataConfig
from aiscale.train.prepare.stored import (
    MANIFEST,
    VERSION,
    Text,
    is_corpus,
    read_corpus,
    write_corpus,
)
from aiscale.train.prepare.tokenizers import Tokenizer, learn


@dataclass(frozen=True)
class Corpus:
    """Training tokens, validation tokens, and the text they come from."""

    name: str  #: DataConfig.corpus, or the name in a prepared folder
    train: np.ndarray
    val: np.ndarray  #: the end of the text
    tokenizer: Tokenizer
    sha256: str  #: of the text in UTF-8


def open_corpus(data: DataConfig, *, tokenizer: Tokenizer | None = None) -> Corpus:
    """The corpus of `data`, tokenized if it is not in the cache.

    Raises ConfigError with one line, also for a prepared folder whose tokenizer is not `tokenizer`
    or not of the kind `data.tokenizer`.
    """
    folder = Path(data.corpus).expanduser()
    if is_corpus(folder):
        tokens, manifest, tokenizer = read_corpus(folder, tokenizer)
        _check_kind(folder, tokenizer, data)
    else:
        text = find_text(data.corpus)
        tokenizer = tokenizer or train_tokenizer(data)
        tokens, manifest, _ = read_corpus(_tokenized(text, tokenizer), tokenizer)
    split = len(tokens) - int(len(tokens) * data.val_fraction)
    return Corpus(manifest.name, tokens[:split], tokens[split:], tokenizer, manifest.sha256)


def train_tokenizer(data: DataConfig) -> Tokenizer:
    """The tokenizer for `data`, learnt from the whole corpus; a prepared folder has its own."""
    folder = Path(data.corpus).expanduser()
    if is_corpus(folder):
        _, _, tokenizer = read_corpus(folder)
        _check_kind(folder, tokenizer, data)
        return tokenizer
    text = find_text(data.corpus)
    if data.tokenizer == "byte":
        return learn("byte", ())
    size = data.bpe_vocab_size if data.tokenizer == "bpe" else ""
    file = cache_root() / "tokenizers" / f"{data.tokenizer}{size}-{_key(text.identity)}.json"
    with suppress(OSError, ConfigError):
        return Tokenizer.from_json(file.read_text(encoding="utf-8"))
    tokenizer = learn(data.tokenizer, text.pieces(), bpe_vocab_size=data.bpe_vocab_size)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, tokenizer.to_json())
    return tokenizer


def _check_kind(folder: Path, tokenizer: Tokenizer, data: DataConfig) -> None:
    if tokenizer.kind != data.tokenizer:
        raise ConfigError(
            f"corpus {folder} was prepared with a {tokenizer.kind} tokenizer of "
            f"{tokenizer.vocab_size} tokens, but data.tokenizer is {data.tokenizer}: "
            f"set data.tokenizer={tokenizer.kind}, or prepare the corpus again"
        )


def _tokenized(text: Text, tokenizer: Tokenizer) -> Path:
    """The cache folder of this text with this tokenizer, written or completed if it is not whole.
    Processes that write it at once write the same bytes, each file in one piece."""
    name = f"{Path(text.name).stem}-{tokenizer.kind}-{_key(text.identity, tokenizer.sha256)}"
    folder = cache_root() / "tokens" / name
    if not (folder / MANIFEST).is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder.with_name(f".{name}.lock"), "w") as lock:
            with suppress(OSError):  # some file systems on clusters have no locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / MANIFEST).is_file():
                write_corpus(text, tokenizer, folder)
    return folder


def _key(*parts: str) -> str:
    return hashlib.sha256("\n".join([str(VERSION), *parts]).encode()).hexdigest()[:16]


def cache_root() -> Path:
    """The cache folder, as the module docstring says."""
    own, xdg = os.environ.get("AISCALE_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return _writable(Path(own or os.path.join(xdg or os.path.expanduser("~/.cache"), "aiscale")))


@cache
def _writable(root: Path) -> Path:
    """`root` if it is writable, else a temporary folder, one for each process."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            return root
    except OSError as error:
        temporary = Path(tempfile.mkdtemp(prefix="aiscale-cache-"))
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        print(
            f"aiscale: {root} cannot be written ({error.strerror}), so tokens go to {temporary} "
            "until this process ends: set AISCALE_CACHE to keep them",
            file=sys.stderr,
        )
        return temporary


# Sources of text ---------------------------------------------------------------------------------
# `embedded` is the English documentation in CPython, `stdlib` the source of its modules. Both
# differ between Python versions: their hash goes into run.json.


BUILT_IN = ("embedded", "stdlib")
DOWNLOADABLE = ("openwebtext", "oscar", "pile")  #: names for `aiscale data prepare NAME`
PACKED = (".gz", ".xz", ".zst", ".bz2")
READ_CHARS = 2**20
UNDERLINE = re.compile(r"\s*([*=\-~^\"#])\1{2,}")


def find_text(corpus: str) -> Text:
    """The text of DataConfig.corpus; raises ConfigError if there is none."""
    if corpus == "embedded":
        text = embedded_text()
        return Text(corpus, hashlib.sha256(text.encode()).hexdigest(), lambda: iter([text]))
    files = stdlib_files() if corpus == "stdlib" else find_files(corpus)
    if records := [file for file in files if file.suffix in (".jsonl", ".parquet", *PACKED)]:
        raise ConfigError(
            f"corpus {corpus} has {records[0]}, which holds records or is packed, and a run reads "
            f"plain text: tokenize it first with `aiscale data prepare {corpus} --out FOLDER`, and "
            "set data.corpus=FOLDER"
        )
    return Text(corpus, identity(files), lambda: read_files(files))


def _remedy(corpus: str) -> str:
    if Path(corpus).name in DOWNLOADABLE:
        return (
            f"make it with `aiscale data prepare {Path(corpus).name} --out {corpus}`, "
            "or use data.corpus=embedded"
        )
    near = difflib.get_close_matches(corpus, BUILT_IN, n=1)
    guess = f"did you mean {near[0]}? Else " if near else ""
    return f"{guess}name a text file, a folder of text files, or one of {', '.join(BUILT_IN)}"


def find_files(corpus: str) -> list[Path]:
    """That file, or every file below that folder, sorted by name, without hidden ones."""
    path = Path(corpus).expanduser()
    if not path.exists():
        raise ConfigError(f"corpus {corpus!r} does not exist: {_remedy(corpus)}")
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


def identity(files: list[Path]) -> str:
    """A hash of names, sizes and modification times; one of the content of 100 GB takes minutes."""
    facts = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def read_files(files: list[Path], separator: str = "\n") -> Iterator[str]:
    """The text of all files, joined by `separator`."""
    for number, file in enumerate(files):
        if number:
            yield separator
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
            "use data.corpus=stdlib, or a text file"
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
