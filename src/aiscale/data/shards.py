"""Token shards: a tokenized corpus on disk, memory-mapped, so that it may be larger than memory.

    write_corpus(text, tokenizer, folder)                # streams
    tokens, manifest, tokenizer = read_corpus(folder)    # maps; reads nothing until a window is needed

A folder holds

    manifest.json      written last: a folder without it is unfinished
    tokenizer.json
    00000.npy          uint16 or uint32 tokens, as numpy saves them
    00001.npy ...

The shards are one sequence: a training window may begin in one and end in the next.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from aiscale.config import ConfigError
from aiscale.data.tokenizers import Tokenizer, regroup

VERSION = 2
SHARD_TOKENS = 2**24  #: tokens in a shard, roughly, because a shard ends with a block of text
BLOCK_CHARS = 2**22
MANIFEST, TOKENIZER = "manifest.json", "tokenizer.json"


@dataclass(frozen=True)
class Text:
    """A text that can be read several times, piece by piece."""

    name: str  #: as the user gave it
    identity: str  #: changes when the text may have changed: a hash of the text, or of file names, sizes and times
    pieces: Callable[[], Iterator[str]]  #: a fresh pass over the text


class ShardError(ConfigError):
    """Tokens on disk that cannot be used; the message names the file."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of manifest.json."""

    name: str  #: of the corpus
    source: str  #: identity of the text it was made from
    sha256: str  #: of the whole text, in UTF-8
    text_bytes: int  #: of the whole text, in UTF-8
    tokens: int
    vocab_size: int
    tokenizer_sha256: str
    shards: tuple[str, ...]  #: file names, in order
    version: int = VERSION


class Tokens:
    """A read-only sequence of tokens in several memory-mapped files.

    `len(tokens)`, `tokens[i]`, `tokens[i:j]` (a numpy array, copied if it spans files), `tokens.dtype`,
    `np.asarray(tokens)` (reads everything), and `tokens.part(i, j, name)`, a view that reads nothing.
    """

    def __init__(self, files: list[np.ndarray], name: str, start: int = 0, stop: int | None = None) -> None:
        self._files = files
        self._ends = np.cumsum([len(file) for file in files])
        self._start, self._stop = start, int(self._ends[-1]) if stop is None else stop
        self.name = name  #: for messages: "the validation part of corpus toy"
        self.dtype = files[0].dtype

    def part(self, start: int, stop: int, name: str) -> Tokens:
        return Tokens(self._files, name, self._start + start, self._start + stop)

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, key: int | slice) -> np.ndarray:
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            return self._read(self._start + start, self._start + max(start, stop))[::step]
        if not -len(self) <= key < len(self):
            raise IndexError(f"token {key} of {len(self)}")
        at = self._start + key % len(self)
        return self._read(at, at + 1)[0]

    def _read(self, start: int, stop: int) -> np.ndarray:
        first = min(int(np.searchsorted(self._ends, start, side="right")), len(self._files) - 1)
        pieces = []
        for number in range(first, len(self._files)):
            begins = int(self._ends[number]) - len(self._files[number])
            if begins >= stop and pieces:
                break
            pieces.append(self._files[number][max(start - begins, 0) : max(stop - begins, 0)])
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return np.array(self[:], dtype=dtype)


def is_corpus(folder: Path) -> bool:
    """Whether the folder holds shards, finished or not."""
    return (folder / MANIFEST).is_file() or any(folder.glob("0*.npy"))


def read_corpus(folder: Path, tokenizer: Tokenizer | None = None) -> tuple[Tokens, Manifest, Tokenizer]:
    """(tokens, manifest, tokenizer) of a folder; raises ShardError if its tokenizer is not `tokenizer`."""
    manifest, tokenizer = read_manifest(folder), tokenizer or read_tokenizer(folder)
    if manifest.tokenizer_sha256 != tokenizer.sha256:
        raise ShardError(
            f"{folder} has another vocabulary ({manifest.vocab_size} tokens, {manifest.tokenizer_sha256[:8]}) than the "
            f"{tokenizer.kind} tokenizer in use ({tokenizer.vocab_size} tokens, {tokenizer.sha256[:8]}): "
            "use the tokenizer it was made with, or prepare the corpus again"
        )
    return Tokens([_mapped(folder / name) for name in manifest.shards], f"corpus {manifest.name}"), manifest, tokenizer


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a finished folder."""
    if not folder.is_dir():
        raise ShardError(f"there is no folder {folder}: name one that `aiscale data prepare` has made")
    if not (folder / MANIFEST).is_file():
        raise ShardError(f"{folder} is an unfinished corpus (no {MANIFEST}): run `aiscale data prepare` again")
    again = f"delete {folder} and prepare the corpus again"
    try:
        tree = json.loads(_read_text(folder / MANIFEST))
        version = tree["version"]
        manifest = Manifest(**{**tree, "shards": tuple(tree["shards"])}) if version == VERSION else None
    except (AttributeError, TypeError, KeyError, ValueError):
        raise ShardError(f"{folder / MANIFEST} is damaged: {again}") from None
    if manifest is None:
        raise ShardError(f"{folder / MANIFEST} has version {version}, this aiscale reads {VERSION}: {again}")
    return manifest


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a folder, finished or not."""
    return Tokenizer.from_json(_read_text(folder / TOKENIZER))


def _mapped(file: Path) -> np.ndarray:
    try:
        return np.load(file, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise ShardError(f"shard {file} is not whole ({error}): delete its folder and prepare it again") from None


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ShardError(f"{file} cannot be read: {error}") from None


def write_corpus(
    text: Text,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    shard_tokens: int = SHARD_TOKENS,
    report: Callable[[int], None] = lambda text_bytes: None,
) -> Manifest:
    """Tokenize a text into `folder`, one block at a time; calls report(text bytes done) after each block."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / TOKENIZER, tokenizer.to_json().encode())
    digest, text_bytes, sizes, filling = hashlib.sha256(), 0, [], []
    for block in regroup(text.pieces(), BLOCK_CHARS):
        raw = block.encode()
        digest.update(raw)
        text_bytes += len(raw)
        filling.append(tokenizer.encode_array(block))
        report(text_bytes)
        if sum(map(len, filling)) >= shard_tokens:
            sizes.append(_write_shard(folder, len(sizes), filling))
            filling = []
    if sum(map(len, filling)):
        sizes.append(_write_shard(folder, len(sizes), filling))
    if not sizes:
        raise ConfigError(f"corpus {text.name} is empty: put text into it")
    manifest = Manifest(
        name=text.name,
        source=text.identity,
        sha256=digest.hexdigest(),
        text_bytes=text_bytes,
        tokens=sum(sizes),
        vocab_size=tokenizer.vocab_size,
        tokenizer_sha256=tokenizer.sha256,
        shards=tuple(map(_name, range(len(sizes)))),
    )
    write_atomically(folder / MANIFEST, json.dumps(asdict(manifest), indent=2).encode())
    return manifest


def _name(number: int) -> str:
    return f"{number:05d}.npy"


def _write_shard(folder: Path, number: int, pieces: list[np.ndarray]) -> int:
    """Write one shard; returns its tokens."""
    tokens = np.concatenate(pieces)
    with replacing(folder / _name(number)) as stream:
        np.save(stream, tokens)
    return len(tokens)


def write_atomically(file: Path, content: bytes) -> None:
    """Write all of the content or leave the file unchanged, whatever happens in between."""
    with replacing(file) as stream:
        stream.write(content)


@contextmanager
def replacing(file: Path) -> Iterator[BinaryIO]:
    """A stream to a temporary file beside `file`, which it replaces at the end, unless there is an error."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}")
    try:
        with open(temporary, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(file)
    except OSError as error:
        raise ShardError(f"{file} cannot be written: {error.strerror or error}") from None
    finally:
        temporary.unlink(missing_ok=True)
